"""Sizes of an attention call, and what it must compute and read."""

from typing import NamedTuple


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
