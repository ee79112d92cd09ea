"""The operators in torch: opcheck, compile, export, autocast, checkpointing, functorch."""

from typing import Any

import pytest
import torch
from cases import Case, as_call, as_fields, make_inputs
from oracle import gradients
from processes import run_python
from torch.utils.checkpoint import checkpoint

from txl_kernels import LearnedRelativeAttention, RelAttention, rel_attention
from txl_kernels.library import define

CASES = {
    "causal with memory": Case(""),
    "window and intervals": Case("", window=4, intervals="filled"),
    "bidirectional": Case("", causal=False, M=0, intervals="padded"),
    "dropout": Case("", dropout_p=0.3),
    "[L, B, H, D] storage": Case("", layout="lbhd"),
    "one query": Case("", L=1),
}
COMPILED = ("window and intervals", "bidirectional", "dropout", "[L, B, H, D] storage")  # which takes seconds


def operator_arguments(case: Case, backend: str = "native") -> tuple[Any, ...]:
    return (*as_fields(make_inputs(case, torch.float32)), backend)


@pytest.mark.parametrize("name", ["window and intervals", "dropout"])
def test_opcheck_forward(name: str, kernel_backend: str) -> None:
    arguments = operator_arguments(CASES[name], kernel_backend)
    torch.library.opcheck(torch.ops.txl_kernels.rel_attention.default, arguments)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_opcheck_backward(case: Case, kernel_backend: str) -> None:
    given = operator_arguments(case, kernel_backend)
    arguments = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in given)
    out, lse = torch.ops.txl_kernels.rel_attention(*arguments)
    torch.library.opcheck(
        torch.ops.txl_kernels.rel_attention_backward.default,
        (torch.randn_like(out), torch.randn_like(lse), out, lse, *arguments),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("name", COMPILED)
def test_compile_fullgraph_forward_and_backward(name: str, kernel_backend: str) -> None:
    compiles_as_one_graph(name, kernel_backend)


def test_compile_fullgraph_of_the_reference() -> None:
    compiles_as_one_graph("dropout", "reference")


def compiles_as_one_graph(name: str, backend: str) -> None:
    torch.compiler.reset()
    inputs = make_inputs(CASES[name], torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(call: dict[str, Any]) -> Any:
        return rel_attention(**call, return_lse=True, backend=backend)

    got = f(as_call(inputs))
    want = rel_attention(**as_call(inputs), return_lse=True, backend=backend)
    torch.testing.assert_close(got, want)
    for (of, a), b in zip(gradients(*got, inputs).items(), gradients(*want, inputs).values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, of=of: f"{of}: {m}")


@pytest.mark.slow
def test_compile_with_inductor_and_changing_lengths() -> None:
    """One compiled function serves several segment lengths and draws its dropout seed inside the
    graph."""
    torch.compiler.reset()

    @torch.compile(fullgraph=True, dynamic=True)
    def f(call: dict[str, Any]) -> torch.Tensor:
        return rel_attention(**call).sin().sum()

    for length in (5, 9, 12):
        inputs = make_inputs(Case("", L=length), torch.float32)
        got = f(as_call(inputs))
        want = rel_attention(**as_call(inputs)).sin().sum()
        torch.testing.assert_close(got, want)
        a, b = (torch.autograd.grad(loss, inputs["r"])[0] for loss in (got, want))
        torch.testing.assert_close(a, b)

    @torch.compile(fullgraph=True)
    def dropped(call: dict[str, Any]) -> torch.Tensor:
        return rel_attention(**call, dropout_p=0.5)

    call = {n: x for n, x in as_call(make_inputs(Case(""), torch.float32)).items() if n != "dropout_p"}
    assert not torch.equal(dropped(call), dropped(call))


class Attention(torch.nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Any, k: Any, v: Any, r: Any, k_mem: Any, v_mem: Any) -> torch.Tensor:
        return rel_attention(q, k, v, r, memory=(k_mem, v_mem), **self.options)


ONE_GRAPH: dict[str, dict[str, Any]] = {
    "window": {"window": 20},
    "chunk": {"causal": False, "chunk": (4, 2), "outside": "clamp", "zero_row": 3},
    "prefix": {"prefix": 3, "window": 4, "outside": "clamp"},
    "reference": {"window": 20, "backend": "reference"},
}


@pytest.mark.parametrize(
    ("name", "strict"),
    [
        *((name, False) for name in ONE_GRAPH),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("prefix", "reference")),
    ],
)
def test_one_exported_graph_serves_all_lengths(name: str, strict: bool) -> None:
    def make(length: int, memory: int) -> tuple[torch.Tensor, ...]:
        sizes = (length, length, length, None, memory, memory)
        return tuple(torch.randn(2, 20, 8) if n is None else torch.randn(1, 2, n, 8) for n in sizes)

    length, memory = torch.export.Dim("length", max=4096), torch.export.Dim("memory", max=4096)
    shapes = {x: {2: length} for x in "qkv"} | {"r": None} | {x: {2: memory} for x in ("k_mem", "v_mem")}
    attention = Attention(ONE_GRAPH[name])
    exported = torch.export.export(attention, make(8, 5), dynamic_shapes=shapes, strict=strict)
    assert ("txl_kernels.rel_attention.default" in exported.graph_module.code) == (name != "reference")
    program = exported.module()
    for sizes in ((1, 4), (15, 3), (16, 16), (17, 2), (33, 40)):
        given = make(*sizes)
        torch.testing.assert_close(program(*given), attention(*given))


def test_compiled_call_refuses_a_short_table() -> None:
    torch.compiler.reset()
    x = make_inputs(Case("", M=0), torch.float32)
    call = as_call(x | {"r": x["r"][:, :2].detach()})
    start = torch.zeros(1, 1, dtype=torch.int32)
    for backend, error, bound in (
        ("native", ValueError, None), ("reference", RuntimeError, start),
    ):  # fmt: skip

        def f(call: dict[str, Any], backend: str = backend) -> torch.Tensor:
            return rel_attention(**call, backend=backend)

        with pytest.raises(error, match=r"r needs 6 rows|r has no row for a distance"):
            torch.compile(f, fullgraph=True, backend="aot_eager")(call | {"start": bound})


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python", "ignore:.*torch.jit.*is deprecated")
def test_jit_trace_of_a_layer() -> None:
    layer = RelAttention(8, 2, window=5)
    traced = torch.jit.trace(layer, torch.randn(1, 6, 8))
    for length in (6, 9, 20):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(traced(x), layer(x))
    with pytest.raises(TypeError, match=r"zero_row must not depend on a length under torch\.jit\.trace"):
        torch.jit.trace(RelAttention(8, 2, causal=False), torch.randn(1, 6, 8))


class WithExport(torch.nn.Sequential):
    """With such a method, torch.jit.trace compiles the properties of all modules inside."""

    @torch.jit.export
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python", "ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize("layer", [RelAttention(8, 2, window=5), LearnedRelativeAttention(8, 2, extent=9)])
def test_jit_trace_of_a_model_with_exported_methods(layer: torch.nn.Module) -> None:
    x = torch.randn(1, 6, 8)
    traced = torch.jit.trace(WithExport(layer), x)
    torch.testing.assert_close(traced(x), layer(x))
    torch.testing.assert_close(traced.twice(x), 2 * x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_jit_script_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script does not take RelAttention"):
        torch.jit.script(torch.nn.Sequential(RelAttention(8, 2)))


def test_autocast_casts_like_sdpa(backend: str) -> None:
    inputs = make_inputs(Case(""), torch.float32)
    inputs["k"] = inputs["k"].detach().bfloat16().requires_grad_()  # as a linear layer under autocast would give
    with torch.autocast(inputs["q"].device.type, torch.bfloat16):
        out, lse = rel_attention(**as_call(inputs), return_lse=True, backend=backend)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    out.sum().backward()
    assert inputs["q"].grad.dtype == torch.float32
    assert inputs["k"].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_repeats_the_dropout(backend: str, reentrant: bool) -> None:
    inputs = make_inputs(Case(""), torch.float32)

    def f(q: torch.Tensor) -> torch.Tensor:
        return rel_attention(**as_call(inputs) | {"q": q, "dropout_p": 0.5}, backend=backend)

    def gradient(run: Any) -> torch.Tensor:
        torch.manual_seed(5)
        inputs["q"].grad = None
        run().square().sum().backward()  # a reentrant checkpoint refuses torch.autograd.grad
        return inputs["q"].grad.clone()

    torch.testing.assert_close(
        gradient(lambda: checkpoint(f, inputs["q"], use_reentrant=reentrant)), gradient(lambda: f(inputs["q"]))
    )


SEED = "seed must be None or an int64 tensor of one element on cpu, got torch"
BAD_FIELDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"r": torch.zeros(2, 4, 8)}, ValueError, "r needs 11 rows"),
    ({"v_mem": None}, TypeError, "k_mem and v_mem must both be given"),
    ({"sink": torch.zeros(2, 2, 6).bfloat16()}, TypeError, "sink must be torch.float32 beside q of .*, got torch.bfloat16"),
    ({"start": torch.zeros(2, 6).long()}, TypeError, r"start must be int32 on cpu, got torch\.int64"),
    ({"dropout_p": 0.5}, TypeError, "seed must be an int64 tensor of one element where dropout_p > 0, got None"),
    *(({"dropout_p": 0.5, "seed": torch.zeros(n, dtype=dtype)}, TypeError, SEED)
      for n, dtype in ((0, torch.int64), (1, torch.float32), (2, torch.int64))),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), BAD_FIELDS)
def test_direct_calls_are_checked(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    call = as_fields(make_inputs(Case(""), torch.float32))._replace(**changed)
    with pytest.raises(error, match=message):
        torch.ops.txl_kernels.rel_attention(*call, "native")


def test_direct_calls_of_backward_and_backends_are_checked() -> None:
    op, backward = torch.ops.txl_kernels.rel_attention, torch.ops.txl_kernels.rel_attention_backward
    with pytest.raises(RuntimeError, match="native takes float32 and bfloat16, not float64"):
        op(*as_fields(make_inputs(Case(""))), "native")
    arguments = operator_arguments(Case(""))
    with pytest.raises(ValueError, match="backend must be one of native, cuda, triton, got 'reference'"):
        op(*arguments[:-1], "reference")
    out, lse = op(*arguments)
    with pytest.raises(ValueError, match="out and lse must be as the forward operator returned them"):
        backward(out, None, out.transpose(2, 3).contiguous().transpose(2, 3), lse, *arguments)
    with pytest.raises(ValueError, match=r"dout must be \[2, 2, 6, 8\] on cpu, got \[2, 2, 5, 8\]"):
        backward(out[:, :, 1:], None, out, lse, *arguments)


def test_autocast_leaves_float64_and_integers_alone() -> None:
    inputs = make_inputs(Case(""))
    with torch.autocast("cpu", torch.bfloat16):
        assert rel_attention(**as_call(inputs)).dtype == torch.float64
        with pytest.raises(TypeError, match=r"q must have a floating-point dtype, got torch\.int32"):
            rel_attention(**as_call(inputs) | {"q": inputs["q"].int()})


IMPORTED_AGAIN = """
import sys, warnings
import torch
from torch.utils.flop_counter import FlopCounterMode
import txl_kernels as older

def run(package):
    torch.manual_seed(0)
    q, r = torch.randn(2, 2, 4, 8, requires_grad=True), torch.randn(2, 4, 8)
    found = []
    for name in package.available_backends():
        attend = lambda q: package.rel_attention(q, q, q, r, dropout_p=0.5, backend=name)
        with torch.autograd.profiler.profile():  # by the operators
            out = attend(q)
        found += [attend(q), out, *torch.autograd.grad(out.sum(), q)]
        found.append(torch.vmap(lambda q: package.rel_attention(q, q, q, r, backend=name))(q.detach()[None]))
    found += package.intervals(torch.ones(1, 4, 4, dtype=torch.bool), visible=True)
    with FlopCounterMode(display=False) as counter:
        package.rel_attention(q, q, q, r)
    return [*found, torch.tensor(counter.get_total_flops())]

want = run(older)
for name in [x for x in sys.modules if x.partition(".")[0] == "txl_kernels"]:
    del sys.modules[name]
import txl_kernels as newer
assert newer is not older and newer.rel_attention is not older.rel_attention
for package in (newer, older):
    assert all(map(torch.equal, run(package), want))
"""


@pytest.mark.slow
def test_package_imported_again_gives_the_same_results() -> None:
    """It was removed from sys.modules, as plug-in hosts do; what the first import made works on."""
    run_python(IMPORTED_AGAIN)


def test_operators_of_another_version_are_not_replaced() -> None:
    """Its compiled graphs call them."""
    for names in [*vars(torch.ops.txl_kernels)["_defined"]]:
        with pytest.raises(ImportError, match=rf"\({', '.join(names)}\) cannot be replaced: start a new process"):
            define(*(f"{name}(Tensor q) -> Tensor" for name in names), implement=lambda library: None)
