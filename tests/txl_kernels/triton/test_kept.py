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
    """Let each call launch by Triton and by what its layout has kept, with the same tensors and
    workspace. Whether there were kept kernels before each call, in the list."""
    from txl_kernels.backends.triton.launch import Launches, Workspace

    before: list[bool] = []
    memories: dict[int, Tensor | None] = {}
    allocate, original = Workspace.allocate, Launches.run

    def once(self: Workspace, device: torch.device) -> Tensor | None:
        if id(self) not in memories:
            memories[id(self)] = allocate(self, device)
        return memories[id(self)]

    def compare(self: Launches, device: torch.device, tensors: Any) -> None:
        kept, self._kept = self._kept, None
        before.append(kept is not None)
        original(self, device, tensors)
        usual = launched()
        assert self._kept is not None
        self._kept = kept or self._kept
        original(self, device, tensors)
        found = launched()
        assert len(found) == len(usual) == len(self.launches)
        for (name, grid, function, packed, _, given), (*same, metadata, arguments) in zip(usual, found, strict=True):
            assert same == [name, grid, function, packed]
            assert metadata is None
            assert arguments == given, name

    monkeypatch.setattr(Workspace, "allocate", once)
    monkeypatch.setattr(Launches, "run", compare)
    return before


def test_arguments_are_those_of_tritons_launch(gpu: None, both_ways: list[bool]) -> None:
    for options in CALLS:
        run(call_of(**options))  # type: ignore[arg-type]
    assert both_ways.count(True) >= 10  # the others are layouts of their own, which have kept nothing yet
    assert both_ways.count(False) >= 10


def test_another_alignment_is_another_layout(gpu: None) -> None:
    from txl_kernels.backends.triton import passes

    passes.lay_out_forward.cache_clear()
    for by, layouts in ((0, 1), (8, 1), (1, 2), (9, 2), (3, 3)):
        run(call_of(change=moved(by)))
        assert passes.lay_out_forward.cache_info().currsize == layouts


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
