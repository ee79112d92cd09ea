"""Cases of the record: fields that describe the work of a comparison's implementations, so that no
title has to be parsed, and shares of the machine's limits."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

SCHEMA = 3  # version of the records' fields, incremented with every change
Direction = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")
Row = dict[str, Any]
MAX_SLOWDOWN = 1.2  # maximum ratio of a limit's median to its fastest round
# Speed-up in Table 9 of the paper (per token on one GPU, relative to the vanilla model) by
# attention length.
SPEED_UP = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


class Shape(NamedTuple):
    """Sizes of a causal call whose queries see all of the memory."""

    B: int
    H: int
    L: int
    M: int
    D: int

    def __str__(self) -> str:
        return f"B{self.B} H{self.H} L{self.L} M{self.M} D{self.D}"

    @property
    def elements(self) -> int:
        """The number of elements of the keys, memory included."""
        return self.B * self.H * (self.M + self.L) * self.D

    def product(self) -> float:
        """Floating-point operations of one product over the visible pairs; attention with positions
        takes 3 products forward and 8 backward."""
        pairs = self.L * self.M + self.L * (self.L + 1) // 2
        return 2.0 * self.B * self.H * pairs * self.D

    def dense_product(self) -> float:
        """Floating-point operations of one product over all pairs."""
        return 2.0 * self.B * self.H * self.L * (self.L + self.M) * self.D

    def read_bytes(self, element: int) -> float:
        """Return the size in bytes of keys, values and r; element: bytes of an element."""
        return float(element * self.D * self.H * (self.M + self.L) * (2 * self.B + 1))


@dataclass(frozen=True)
class Case:
    """Work that all implementations of a comparison do. A field that does not apply is None.

    Attributes:
        unit: the unit that times are given for.
        shape: sizes of the attention, or of each attention of a model.
        model, layers: a model with these sizes; layers can be fewer than the model's own, or None
            if no layer is computed.
        attn_len: number of keys each token sees.
        note: a remark for readers; it is never parsed.
    """

    unit: Literal["call", "token", "step", "process"] = "call"
    direction: Direction | None = None
    shape: Shape | None = None
    model: str | None = None
    layers: int | None = None
    attn_len: int | None = None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are not None."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        return found if self.shape is None else found | {"shape": self.shape._asdict()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Case":
        """Make a case from JSON; raise TypeError for an unknown field."""
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
        """A description of the work in words."""
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


def add_shares(rows: list[Row]) -> None:
    """Add to each row its shares of the limits measured in the same comparison. If a limit was
    disturbed, mark it and add none.

    A limit does the same work in every round, so a median far above its fastest round means that
    something else ran at the same time.
    """
    limits = [row for row in rows if "limit" in row]
    for row in limits:
        slowed = row["median_ms"] / row["fastest_ms"]
        if slowed > MAX_SLOWDOWN:
            row["disturbed"] = slowed
    if disturbed(rows):
        return
    for what, rate in (("operations", "gflops"), ("bytes", "gb_per_s")):
        # Arithmetic peaks depend on the dtype; the rate of reading memory does not.
        rates = {_unit(row) if what == "operations" else "": row[rate] for row in limits if row["limit"] == what}
        for row in rows:
            limit = rates.get(_unit(row) if what == "operations" else "")
            if limit is not None and rate in row and "limit" not in row:
                row[f"share_of_{what}"] = row[rate] / limit


def _unit(row: Row) -> str:
    """Return the dtype whose peak applies; float32 if the row has none, as for the limit's row."""
    return str(row.get("dtype", "float32"))


def sdpa_note(device: str, isa: str | None) -> str:
    """Return a note on comparisons with torch's SDPA on this machine; empty if there is none."""
    if "AMD" not in device or "avx512" not in (isa or ""):
        return ""
    return (
        "torch's own float32 products, SDPA's too, are MKL's, which is slow on AMD's processors with AVX-512: read a "
        "multiple of them beside both shares of the peak."
    )


def disturbed(rows: list[Row]) -> str:
    """Return why a comparison has no shares of its limit; empty if it was not disturbed."""
    slowed = max((row.get("disturbed", 0.0) for row in rows), default=0.0)
    return f"the limit's median is {slowed:.2f} times its fastest round, so no shares" if slowed else ""
