"""What a repeated call launches is what Triton's own front would launch, without going through it.

Kernels are not compiled here and nothing runs: Triton's launcher gets as far as its native part.
"""

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ptx_marks import RUNS_TRITONS_PTX

from txl_kernels.backends import triton as backend
from txl_kernels.call import Call

pytestmark = RUNS_TRITONS_PTX[1:]  # all but slow
STREAM = 7  # the current one, as Triton is told in host_time
FORWARD = ["forward_kernel"]
BACKWARD = [
    "prepare_kernel",
    "backward_queries_kernel",
    "backward_keys_kernel",
    "finish_kernel",
]


@dataclasses.dataclass
class Native:
    """Triton's native launcher. launched: (kernel, grid, stream, arguments).

    fronts: calls of Triton's front, (kernel, what it compiles for). fused: of what it compiles,
    whether products and sums are to be.
    """

    launched: list[tuple[str, tuple[int, ...], int, list[Any]]] = dataclasses.field(default_factory=list)
    fronts: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    fused: list[bool] = dataclasses.field(default_factory=list)

    def launch(self, *args: Any) -> None:
        together = isinstance(args[-1], (list, tuple))  # Triton 3.6 hands a kernel's arguments on one by one
        metadata, *hooks = args[8:11] if together else args[10:13]
        for hook in hooks:
            if hook is not None:
                hook(metadata)
        given = args[-1] if together else args[13:]
        self.launched.append((args[4], args[:3], args[3], [*map(plain, given)]))

    def names(self) -> list[str]:
        names = [name for name, *_ in self.launched]
        self.launched.clear()
        return names


def plain(x: Any) -> Any:
    return x.data_ptr() if hasattr(x, "data_ptr") else x


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Native]:
    """No kernel is compiled for what is launched, and calls of Triton's own front are noted."""
    import triton.compiler
    from host_time import on_hopper
    from triton.runtime.jit import JITFunction

    class Compiled(triton.compiler.CompiledKernel):
        def __init__(self, source: Any, target: Any, options: dict[str, Any]) -> None:
            self.src, self.name, self.hash, self.kernel, self.metadata_group = source, source.fn.__name__, "", b"", {}
            self.module = self.function = self._run = self._module_pid = None
            blocks = [
                x[x.index("[") + 1 : x.index("]")] for x in source.signature.values() if x.startswith("tensordesc")
            ]
            described = [
                {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [*map(int, x.split(","))], "fp4_padded": 0}
                for x in blocks
            ]
            scratch = {f"{kind}_scratch_{of}": 0 for kind in ("global", "profile") for of in ("size", "align")}
            self.metadata = SimpleNamespace(
                num_warps=options["num_warps"], num_ctas=1, warp_size=32, shared=0, tensordesc_meta=described,
                launch_cooperative_grid=False, launch_pdl=False, instrumentation_mode="", **scratch,
            )  # fmt: skip
            self.packed_metadata = (options["num_warps"], 1, 0)
            found.fused.append(options["enable_fp_fusion"])

    monkeypatch.setattr(triton.compiler, "compile", Compiled)
    found = Native()
    run = JITFunction.run

    def noted(function: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        compiled = run(function, *args, grid=grid, warmup=warmup, **named)
        binder = function.device_caches[triton.runtime.driver.active.get_current_device()][-1]
        found.fronts.append((function.__name__, repr(binder(*args, **named)[1:])))
        return compiled

    monkeypatch.setattr(JITFunction, "run", noted)
    with torch.no_grad(), on_hopper(found.launch):
        yield found


def both_ways(call: Call, dlse: bool = False) -> None:
    out, lse = backend.forward(call)
    backend.backward(call, out, lse, torch.zeros_like(out), torch.zeros_like(lse) if dlse else None)


def call_of(
    B: int = 8, H: int = 16, L: int = 70, M: int = 40, D: int = 64, dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu", offset: int = 0, gap: int = 0, dropout: float = 0.0, bounds: str = "", unused_rows: int = 0,
    packed: bool = False, scale: float = 0.125, causal: bool = True, window: int | None = None,
) -> Call:  # fmt: skip
    """offset: elements before a tensor in its storage; gap: between its rows. packed: stored as
    [B, H, L, D]. unused_rows: of r, before distance 0."""

    def rows(n: int) -> torch.Tensor:
        shape = (B, H, n, D) if packed else (B, n, H, D)
        steps = (*itertools.accumulate((*shape[:0:-1],), lambda a, b: a * b, initial=1),)[::-1]
        steps = (*(step // D * (D + gap) for step in steps[:-1]), 1)
        size = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1
        x = torch.empty(size, dtype=dtype, device=device).as_strided(shape, steps, offset)
        return x if packed else x.transpose(1, 2)

    def given(name: str) -> torch.Tensor | None:
        return torch.zeros(B, L, dtype=torch.int32, device=device) if name in bounds else None

    r = torch.zeros(H, (M + L) * (1 if causal else 2) + unused_rows, D, dtype=dtype, device=device)
    bias = torch.zeros(H * D + offset, dtype=dtype, device=device)[offset:].view(H, D)
    memory = (rows(M), rows(M)) if M else (None, None)
    seed = torch.zeros(1, dtype=torch.int64, device=device) if dropout else None
    settings = (0 if causal else None, window, unused_rows if causal else L - 1, scale, dropout, 0.0)
    return Call(rows(L), rows(L), rows(L), r, bias, bias, *memory, None, given("start"), given("end"), seed, *settings)


CALLS: dict[str, dict[str, Any]] = {
    "memory": {}, "no memory": {"M": 0}, "pointers": {"D": 41}, "bounds": {"bounds": "start end"},
    "dropout": {"dropout": 0.1}, "parts": {"B": 1, "L": 3, "M": 700}, "window": {"window": 20},
    "both directions": {"causal": False}, "rows before the table": {"unused_rows": 5},
    "rows before the table, pointers": {"unused_rows": 5, "D": 41},
}  # fmt: skip


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_repeated_launches_are_the_ordinary_ones(
    options: dict[str, Any], native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argument for argument, in the order of Triton's native launcher, at the same addresses."""
    from txl_kernels.backends.triton.launch import Launches

    def run(launches: Launches, device: torch.device, tensors: list[Any], addresses: list[int]) -> None:
        memory = launches.workspace.allocate(device)
        tensors, addresses = (
            tensors + launches.workspace.views(memory),
            addresses + launches.workspace.addresses(memory),
        )
        for launch in launches.launches:
            launch.first(tensors)
            assert launch.repeats
            launch.again(addresses, STREAM, told=False)
            launch.again(addresses, STREAM, told=True)

    monkeypatch.setattr(Launches, "run", run)
    both_ways(call_of(**options))
    first, again, told = (native.launched[n::3] for n in range(3))
    assert len(first) == len(native.fronts) >= 5
    assert first == again == told
    for name, _, _, arguments in again:
        assert any(isinstance(x, int) and x > 2**40 for x in arguments), name  # addresses are among them


def test_a_second_call_goes_straight_to_what_was_compiled(native: Native) -> None:
    both_ways(call_of())
    assert native.names() == FORWARD + BACKWARD
    fronts = len(native.fronts)
    both_ways(call_of())
    assert native.names() == FORWARD + BACKWARD
    assert len(native.fronts) == fronts
    both_ways(call_of(L=71))
    assert native.names() == FORWARD + BACKWARD
    assert len(native.fronts) == 2 * fronts


def test_products_and_sums_are_fused(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Triton's default is, which is to change."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    both_ways(call_of(L=1029))
    assert len(native.fused) == len(FORWARD + BACKWARD)
    assert all(native.fused)


@pytest.mark.parametrize("setting", ["debug", "hook before each run", "instrumentation"])
def test_what_watches_launches_is_told_of_repeated_ones(
    setting: str, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    from txl_kernels.backends.triton.kernels.forward import forward_kernel

    call, told = call_of(), []
    for _ in range(2):
        backend.forward(call)
    assert len(native.fronts) == 1
    if setting == "debug":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    elif setting == "instrumentation":
        monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "other")
    else:
        monkeypatch.setattr(forward_kernel, "pre_run_hooks", [lambda *args, **named: told.append(named)])
    for _ in range(2):
        backend.forward(call)
    assert len(native.fronts) == (3 if told else 2)
    assert len(told) == (2 if setting == "hook before each run" else 0)


def test_launch_hooks_are_called(native: Native) -> None:
    """Of profilers, which find the kernel's name and its stream there."""
    from triton import knobs

    seen: list[dict[str, Any]] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get())

    call = call_of()
    backend.forward(call)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        backend.forward(call)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    backend.forward(call)
    assert [(x["name"], x["stream"]) for x in seen] == [("forward_kernel", STREAM)]


def test_threads_may_call_at_once(native: Native) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(both_ways, call_of(L=70 + n % 2)) for n in range(40)]:
            done.result()
    assert Counter(native.names()) == dict.fromkeys(FORWARD + BACKWARD, 40)


def test_a_workspace_that_is_not_aligned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator could give it; what was compiled for aligned pointers would read elsewhere."""
    from txl_kernels.backends.triton.launch import Workspace

    workspace, real = Workspace(0), torch.empty
    workspace.add(torch.float32, 3)
    monkeypatch.setattr(torch, "empty", lambda size, **named: real(size + 8, **named)[8:])
    with pytest.raises(RuntimeError, match="does not start at a multiple of 16 bytes"):
        workspace.allocate(torch.device("cpu"))


def drawn(generator: random.Random) -> dict[str, Any]:
    """Options of a call; the same ones come up often. Sizes to beyond 32 bits, where none is
    allocated."""
    pick = generator.choice
    options = {
        "B": pick([1, 2]), "H": pick([1, 3]), "L": pick([1, 16, 17]), "M": pick([0, 1, 48]), "D": pick([8, 41, 64]),
        "packed": pick([True, False]), "device": "cpu", "bounds": pick(["", "start", "start end"]),
        "dropout": pick([0.0, 0.1]), "scale": pick([1.0, -0.5]), "dtype": pick([torch.bfloat16, torch.float32]),
    }  # fmt: skip
    kind = pick(["plain", "offset", "gap", "huge"])
    if kind == "huge":
        return options | {"device": "meta", "offset": 0, "gap": pick([2**24, 2**31 + 8])}
    return options | {"offset": pick([1, 8]) if kind == "offset" else 0, "gap": pick([1, 8]) if kind == "gap" else 0}


def test_calls_with_the_same_key_are_compiled_the_same(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton compiles for (types, multiples of 16, ones) is a function of the key alone, for
    tensors at other addresses: machine code for other arguments would give wrong numbers."""
    from txl_kernels.backends.triton import passes, plan

    key: list[Any] = []
    found: dict[Any, Any] = {}

    def keyed(real: Callable[..., Any]) -> Callable[..., Any]:
        def lay_out(*args: Any) -> Any:
            key.append(args)
            return real(*args)

        return lay_out

    for name in ("lay_out_forward", "lay_out_backward"):
        monkeypatch.setattr(passes, name, keyed(getattr(passes, name)))
    generator = random.Random(0)
    for _ in range(100):
        options, dlse = drawn(generator), generator.random() < 0.5
        for further in (0, 16, 48):  # bytes
            plan.forget()  # so that all go through Triton's front
            key.clear()
            native.fronts.clear()
            offset = options["offset"] + further // options["dtype"].itemsize
            both_ways(call_of(**options | {"offset": offset}), dlse)
            specialised = tuple(native.fronts)
            assert found.setdefault(tuple(key), specialised) == specialised, options
    assert len(found) <= 100
    text = str(found.values())
    assert all(x in text for x in ("i64", "'D'", "constexpr", "tensordesc"))
