"""What the configurations of all networks share: sizes, vocabulary, dropout; kept as JSON."""

import math
from dataclasses import asdict, dataclass, fields
from types import UnionType
from typing import Any, Literal, TypeVar, get_args

from txl.errors import TxlError
from txl.model.bins import Bins

_KINDS: dict[type, str] = {int: "a whole number", float: "a finite number", bool: "true or false"}
MOST_BINS = 1000
MOST_LAYERS, MOST = 10_000, 2**31 - 1  # beyond which a number is a mistake
_C = TypeVar("_C", bound="NetworkConfig")


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Embeddings, softmax and dropout of a network; names are those of the paper's released code.

    Attributes:
        d_model: width of the embeddings and of what the softmax takes.
        init_std: of the initial weights, embeddings and biases u, v; of an LSTM or QRNN the
            embeddings. The original's 0.02 suits d_model from 400 on.
        proj_init_std: of the initial projections between embeddings and hidden states.
        cutoffs: bins of adaptive input and softmax (Grave et al. 2017): 0 < c_1 < .. < vocab_size,
            the most frequent tokens first; () for one bin.
        div_val: bin i has embeddings of width d_embed // div_val^i.
        d_embed: None for d_model.
        tie_weight: the softmax uses the embeddings' tables.
        tie_projs: bins whose softmax uses the embedding's projection too: "none", "tail" (all but
            the first, the released WikiText-103 models'), or "all".
        proj_same_dim: False leaves out the projection of a bin that has d_model already (the
            TensorFlow One Billion Word models), where div_val > 1.
        variational_dropout: one mask a segment, the same for all its positions (Gal and Ghahramani
            2016), on embeddings, attention output, feed-forward hidden units and output, and the
            final states; the Penn Treebank model's.
        embedding_dropout, output_dropout: None for `dropout`.
        word_dropout: rows of the embeddings dropped whole.
    """

    vocab_size: int
    n_layer: int
    d_model: int
    d_inner: int
    dropout: float = 0.1
    init_std: float = 0.02
    proj_init_std: float = 0.01
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    d_embed: int | None = None
    tie_weight: bool = True
    tie_projs: Literal["none", "tail", "all"] = "none"
    proj_same_dim: bool = True
    variational_dropout: bool = False
    embedding_dropout: float | None = None
    output_dropout: float | None = None
    word_dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))  # JSON has lists
        self._check_types()
        for name in ("vocab_size", "n_layer", "d_model", "d_inner", "div_val"):
            check_least(name, getattr(self, name), 1)
        check_most("n_layer", self.n_layer, MOST_LAYERS)
        for name in ("vocab_size", "d_model", "d_inner", "d_embed", "div_val"):
            check_most(name, getattr(self, name), MOST)
        check_optional("d_embed", self.d_embed)
        for name in ("dropout", "embedding_dropout", "output_dropout", "word_dropout"):
            check_rate(name, getattr(self, name))
        for name in ("init_std", "proj_init_std"):
            check_positive(name, getattr(self, name))
        self._check_tying()

    def _check_types(self) -> None:
        """Values of files are anything."""
        if len(self.cutoffs) > MOST_BINS:
            raise TxlError(f"cutoffs must be at most {MOST_BINS}, got {len(self.cutoffs):,}")
        if not all(type(cutoff) is int for cutoff in self.cutoffs):
            raise TxlError(f"cutoffs must be whole numbers, got {list(self.cutoffs)}")
        for f in fields(self):
            value = getattr(self, f.name)
            kinds = get_args(f.type) if isinstance(f.type, UnionType) else (f.type,)
            wanted = next((kind for kind in _KINDS if kind in kinds), None)
            if wanted is None or (value is None and type(None) in kinds):
                continue
            right = type(value) is wanted or (wanted is float and type(value) is int)
            if not right or (wanted is float and not math.isfinite(value)):
                raise TxlError(f"{f.name} must be {_KINDS[wanted]}, got {value!r}")

    def _check_tying(self) -> None:
        if self.tie_projs not in ("none", "tail", "all"):
            raise TxlError(f"tie_projs must be 'none', 'tail' or 'all', got {self.tie_projs!r}")
        if self.tie_projs != "none" and not self.tie_weight:
            raise TxlError("tie_projs needs tie_weight: projections are tied where the tables are")
        _ = self.bins  # raises where the cutoffs do

    def ties_projection(self, i: int) -> bool:
        """Whether the softmax of bin i uses the embedding's projection."""
        return self.tie_projs == "all" or (self.tie_projs == "tail" and i > 0)

    @property
    def bins(self) -> Bins:
        """The bins of the vocabulary and their widths."""
        return Bins(self.vocab_size, self.cutoffs, self.embed_width, self.div_val)

    @property
    def embed_width(self) -> int:
        return self.d_model if self.d_embed is None else self.d_embed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls: type[_C], values: dict[str, Any]) -> _C:
        """Raises TxlError on a field this version does not know or that is missing."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise TxlError(f"the configuration has unknown fields: {', '.join(unknown)}")
        if "vocab_size" not in values:
            raise TxlError("the configuration has no vocab_size")
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise TxlError(f"the configuration is damaged: {error}") from error


def check_most(name: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise TxlError(f"{name} must be <= {most:,}, got {value:,}")


def check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise TxlError(f"{name} must be >= {least}, got {value}")


def check_optional(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise TxlError(f"{name} must be None or >= 1, got {value}")


def check_rate(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value < 1:
        raise TxlError(f"{name} must be in [0, 1), got {value}")


def check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise TxlError(f"{name} must be > 0, got {value}")
