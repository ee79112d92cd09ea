"""Compiled kernels that a layout keeps: every later launch has the arguments that Triton's own
launch gives. On a pretended GPU, Triton chooses among kernels that are not compiled, and launches
are noted."""

import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import Case, as_fields, make_inputs
from ptx_marks import RUNS_TRITONS_PTX
from torch import Tensor

from txl_kernels.backends import triton as backend
from txl_kernels.call import Call

triton = pytest.importorskip("triton", reason="Triton is not installed")
from triton import knobs  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

pytestmark = RUNS_TRITONS_PTX[1:]  # all but slow
_launched = threading.local()  # the arguments of a thread's launches


def note(kernel: Any, *arguments: Any) -> None:
    """Note a launch: what `run` of a compiled kernel is called with."""
    *grid, _, function, packed, metadata, _, _ = arguments[:9]
    _launched.__dict__.setdefault("found", []).append(
        (kernel.name, grid, function, packed, metadata, [_plain(x) for x in arguments[9:]])
    )


def _plain(x: Any) -> Any:
    """Return an argument with addresses in place of tensors, also in descriptors."""
    if hasattr(x, "block_shape"):
        return _plain(x.base), x.base.dtype, tuple(x.shape), tuple(x.strides), tuple(x.block_shape), x.padding
    return x.data_ptr() if hasattr(x, "data_ptr") else x


def launched() -> list[Any]:
    """Return this thread's launches since the last call."""
    return _launched.__dict__.pop("found", [])  # type: ignore[no-any-return]


@pytest.fixture(params=[80, 90])
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    import pretended_gpu

    with torch.no_grad(), pretended_gpu.launching(request.param, note, 8):
        launched()
        yield


def call_of(
    seed: int = 0, change: Callable[[Call], Call] = lambda x: x, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Call:
    case = Case(**{"B": 2, "H": 2, "L": 20, "M": 12, "D": 16, "seed": seed} | options)
    return change(as_fields(make_inputs(case, dtype)))


def run(call: Call) -> None:
    out, lse = backend.forward(call)
    backend.backward(call, out, lse, torch.zeros_like(out), None)


def moved(by: int) -> Callable[[Call], Call]:
    """Return a change that puts k `by` elements behind the start of other memory."""

    def change(call: Call) -> Call:
        memory = torch.zeros(call.k.numel() + by, dtype=call.k.dtype)
        return call._replace(k=memory[by:].view(call.k.shape))

    return change


def strided(call: Call) -> Call:
    return call._replace(
        v=torch.zeros(*call.v.shape[:2], 2 * call.v.size(2), call.v.size(3), dtype=call.v.dtype)[:, :, ::2]
    )


def later_rows(call: Call) -> Call:
    """Return the call with a window, so that tables begin at a later row."""
    return call._replace(left=5, right=0)


CALLS = (
    *({"seed": seed} for seed in range(3)),
    *({"change": moved(by)} for by in (0, 8, 1, 16, 3)),
    {"M": 13}, {"M": 14}, {"M": 28}, {"M": 0}, {"L": 1}, {"L": 2}, {"L": 32, "M": 0},
    {"change": strided}, *({"change": later_rows, "causal": False, "r_bias": "H T", "seed": seed} for seed in range(2)),
    *({"intervals": "start", "seed": seed} for seed in range(2)), *({"H": 4, "Hkv": 2, "seed": seed} for seed in range(2)),
    *({"Dp": 32, "sink": "B H L", "softcap": 9.0, "seed": seed} for seed in range(2)),
    *({"dropout_p": 0.3, "layout": "fused", "M": 0, "seed": seed} for seed in range(2)),
    *({"dtype": torch.float32, "Dv": 24, "seed": seed} for seed in range(2)), {},
)  # fmt: skip


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let each call launch by Triton, laid out for itself alone, and as it does, with the same
    tensors and workspace, and compare the arguments. Whether the latter were kept kernels, in the
    list."""
    from txl_kernels.backends.triton import passes
    from txl_kernels.backends.triton.launch import Kept, Launches, Workspace, forms_of

    were_kept: list[bool] = []
    runs_of_kept: list[Kept] = []
    run_kept = Kept.run
    memories: dict[int, Tensor | None] = {}
    allocate, run_launches, run_forward = Workspace.allocate, Launches.run, passes.run_forward
    lay_out_backward = passes.lay_out_backward

    def once(self: Workspace, device: torch.device) -> Tensor | None:
        if self._bytes not in memories:
            memories[self._bytes] = allocate(self, device)
        return memories[self._bytes]

    def compare(usual: list[Any], found: list[Any]) -> None:
        assert len(found) == len(usual) > 0
        were_kept.append(len(runs_of_kept) == len(found))
        runs_of_kept.clear()
        for (name, grid, function, packed, _, given), (*same, _, arguments) in zip(usual, found, strict=True):
            assert same == [name, grid, function, packed]
            assert arguments == given, name

    def forward(device: torch.device, tensors: Any, settings: Any, kind: str, lay_out: Any) -> None:
        launched()
        run_launches(lay_out.__wrapped__(device, forms_of(tensors), settings, kind), device, tensors)
        usual = launched()
        run_forward(device, tensors, settings, kind, lay_out)
        compare(usual, launched())

    def backward(*given: Any) -> Any:
        both = lay_out_backward(*given), lay_out_backward.__wrapped__(*given)

        class Both:
            def run(self, device: torch.device, tensors: Any) -> None:
                launched()
                both[1].run(device, tensors)
                usual = launched()
                both[0].run(device, tensors)
                compare(usual, launched())

        return Both()

    def note_run(self: Kept, *given: Any) -> None:
        runs_of_kept.append(self)
        run_kept(self, *given)

    monkeypatch.setattr(Kept, "run", note_run)
    monkeypatch.setattr(Workspace, "allocate", once)
    monkeypatch.setattr(passes, "run_forward", forward)
    monkeypatch.setattr(passes, "lay_out_backward", backward)
    return were_kept


def test_arguments_are_those_of_tritons_launch(gpu: None, both_ways: list[bool]) -> None:
    for options in CALLS:
        run(call_of(**options))  # type: ignore[arg-type]
    assert both_ways.count(True) >= 10  # the others are layouts of their own, which have kept nothing yet
    assert both_ways.count(False) >= 10


class Cache:
    """Keys and values with room for more, of which calls see the first rows."""

    def __init__(self, heads: int, width: int, dtype: torch.dtype) -> None:
        self.k, self.v = torch.zeros(2, 2, heads, 200, width, dtype=dtype)
        self.r, self.r_bias = torch.zeros(heads, 201, width, dtype=dtype), torch.zeros(heads, 201, dtype=dtype)


def _sees(memory: int, cache: Cache, is_cut: bool, is_copied: bool) -> Callable[[Call], Call]:
    """Return a change that gives a call the first rows of a cache, and of its tables if these are
    cut, as they are or copied."""

    def change(call: Call) -> Call:
        length = call.q.size(2)
        rows = {"k_mem": cache.k[:, :, :memory], "v_mem": cache.v[:, :, :memory]}
        tables = {"r": cache.r, "r_bias": cache.r_bias}
        if is_cut:
            tables = {name: x[:, : memory + length] for name, x in tables.items()}
        given = {name: x for name, x in {**rows, **tables}.items() if getattr(call, name) is not None}
        return call._replace(**{name: x.contiguous() if is_copied else x for name, x in given.items()})

    return change


GROWING: dict[str, dict[str, Any]] = {
    "one query": {"L": 1}, "a short call": {"L": 5}, "prefill": {"L": 70}, "window": {"L": 3, "window": 41},
    "bias": {"L": 1, "r_bias": "H T"}, "bias alone": {"L": 1, "r": None, "r_bias": "H T"},
    "bounds": {"L": 2, "intervals": "start"}, "narrow": {"L": 1, "D": 24}, "float32": {"L": 1, "dtype": torch.float32},
    "position queries": {"L": 1, "Dp": 32, "sink": "B H L"}, "grouped": {"L": 1, "H": 4, "Hkv": 2},
}  # fmt: skip


@pytest.mark.parametrize("options", [pytest.param(x, id=name) for name, x in GROWING.items()])
def test_a_memory_that_grows_shares_kernels(gpu: None, both_ways: list[bool], options: dict[str, Any]) -> None:
    """The arguments are those of Triton's launch at every length of the memory, and nearly all
    calls run kept kernels: of a cache, and of copies of its rows."""
    given = {"H": 2, "D": 16} | options
    cache = Cache(given["H"], given["D"], given.get("dtype", torch.bfloat16))
    for is_cut, is_copied in ((False, False), (True, False), (True, True)):
        both_ways.clear()
        lengths = [0, *range(16, 190, 3), 17, 16]
        for memory in lengths:
            backend.forward(call_of(**options | {"M": memory}, change=_sees(memory, cache, is_cut, is_copied)))
        is_exact = is_copied and given["D"] % 16  # their strides are no multiples of 16
        assert both_ways.count(True) >= (1 if is_exact else len(lengths) - 22)


def test_another_alignment_is_another_layout(gpu: None) -> None:
    from txl_kernels.backends.triton import growing

    growing._family.cache_clear()
    for by, layouts in ((0, 1), (8, 1), (1, 2), (9, 2), (3, 3)):
        run(call_of(change=moved(by)))
        assert growing._family.cache_info().currsize == layouts


def test_nothing_kept_holds_a_tensor(gpu: None) -> None:
    for _ in range(3):
        call = call_of()
        run(call)
    left = [weakref.ref(x) for x in call if isinstance(x, Tensor)]
    assert left
    del call
    assert [x() for x in left] == [None] * len(left)


def test_threads_share_a_layout(gpu: None) -> None:
    """Each thread's launches have the addresses of its own tensors."""

    def addresses(seed: int) -> bool:
        call = call_of(seed=seed)
        own = {x.data_ptr() for x in (call.q, call.k, call.v, call.r)}
        found = []
        for _ in range(30):
            launched()
            backend.forward(call)
            given = launched()[0][-1]
            found.append(own <= {x[0] if isinstance(x, tuple) else x for x in given if x is not None})
        return all(found)

    run(call_of())
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(addresses, range(8)))


def test_hooks_get_tritons_own_launches(gpu: None) -> None:
    """A profiler's hook is called with the launch's data, as at every launch of Triton."""
    call = call_of()
    for _ in range(2):
        backend.forward(call)
    launched()
    backend.forward(call)
    assert launched()[0][4] is None
    hook = lambda data: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        backend.forward(call)
        assert launched()[0][4] == {"name": "forward_kernel"}
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    backend.forward(call)
    assert launched()[0][4] is None


@pytest.mark.parametrize("name", ["debug", "add_stages_inspection_hook"])
def test_settings_that_triton_reads_at_a_launch(name: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from txl_kernels.backends.triton import launch

    assert not launch.is_watched(())
    monkeypatch.setattr(knobs.runtime, name, (lambda: ("key", "hash")) if name != "debug" else True)
    assert launch.is_watched(())


def test_every_setting_that_triton_reads_is_known() -> None:
    """A Triton whose launches read more must be looked at before kernels are kept there."""
    from txl_kernels.backends.triton import launch

    assert launch.KEEPS
    read = set(re.findall(r"knobs\.(\w+\.\w+)", inspect.getsource(JITFunction.run)))
    known = set(re.findall(r"(?:runtime|compilation)\.\w+", inspect.getsource(launch.is_watched)))
    assert read <= known | {"compilation.fpsan_homomorphic_casts"}


def test_a_launch_that_returns_no_kernel_keeps_nothing(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, for example, and while a kernel is compiled elsewhere."""
    from txl_kernels.backends.triton.launch import Launches

    kept = []
    original = Launches.run

    def note_kept(self: Launches, *given: Any) -> None:
        original(self, *given)
        kept.append(self._kept)

    monkeypatch.setattr(Launches, "run", note_kept)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **named: None)
    run(call_of())
    assert kept == [None, None]
