"""The Triton kernels on a GPU: large tensors, no synchronization, graphs, determinism, linear
memory. `pytest -m gpu`."""

import copy
from typing import Any

import pytest
import torch
from cases import TENSORS, Case, as_call, in_float64, make_inputs
from gpu_helpers import memory_beyond_31_bits
from oracle import gradients, matches_the_reference

from txl_kernels import RelAttention, rel_attention

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def run(case: Case, dtype: torch.dtype, backend: str) -> dict[str, torch.Tensor]:
    inputs = make_inputs(case, dtype)
    if backend == "reference":
        inputs = in_float64(inputs)
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend=backend)
    return {"out": out.detach(), "lse": lse.detach()} | gradients(out, lse, inputs)


def equals_reference(case: Case, dtype: torch.dtype) -> None:
    matches_the_reference(case, dtype, "triton", of_biases=1)


def blocks_that_fill() -> int:
    """An even number of batch rows times heads, at least that of the multiprocessors."""
    return 2 * (torch.cuda.get_device_properties("cuda").multi_processor_count // 2 + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 32, 38, 41, 64, 80, 96, 128, 192, 256])
def test_head_widths(width: int, dtype: torch.dtype) -> None:
    equals_reference(Case(B=2, H=2, L=150, M=333, D=width), dtype)
    equals_reference(Case(B=1, H=2, L=3, M=700, D=width, intervals="filled"), dtype)
    for length in (3, 70):  # rows that fill the device, so that keys are not split, as in training
        equals_reference(Case(B=blocks_that_fill() // 2, H=2, L=length, M=90, D=width), dtype)


@pytest.mark.parametrize("options", [
    {"causal": False}, {"window": 100}, {"intervals": "episodes"}, {"causal": False, "intervals": "padded"},
    {"intervals": "random"}, {"dropout_p": 0.2}, {"causal": False, "dropout_p": 0.1, "intervals": "filled"},
    {"layout": "lbhd"}, {"layout": "fused"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("sizes", [(512, 512), (300, 1001), (129, 63)], ids=str)
def test_options_at_real_sizes(sizes: tuple[int, int], options: dict[str, Any]) -> None:
    length, memory = sizes
    equals_reference(Case(B=2, H=3, L=length, M=memory, D=64, **options), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_inklings_terms(width: int, dtype: torch.dtype) -> None:
    terms = {"H": 4, "Hkv": 2, "Dp": 16, "r": "1 T Dp", "zero_row": 0, "outside": "zero", "sink": "B H L"}
    for length, memory, rows in ((300, 333, 130), (3, 700, 130), (300, 0, 8)):
        case = Case(B=2, L=length, M=memory, D=width, T=rows, position_scale=1.0, scale=1 / width, **terms)
        equals_reference(case, dtype)


def test_repeated_calls_with_other_tensors() -> None:
    """The first is launched by Triton's front end, later ones by the compiled kernel itself."""
    for seed in range(4):
        for options in ({}, {"intervals": "episodes"}, {"dropout_p": 0.1}):
            equals_reference(Case(B=2, H=2, L=130, M=70, D=64, seed=seed, **options), torch.bfloat16)


def test_65536_keys() -> None:
    equals_reference(Case(B=1, H=2, L=128, M=65536 - 128, D=64), torch.bfloat16)
    equals_reference(Case(B=1, H=2, L=1, M=65535, D=64), torch.bfloat16)


def test_more_than_2_to_the_31_elements() -> None:
    """A window sees only the end of the memory, which a slice holds, too."""
    (q, k, v, r, bias), *memories = memory_beyond_31_bits(64, window=300)
    far, near = ([x.requires_grad_() for x in memory] for memory in memories)
    outs = [rel_attention(q, k, v, r, bias, bias, tuple(m), window=300, backend="triton") for m in (far, near)]
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
    dout = torch.randn_like(q)
    grads = [torch.autograd.grad(out, m, dout) for out, m in zip(outs, (far, near), strict=True)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a[:, :, -1000:], b, rtol=2e-2, atol=2e-2)
        assert not a[:, :, :-1000].any()


@pytest.mark.parametrize("case", [
    Case(B=4, H=4, L=512, M=512, D=64), Case(B=1, H=4, L=1, M=3800, D=64),
    Case(B=3, H=2, L=200, M=100, D=64, intervals="episodes", dropout_p=0.1),
], ids=["training", "decode", "bounds"])  # fmt: skip
@pytest.mark.usefixtures("the_same_bits")
def test_results_are_deterministic(case: Case) -> None:
    first = run(case, torch.bfloat16, "triton")
    for _ in range(19):
        torch.testing.assert_close(run(case, torch.bfloat16, "triton"), first, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_device_synchronization() -> None:
    inputs = make_inputs(Case(B=2, H=2, L=40, M=60, D=64, intervals="filled"), torch.bfloat16)
    dout = torch.randn_like(inputs["q"])
    for _ in range(2):  # the first compiles
        try:
            torch.cuda.set_sync_debug_mode("error")
            out = rel_attention(**as_call(inputs) | {"dropout_p": 0.1}, backend="triton")
            torch.autograd.grad(out, [inputs[n] for n in TENSORS], dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("length", [1, 8, 64])
def test_cuda_graph(length: int) -> None:
    """A captured step replays on new keys and on bounds that moved, forward and backward."""
    case = Case(B=2, H=4, L=length, M=500, D=64, intervals="filled")
    inputs, other = make_inputs(case, torch.bfloat16), make_inputs(case.but(seed=9), torch.bfloat16)
    dout = torch.randn_like(inputs["q"])

    def step() -> tuple[torch.Tensor, ...]:
        # New leaves each time: a leaf's gradient node belongs to the stream on which it was made.
        leaves = {n: inputs[n].detach().requires_grad_() for n in TENSORS}
        out = rel_attention(**as_call(inputs | leaves), backend="triton")
        return (out.detach(), *torch.autograd.grad(out, list(leaves.values()), dout))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for name, x in inputs.items():
            if isinstance(x, torch.Tensor):
                x.copy_(other[name])
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["triton", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphed_layer(dtype: torch.dtype, name: str | None) -> None:
    """`torch.cuda.make_graphed_callables` of a layer: outputs and gradients are those of the layer
    as it was, for new inputs and after an update of the parameters."""
    layer = RelAttention(d_model=128, n_head=4, backend=name).to("cuda", dtype)
    eager = copy.deepcopy(layer)

    def inputs(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        sizes = (2, 64, 128), (2, 96, 128)
        x, memory = (torch.randn(*n, generator=generator, device="cuda", dtype=dtype) for n in sizes)
        return [x.requires_grad_(), memory]

    graphed = torch.cuda.make_graphed_callables(layer, tuple(inputs(0)))
    for seed in range(1, 4):
        found = []
        for each, module in ((eager, eager), (graphed, layer)):
            x, memory = inputs(seed)
            y = each(x, memory)
            y.square().sum().backward()
            found.append([y.detach().clone(), x.grad, *(p.grad.clone() for p in module.parameters())])
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.sub_(1e-3 * parameter.grad)
                    parameter.grad = None
        torch.testing.assert_close(*found)


def peak_of_a_step(length: int) -> int:
    inputs = make_inputs(Case(B=1, H=8, L=length, M=length, D=64), torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = rel_attention(**as_call(inputs), backend="triton")
    torch.autograd.grad(out.sum(), [inputs[n] for n in TENSORS])
    return torch.cuda.max_memory_allocated() - before


def test_memory_grows_linearly() -> None:
    peak_of_a_step(1024)
    small, large = peak_of_a_step(4096), peak_of_a_step(16384)
    assert large <= 4.5 * small
    assert large < 16384 * 32768  # one byte a score of one head of eight


def test_tf32_follows_torch() -> None:
    case = Case(B=1, H=2, L=128, M=200, D=64)
    want = run(case, torch.float32, "reference")["out"]
    errors = {}
    before = torch.get_float32_matmul_precision()
    try:
        for setting in ("highest", "high"):
            torch.set_float32_matmul_precision(setting)
            errors[setting] = float((run(case, torch.float32, "triton")["out"] - want).norm() / want.norm())
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 1e-5 < errors["high"] < 1e-2


@pytest.mark.filterwarnings("default")
def test_compiled_by_inductor() -> None:
    torch.compiler.reset()
    inputs = make_inputs(Case(B=2, H=2, L=64, M=100, D=64), torch.bfloat16)

    @torch.compile(fullgraph=True)
    def f(call: dict[str, Any]) -> torch.Tensor:
        return rel_attention(**call).float().square().sum()

    got, want = f(as_call(inputs)), rel_attention(**as_call(inputs), backend="triton").float().square().sum()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    found = [torch.autograd.grad(x, [inputs[n] for n in TENSORS]) for x in (got, want)]
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
