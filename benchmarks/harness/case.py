"""What a comparison's implementations all do, in fields: nothing is read out of a title."""

from dataclasses import dataclass
from typing import Any, Literal

from harness.shapes import Shape

SCHEMA = 2  # of the records: one more with every change of their fields
Direction = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")


@dataclass(frozen=True)
class Case:
    """The same work for every implementation of a comparison; None where a field says nothing.

    Attributes:
        unit: what times are shown for one of.
        shape: of one attention, or of each attention of a model.
        model, layers: a model of these sizes; layers may be fewer than the model's own, or None
            where none is computed.
        attn_len: keys every token sees.
        note: for people; nothing depends on it.
    """

    unit: Literal["call", "token", "step", "process"] = "call"
    direction: Direction | None = None
    shape: Shape | None = None
    model: str | None = None
    layers: int | None = None
    attn_len: int | None = None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Its fields, without those that are None."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        return found if self.shape is None else found | {"shape": self.shape._asdict()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Case":
        """Raises TypeError if a field is none of a case's."""
        shape = fields.get("shape")
        return cls(**(fields | {"shape": None if shape is None else Shape(**shape)}))

    @property
    def network(self) -> str:
        """The model's title."""
        if self.layers is None:
            return str(self.model)
        return f"{self.model}, {self.layers} layer{'s' if self.layers != 1 else ''}"

    @property
    def work(self) -> str:
        """All that is done, in words."""
        parts = [
            self.network if self.model else None,
            f"attention length {self.attn_len}" if self.attn_len else None,
            self.direction,
            None if self.shape is None else str(self.shape),
            self.note,
        ]
        return ", ".join(part for part in parts if part)

    def __str__(self) -> str:
        return f"{self.work}, one token" if self.unit == "token" else self.work
