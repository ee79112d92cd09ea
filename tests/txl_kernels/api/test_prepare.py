"""The preparation of calls: what a repeated call costs in Python, and which calls share one."""

import ast
import enum
import inspect
import random
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, as_fields, make_inputs
from internals import PREPARED_CALLS

from txl_kernels import RelAttention, prepare, rel_attention
from txl_kernels.backends import cpu, native_modules

CASE = Case("", L=9, M=7)
needs_native = pytest.mark.skipif(cpu.native.module is None, reason="needs the C++ module")


@pytest.fixture(params=["C++", "Python"])
def signature_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signatures by the C++ module, and as where there is none."""
    PREPARED_CALLS.replace(monkeypatch, {})
    if request.param == "Python":
        monkeypatch.setattr(cpu, "native", native_modules.NativeModule(why_not_loaded="no compiler"))
    elif cpu.native.module is None:
        pytest.skip("needs the C++ module")


def a_call(length: int = 8, memory_len: int = 8, requires_grad: bool = False) -> dict[str, Any]:
    def values(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.float32).requires_grad_(requires_grad)

    rows = [values(1, 2, n, 16) for n in (length, length, length, memory_len, memory_len)]
    return {
        "q": rows[0], "k": rows[1], "v": rows[2], "memory": (rows[3], rows[4]), "r": values(2, memory_len + length, 16),
        "content_bias": values(2, 16), "position_bias": values(2, 16),
    }  # fmt: skip


def entered(function: Callable[[], Any]) -> list[CodeType]:
    """Return the code of each Python function that a repeated call of `function` enters, torch's
    own included, without that of `function`."""
    found: list[CodeType] = []

    def record(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found.append(frame.f_code)

    for _ in range(3):
        function()
    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found[1:]


def length_of(code: CodeType) -> int:
    """Return the number of lines of a function, without its docstring."""
    lines, _ = inspect.getsourcelines(code)
    function = ast.parse(inspect.cleandoc("\n" + "".join(lines))).body[0]
    assert isinstance(function, (ast.FunctionDef, ast.ClassDef))
    without = len(lines)
    if isinstance(function.body[0], ast.Expr) and ast.get_docstring(function):
        without -= (function.body[0].end_lineno or 0) - function.body[0].lineno + 1
    return without


@needs_native
def test_repeated_calls_enter_few_python_functions(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts are those of Python 3.11; later versions inline comprehensions. A cached layer's
    width is small, so that its projections are torch's own."""
    plain, trained = a_call(), a_call(requires_grad=True)
    layer, x = RelAttention(128, 2).eval(), torch.randn(1, 1, 128)
    full, growing = (layer.new_cache(1, mem_len, 1) for mem_len in (4, 100))

    def forward() -> None:
        rel_attention(**plain)

    def both_ways() -> None:
        rel_attention(**trained).sum().backward()

    def cached_layer() -> None:
        layer(x, cache=full)

    def growing_cache() -> None:
        layer(x, cache=growing)

    bounds = {name: torch.full((1, 8), n, dtype=torch.int32) for name, n in (("start", 3), ("end", 16))}

    def bounded() -> None:
        rel_attention(**plain, **bounds)

    def prefixed() -> None:
        rel_attention(**plain, prefix=2)

    with torch.no_grad():
        for _ in range(8):
            layer(x, cache=full)
        counts = {f.__name__: entered(f) for f in (forward, cached_layer, growing_cache, bounded, prefixed)}
    counts["both_ways"] = entered(both_ways)
    with capsys.disabled():
        print({name: len(codes) for name, codes in counts.items()})
    most = {"forward": 12, "both_ways": 40, "cached_layer": 60, "growing_cache": 60, "bounded": 14, "prefixed": 25}
    assert all(len(codes) <= most[name] for name, codes in counts.items())
    own = {code for codes in counts.values() for code in codes if "txl_kernels" in code.co_filename}
    assert len(own) > 10
    assert [code.co_qualname for code in own if code.co_name != "<lambda>" and length_of(code) > 80] == []


class Named(str, enum.Enum):
    """Names of backends as a user's enum."""

    NATIVE = "native"
    REFERENCE = "reference"


@needs_native
def test_a_name_of_a_subclass_of_str_is_its_own_backend() -> None:
    """After a call of the same signature with another one; only the reference has a second
    derivative."""

    def second_derivative(backend: Any) -> None:
        call = a_call(requires_grad=True)
        (grad,) = torch.autograd.grad(rel_attention(**call, backend=backend).sum(), call["q"], create_graph=True)
        torch.autograd.grad(grad.square().sum(), call["q"])

    with pytest.raises(RuntimeError, match=r"twice|double backward|second"):
        second_derivative(Named.NATIVE)
    second_derivative(Named.REFERENCE)
    with pytest.raises(TypeError, match=r"backend must be None or one of .*, got int"):
        second_derivative(5)
    with pytest.raises(TypeError, match=r"backend must be None or one of .*, got list"):
        second_derivative(["native"])
    assert type(RelAttention(16, 2, backend=Named.NATIVE).backend) is str


@needs_native
@pytest.mark.parametrize("settings", [
    {"scale": 0.25}, {"softcap": 30.0}, {"dropout_p": 0.0}, {"window": 5}, {"zero_row": 3},
    {"window": (3, 2), "causal": False, "zero_row": 8}, {"scale": 0.25, "position_scale": 0.5},
], ids=str)  # fmt: skip
def test_numpy_scalars_are_prepared_as_python_scalars(settings: dict[str, Any]) -> None:
    """A repeated call enters at most twice as many functions; its result is the same."""

    def of_numpy(x: Any) -> Any:
        kinds = {int: np.int64, float: np.float64, tuple: lambda x: tuple(map(np.int32, x))}
        return kinds.get(type(x), lambda x: x)(x)

    plain, numpy = settings, {name: of_numpy(x) for name, x in settings.items()}
    inputs = a_call() | {"r": torch.randn(2, 40, a_call()["q"].size(-1))}
    outs = [rel_attention(**(inputs | given)) for given in (plain, numpy)]
    assert torch.equal(*outs)
    counts = [len(entered(lambda given=given: rel_attention(**(inputs | given)))) for given in (plain, numpy)]
    assert counts[1] <= 2 * counts[0]


@pytest.mark.usefixtures("signature_by")
@pytest.mark.parametrize("change", ["dtype", "shape", "stride", "subclass", "sparse", "negated", "zeros"])
def test_every_property_is_part_of_the_signature(change: str) -> None:
    call = as_fields(make_inputs(CASE, torch.float32))
    before = prepare.signature(call)
    assert before == prepare.signature(call._replace(q=call.q.clone()))
    k = call.k.detach()
    other = {
        "dtype": k.bfloat16(),
        "shape": k[:, :, :-1],
        "stride": k.transpose(1, 2).contiguous().transpose(1, 2),
        "subclass": k.as_subclass(type("Own", (torch.Tensor,), {})),
        "sparse": k.to_sparse(),
        "negated": torch._neg_view(k),
        "zeros": torch._efficientzerotensor(k.shape),
    }[change]
    after = prepare.signature(call._replace(k=other))
    assert after != before
    assert (after is None) == (change not in ("dtype", "shape", "stride"))


@pytest.mark.usefixtures("signature_by")
def test_settings_are_part_of_the_signature() -> None:
    call = as_fields(make_inputs(CASE, torch.float32))
    bound = torch.zeros(2, 9, dtype=torch.int32)
    others = [{"right": None}, {"left": 2}, {"zero_row": 1}, {"scale": 0.25}, {"dropout_p": 0.5}, {"start": bound},
              {"end": bound}, {"k_mem": None, "v_mem": None}]  # fmt: skip
    keys = [prepare.signature(call), *(prepare.signature(call._replace(**o)) for o in others)]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert prepare.signature(call._replace(scale=2)) != prepare.signature(call._replace(scale=2.0))
    far = prepare.signature(call._replace(left=10**30))
    assert far is None if cpu.native.module is not None else far not in keys  # C++ has 64 bits


@pytest.mark.filterwarnings("ignore:txl_kernels uses the slow reference")
@pytest.mark.usefixtures("signature_by")
@pytest.mark.parametrize("window", [None, 5])
def test_a_growing_memory_shares_one_preparation(window: int | None) -> None:
    call, seen = a_call(2, 40), set()
    k_mem, v_mem = call["memory"]
    with torch.no_grad():
        for held in range(41):
            got = rel_attention(**call | {"memory": (k_mem[:, :, :held], v_mem[:, :, :held])}, window=window)
            want = rel_attention(
                **call | {"memory": (k_mem[:, :, :held], v_mem[:, :, :held])}, window=window, backend="reference"
            )
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
            seen.add(len(PREPARED_CALLS.value))
    assert max(seen) <= 4  # by backend, without and with a memory


@pytest.mark.filterwarnings("ignore:txl_kernels uses the slow reference")
@pytest.mark.usefixtures("signature_by")
def test_lengths_that_are_wrong_raise_after_right_ones_as_before() -> None:
    """A stored preparation, which does not hold the memory's length, lets no wrong length pass."""
    generator = random.Random(0)
    errors = 0
    for _ in range(100):
        length, memory_len, rows = generator.randint(1, 4), generator.randint(0, 9), generator.randint(6, 14)
        settings: dict[str, Any] = generator.choice([
            {}, {"window": generator.randint(1, 12)}, {"causal": False, "zero_row": generator.randint(0, 5)},
            {"outside": "zero"}, {"window": (generator.randint(0, 9), 1), "causal": False, "zero_row": 1},
        ])  # fmt: skip
        call = a_call(length, 30) | settings
        k_mem, v_mem = call["memory"]
        call |= {"r": call["r"][:, :rows], "memory": (k_mem[:, :, :memory_len], v_mem[:, :, :memory_len])}

        def attempt(k_len: int, v_len: int) -> str:
            memory = k_mem[:, :, :k_len], v_mem[:, :, :v_len]  # noqa: B023
            try:
                return str(rel_attention(**call | {"memory": memory}).shape)  # noqa: B023
            except ValueError as error:
                return str(error)

        wrong = [(generator.randint(0, 30), generator.randint(0, 30)) for _ in range(3)]
        lengths = [(generator.randint(0, 30),) * 2 for _ in range(6)] + wrong
        cold = []
        for pair in lengths:
            PREPARED_CALLS.value.clear()
            cold.append(attempt(*pair))
        PREPARED_CALLS.value.clear()
        warm = [attempt(*pair) for pair in (*lengths, *lengths)]
        assert warm == cold * 2
        errors += sum("torch.Size" not in text for text in cold)
    assert errors > 150
