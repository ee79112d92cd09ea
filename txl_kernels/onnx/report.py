"""The report of `rewrite`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row of a report: one softmax whose weights multiply values.

    Attributes:
        name: the softmax's node, or its output if the node has no name.
        reason: why its attention was not replaced; None if it was.
        concerns: False if there was nothing to replace: its scores have no relative positions.
    """

    name: str
    reason: str | None = None
    concerns: bool = True

    @property
    def done(self) -> str:
        """The outcome, in words."""
        if self.reason is None:
            return "replaced"
        return f"left alone: {self.reason}" if self.concerns else f"nothing to do: {self.reason}"


@dataclass(frozen=True)
class Report:
    """The result of `rewrite`, which prints as a table: which attentions were replaced, which were
    not and why.

    Attributes:
        rows: one for each softmax whose weights multiply values, in the order of the graph.
    """

    rows: tuple[Row, ...]

    @property
    def replaced(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reason is None)

    @property
    def left_alone(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reason is not None and row.concerns)

    def __str__(self) -> str:
        if not self.rows:
            return "nothing to replace: the graph has no softmax whose weights multiply values"
        lines = [("softmax", "what was done"), *((row.name, row.done) for row in self.rows)]
        width = max(len(name) for name, _ in lines)
        total = len(self.replaced) + len(self.left_alone)
        table = [f"{name.ljust(width)}  {done}" for name, done in lines]
        return "\n".join([*table, f"{len(self.replaced)} of {total} replaced"])
