"""A comparison: implementations that do the same work, the one measure of right and wrong, and what
a record says of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from harness.case import Case, Row
from harness.machine import Machine, Run

# Most of what rounding explains: several times what right implementations show.
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
Role = Literal["ours", "part", "other", "baseline", "limit"]


class Unavailable(Exception):
    """An implementation cannot take part here (not installed, no such operator): the reason. It is
    skipped, not failed."""


def require(got: Tensor, want: Tensor, name: str, maximum: float | None = None) -> None:
    """Raises AssertionError if got differs from want, in float64, by more than its dtype explains
    (or than `maximum`), or is NaN: the relative error, by norms."""
    maximum = MAX_ERROR[got.dtype] if maximum is None else maximum
    error = float(((got.double() - want).norm() / want.norm()).detach())
    if not error <= maximum:
        dtype = str(got.dtype).removeprefix("torch.")
        raise AssertionError(f"{name} is wrong: relative error {error:.2g}, at most {maximum:g} is rounding in {dtype}")


@dataclass
class Entry:
    """One implementation, ready to run.

    Attributes:
        run: what is timed; with the clock "own" it returns its seconds itself.
        check: raises if the implementation computes something else; None for limits, baselines and
            parts.
        per: tokens, calls: times are shown for one of them.
        operations, bytes: useful work of a run, for rates and for shares of a limit.
        limit: this is the machine's own limit of operations or bytes a second.
        warm_up: False counts the first run too: for runs so long that a warm-up is lost in them.
        most: rounds at most, if fewer than the comparison's.
        extra: more for the record; may be filled by `run`.
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
    """One way to do a comparison's work.

    Attributes:
        name: as shown, once in a comparison; nothing else is read out of it.
        algorithm: what computes, by the short name that tables and plots choose by.
        prepare: makes it ready; called when the comparison starts.
        role: "ours", a "part" of ours alone, an "other" that computes the same, a "baseline" that
            computes less, a "limit" of the machine.
        backend: of rel_attention.
        dtype: where it is not the record's.
        segment: tokens read at once.
    """

    name: str
    algorithm: str
    prepare: Callable[[], Entry]
    role: Role = "other"
    backend: str | None = None
    dtype: str | None = None
    segment: int | None = None

    def to_json(self) -> Row:
        """What a record says of it, without what is None."""
        fields = {"implementation": self.name, "algorithm": self.algorithm, "role": self.role}
        options = {"backend": self.backend, "dtype": self.dtype, "segment": self.segment}
        return fields | {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class Comparison:
    """Implementations of one case, ours first.

    clock: "device", "cold" (device, caches filled with something else before), "wall", or "own".
    brief: what --brief runs in its place, where once is too long.

    Raises:
        ValueError: two implementations have one name.
    """

    group: str
    case: Case
    implementations: list[Implementation]
    clock: Literal["device", "cold", "wall", "own"] = "device"
    seconds: float = 4.0
    minimum: int = 4
    maximum: int = 200
    brief: "Comparison | None" = None

    def __post_init__(self) -> None:
        names = [x.name for x in self.implementations]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.title}: implementations need different names, got {names}")

    @property
    def title(self) -> str:
        return f"{self.group}, {self.case}"


def comparisons(*kinds: str, backend: str | None = "any") -> Callable[[Any], Any]:
    """Makes a function (machine, full) that lists comparisons one test for each implementation of
    each.

    kinds: of machines that it is for. backend: of ours that must be there; None if none need.
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
