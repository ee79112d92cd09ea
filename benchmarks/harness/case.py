"""What records say: in fields what a comparison's implementations all do, so that nothing is read
out of a title, and the shares of the machine's limits."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

SCHEMA = 2  # of the records: one more with every change of their fields
Direction = Literal["forward", "forward+backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward+backward")
Row = dict[str, Any]
MOST_DISTURBED = 1.2  # the median of a limit over its fastest round
# Speed-up of Table 9 of the paper (per token, one GPU, over the vanilla model) by attention length.
SPEED_UP = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}


class Shape(NamedTuple):
    """Sizes of a causal call with all of its memory visible."""

    B: int
    H: int
    L: int
    M: int
    D: int

    def __str__(self) -> str:
        return f"B{self.B} H{self.H} L{self.L} M{self.M} D{self.D}"

    def product(self) -> float:
        """Operations of one product over the visible pairs; attention with positions takes 3
        forward, 8 backward."""
        pairs = self.L * self.M + self.L * (self.L + 1) // 2
        return 2.0 * self.B * self.H * pairs * self.D

    def dense_product(self) -> float:
        """Operations of one product over all pairs."""
        return 2.0 * self.B * self.H * self.L * (self.L + self.M) * self.D

    def read_bytes(self, element: int) -> float:
        """Size of the keys, the values and r."""
        return float(element * self.D * self.H * (self.M + self.L) * (2 * self.B + 1))


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


def add_shares(rows: list[Row]) -> None:
    """Adds the shares of the limits measured in the same comparison, or marks the limit as
    disturbed and adds none.

    A limit does the same in every round: where its median is far above its fastest round, something
    else ran meanwhile.
    """
    limits = [row for row in rows if "limit" in row]
    for row in limits:
        slowed = row["median_ms"] / row["fastest_ms"]
        if slowed > MOST_DISTURBED:
            row["disturbed"] = slowed
    if disturbed(rows):
        return
    for what, rate in (("operations", "gflops"), ("bytes", "gb_per_s")):
        # Units have a peak for each dtype; memory is read at one rate.
        rates = {_unit(row) if what == "operations" else "": row[rate] for row in limits if row["limit"] == what}
        for row in rows:
            limit = rates.get(_unit(row) if what == "operations" else "")
            if limit is not None and rate in row and "limit" not in row:
                row[f"share_of_{what}"] = row[rate] / limit


def _unit(row: Row) -> str:
    """Which peak counts; a row without dtype is in the record's, as its limit is."""
    return str(row.get("dtype", "float32"))


def sdpa_note(device: str, isa: str | None) -> str:
    """What to know of multiples of torch's SDPA on this machine; empty where there is nothing."""
    if "AMD" not in device or "avx512" not in (isa or ""):
        return ""
    return (
        "torch's own float32 products, SDPA's too, are MKL's, which is slow on AMD's processors with AVX-512: read a "
        "multiple of them beside both shares of the peak."
    )


def disturbed(rows: list[Row]) -> str:
    """Why a comparison gives no shares of its limit; an empty string if it was not disturbed."""
    slowed = max((row.get("disturbed", 0.0) for row in rows), default=0.0)
    return f"the limit's median is {slowed:.2f} times its fastest round, so no shares" if slowed else ""
