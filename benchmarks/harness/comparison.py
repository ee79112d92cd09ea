"""Comparisons: implementations that do the same work, the error bound for all of them, and their
fields in a record."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from harness.case import Case, Row
from harness.machine import Machine, Run

# Bounds that are several times the rounding errors of correct implementations.
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
Role = Literal["ours", "part", "other", "baseline", "limit"]


class Unavailable(Exception):
    """An implementation cannot run here (such as a package that is not installed); the message says
    why. It is skipped and does not count as failed."""


def require(got: Tensor, want: Tensor, name: str, maximum: float | None = None) -> None:
    """Raise AssertionError if got differs from want by more than `maximum` (None: the bound of its
    dtype) in relative norm, computed in float64, or if it has a NaN."""
    maximum = MAX_ERROR[got.dtype] if maximum is None else maximum
    error = float(((got.double() - want).norm() / want.norm()).detach())
    if not error <= maximum:
        dtype = str(got.dtype).removeprefix("torch.")
        raise AssertionError(f"{name} is wrong: relative error {error:.2g}, at most {maximum:g} is rounding in {dtype}")


@dataclass
class Entry:
    """An implementation that is ready to run.

    Attributes:
        run: the function that is timed; with the clock "own" it returns its time in seconds.
        check: raises if the implementation computes something else; None for limits, baselines and
            what computes no attention of its own.
        per: tokens, calls: the number of these in a run; times are given for one.
        operations, bytes: useful work of a run, for rates and shares of a limit.
        limit: "operations" or "bytes" if this is the machine's own limit of that rate.
        warm_up: False also counts the first run, for runs so long that a warm-up makes no
            difference.
        maximum: maximum number of rounds, if less than the comparison's.
        extra: further fields for the record; `run` may fill it.
    """

    run: Callable[[], Any]
    check: Run | None = None
    per: float = 1.0
    operations: float = 0.0
    bytes: float = 0.0
    limit: Literal["operations", "bytes", None] = None
    warm_up: bool = True
    maximum: int | None = None
    extra: Row = field(default_factory=dict)


@dataclass(frozen=True)
class Implementation:
    """An implementation of a comparison's work.

    Attributes:
        name: the displayed name, unique in a comparison, by which documents select; never parsed.
        prepare: makes the entry; called when the comparison starts.
        role: "ours", a "part" of ours, an "other" that computes the same, a "baseline" that
            computes less, or a "limit" of the machine.
        dtype: the dtype, if it is not the record's.
        segment: number of tokens read at once.
    """

    name: str
    prepare: Callable[[], Entry]
    role: Role = "other"
    dtype: str | None = None
    segment: int | None = None

    def to_json(self) -> Row:
        """Return the fields for a record, without those that are None."""
        fields = {"implementation": self.name, "role": self.role}
        options = {"dtype": self.dtype, "segment": self.segment}
        return fields | {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class Comparison:
    """Implementations of one case, those of this package first.

    clock: "device", "cold" (device time, with other data in the caches), "wall", or "own".
    paired: whether all implementations get the same number of rounds.

    Raises:
        ValueError: two implementations have the same name.
    """

    group: str
    case: Case
    implementations: list[Implementation]
    clock: Literal["device", "cold", "wall", "own"] = "device"
    seconds: float = 4.0
    minimum: int = 4
    maximum: int = 200
    paired: bool = False

    def __post_init__(self) -> None:
        names = [x.name for x in self.implementations]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.title}: implementations need different names, got {names}")

    @property
    def title(self) -> str:
        return f"{self.group}, {self.case}"


def comparisons(*kinds: str, backend: str | None = "any") -> Callable[[Any], Any]:
    """Decorator that turns a function (machine, full) -> list of comparisons into one test for each
    implementation of each comparison.

    kinds: kinds of machines that it is for. backend: a backend of this package that must be
    available; None if none is needed.
    """

    def decorate(listed: Callable[[Machine, bool], list[Comparison]]) -> Any:
        def test(run: Any, comparison: Comparison, implementation: str) -> None:
            run(comparison, implementation)

        def on_this(machine: Machine, full: bool) -> list[Comparison]:
            there = backend is None or (backend in machine.backends if backend != "any" else machine.backends)
            return listed(machine, full) if machine.kind in kinds and there else []

        test.comparisons = on_this
        test.__doc__ = listed.__doc__
        return test

    return decorate
