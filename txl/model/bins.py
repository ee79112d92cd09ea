"""The bins of a vocabulary: frequent tokens in the first, rare ones in later and narrower ones."""

from dataclasses import dataclass
from itertools import pairwise

from txl.errors import TxlError


@dataclass(frozen=True)
class Bins:
    """Bins of adaptive input (Baevski and Auli 2019) and adaptive softmax (Grave et al. 2017).

    Bin i holds the tokens from bounds[i] to bounds[i + 1] - 1, with embeddings of widths[i].
    """

    vocab_size: int
    cutoffs: tuple[int, ...]
    d_embed: int
    div_val: int

    def __post_init__(self) -> None:
        bounds = (0, *self.cutoffs, self.vocab_size)
        if any(b <= a for a, b in pairwise(bounds)):
            raise TxlError(
                f"cutoffs must increase, above 0 and below the {self.vocab_size} of vocab_size, got {list(self.cutoffs)}"
            )
        if self.div_val > 1 and len(self) == 1:
            raise TxlError(f"div_val = {self.div_val} needs cutoffs: with one bin there is nothing to make narrower")
        for i, width in enumerate(self.widths):
            if width < 1:
                raise TxlError(
                    f"div_val = {self.div_val} makes bin {i} of {len(self)} 0 wide: d_embed = {self.d_embed} is less "
                    f"than {self.div_val}^{i} = {self.div_val**i}"
                )

    def __len__(self) -> int:
        return len(self.cutoffs) + 1

    @property
    def bounds(self) -> tuple[int, ...]:
        """len(self) + 1 numbers, 0 first and vocab_size last."""
        return (0, *self.cutoffs, self.vocab_size)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.d_embed // self.div_val**i for i in range(len(self)))

    @property
    def head_size(self) -> int:
        """Outputs of the softmax over the first bin and one token for each of the others."""
        return self.bounds[1] + len(self) - 1
