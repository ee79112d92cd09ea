"""Detection by tools/ptx of faults planted in the PTX of Triton's forward kernel: each executed
place is left out or changed in turn, and is a fault or gives wrong values. Other kernels differ in
what they compute, not in how they synchronize."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case, as_call, in_float64, leaves, make_inputs
from ptx_faults import KINDS, PlantedFault, places
from ptx_marks import RUNS_TRITONS_PTX

from txl_kernels import rel_attention

pytestmark = RUNS_TRITONS_PTX
KERNEL = "forward_kernel"
VARIANTS = {  # architecture, whether descriptors are used
    "sm_80": (80, False),
    "sm_90 by descriptors": (90, True),
    "sm_90 by pointers": (90, False),
}
WRONG = 6e-3  # relative; bfloat16 alone gives 3.4e-3
# How many faults of a kind may pass undetected: a wait or fence after another one, copies that are
# masked, pipeline stages that loops of one or two tiles do not reach. Of HALF more may: masks of
# elements inside, lanes that have the same value.
PASS = {
    ("sm_90 by descriptors", "mbarrier for one more arrival"): 4,
    ("sm_90 by descriptors", "fewer bytes to come"): 4,
    ("sm_90 by pointers", "wait for products left out"): 1,
    ("sm_90 by pointers", "fence for TMA left out"): 2,
    ("sm_90 by pointers", "copy to another place"): 2,
}
HALF = {"load without its mask", "load from another place", "matrix at another place", "shuffle with another lane"}
Change = Callable[[str, str], str]


@functools.cache
def inputs() -> tuple[dict[str, object], torch.Tensor]:
    case = Case(B=1, H=1, L=70, M=70, D=64)
    inputs = make_inputs(case, torch.bfloat16)
    want = rel_attention(**as_call(in_float64(inputs)), backend="reference")
    return inputs | {name: _surrounded_by_nan(x) for name, x in leaves(inputs).items()}, want


def _surrounded_by_nan(x: torch.Tensor) -> torch.Tensor:
    """The tensor with NaN in the memory before and after it, so that reads there are noticed."""
    memory = torch.full((x.numel() + 2 * 8192,), torch.nan, dtype=x.dtype)
    return memory[8192 : 8192 + x.numel()].view(x.shape).copy_(x.detach())


@contextlib.contextmanager
def variant_of(name: str, **settings: Any) -> Iterator[Any]:
    from ptx.triton_launch import executed

    from txl_kernels.backends.triton import plan

    architecture, described = VARIANTS[name]
    real = plan.describable
    with (
        mock.patch.object(plan, "describable", lambda x: described and real(x)),
        torch.no_grad(),
        executed(architecture, multiprocessors=1, **settings) as executor,
    ):
        yield executor


def error_of(variant: str, change: Change | None = None) -> float:
    given, want = inputs()
    with variant_of(variant, change=change):
        out = rel_attention(**as_call(given), backend="triton")
    return float((out.double() - want).norm() / want.norm())


@functools.cache
def text_and_lines(variant: str) -> tuple[str, frozenset[int]]:
    """The kernel's PTX, and those of its lines that run."""
    text = {}

    def keep(name: str, ptx: str) -> str:
        text[name] = ptx
        return ptx

    with variant_of(variant, counting=True, change=keep) as executor:
        rel_attention(**as_call(inputs()[0]), backend="triton")
    counts = executor.counts[KERNEL]
    ran = zip(counts.program.code, counts.issues, strict=True)
    return text[KERNEL], frozenset(x.line for x, n in ran if n)


def is_detected(variant: str, ptx: str) -> bool:
    from ptx.faults import Fault

    try:
        error = error_of(variant, lambda name, old: ptx if name == KERNEL else old)
    except Fault:
        return True
    return not error <= WRONG  # nor is NaN


def faults(variant: str, kind: str) -> list[PlantedFault]:
    text, lines = text_and_lines(variant)
    return [fault for fault in places(text, kind) if fault.line in lines]


@pytest.mark.parametrize("variant", VARIANTS)
def test_unchanged_kernel_has_no_fault(variant: str) -> None:
    assert not is_detected(variant, text_and_lines(variant)[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "barrier left out"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_planted_fault_is_detected(variant: str, kind: str) -> None:
    found = faults(variant, kind)
    if not found:
        pytest.skip(f"none runs in {variant}")
    if kind in HALF:
        found = found[:: max(1, len(found) // 12)]
    passed = [fault.name for fault in found if not is_detected(variant, fault.ptx)]
    print(f"{variant}, {kind}: {len(found) - len(passed)} of {len(found)} detected; not: {passed}")
    assert len(passed) <= (0.6 * len(found) if kind in HALF else PASS.get((variant, kind), 0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_missing_barrier_is_detected(variant: str) -> None:
    """Barriers are left out while no fault is detected; each of the others is needed."""
    text, lines = text_and_lines(variant)
    total = len(faults(variant, "barrier left out"))
    needed, at = 0, 0
    while True:
        rest = [p for p in places(text, "barrier left out") if p.line in lines][at:]
        if not rest:
            break
        if is_detected(variant, rest[0].ptx):
            needed, at = needed + 1, at + 1
        else:
            text = rest[0].ptx
    print(f"{variant}: {needed} of {total} barriers are needed")
    assert needed >= {"sm_80": 30, "sm_90 by descriptors": 15, "sm_90 by pointers": 18}[variant]
