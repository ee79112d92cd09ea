"""What `accelerate` did, module by module."""

from dataclasses import dataclass, field

from torch import nn

from txl_kernels.integrations.accelerated import Accelerated

HEADER = ("module", "class", "what was done", "fallbacks")


@dataclass(frozen=True)
class Row:
    """One attention module.

    Attributes:
        name: in the model.
        kind: full name of its class.
        reason: why it was left alone; None if it was accelerated.
    """

    name: str
    kind: str
    reason: str | None
    module: nn.Module = field(repr=False, compare=False)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls so far that the original answered, by reason."""
        return dict(self.module.fallbacks) if isinstance(self.module, Accelerated) else {}


@dataclass(frozen=True)
class Report:
    """Printed, a table: what was accelerated, what was not and why, and calls that fell back so
    far."""

    rows: tuple[Row, ...]

    @property
    def accelerated(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reason is None)

    @property
    def left_alone(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reason is not None)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls so far that an original answered, by reason, of all modules."""
        total: dict[str, int] = {}
        for row in self.rows:
            for reason, count in row.fallbacks.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def __str__(self) -> str:
        if not self.rows:
            return "nothing to accelerate: the model has no attention module that txl_kernels.integrations knows"
        lines = [HEADER]
        for row in self.rows:
            counts = "; ".join(f"{count} x {reason}" for reason, count in row.fallbacks.items())
            done = "accelerated" if row.reason is None else f"left alone: {row.reason}"
            lines.append((row.name or "(the model)", row.kind.rpartition(".")[2], done, counts or "-"))
        widths = [max(len(line[c]) for line in lines) for c in range(len(HEADER))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*table, f"{len(self.accelerated)} of {len(self.rows)} accelerated"])
