"""Sizes and options of a model, as a frozen dataclass that travels as JSON inside checkpoints."""

from dataclasses import dataclass
from typing import Literal, get_args

from txl.errors import TxlError
from txl.model.network_config import (
    MOST,
    NetworkConfig,
    check_least,
    check_most,
    check_optional,
    check_positive,
    check_rate,
)

Encoding = Literal[
    "relative", "shaw", "shaw-released", "sinusoid", "sinusoid-released", "learned", "learned-released"
]  # fmt: skip
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
PLACES = ("learned", "learned-released")  # a learned vector a place in the segment, in each layer
TABLES = ("shaw", "shaw-released", *PLACES)  # encodings that are parameters, table_len of them
ABSOLUTE = (
    "sinusoid",
    "sinusoid-released",
    *PLACES,
)  # places in the segment, added to hidden states; not in the scores


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Sizes and options of a `TransformerXL`; names are the paper's and its released code's.

    Attributes:
        mem_len: hidden states a layer remembers of earlier segments; 0 is no recurrence.
        encoding: of positions (paper, Tables 6 and 7). "relative": the paper's (section 3.3).
            "shaw": Shaw et al. 2018, a learned vector a layer, head and distance, terms (a) and
            (b). "shaw-released": the released code's attn_type 1, which adds a bias a key (c) and
            a learned number a distance (d). "sinusoid": Vaswani et al. 2017, added to the
            embeddings. "learned": Al-Rfou et al. 2018, added to the input of every layer.
            "sinusoid-released", "learned-released": the released code's attn_type 2 and 3. There a
            segment's last token is place 0 of the sinusoids, and has the table's last row; with
            pre_norm queries are projected from hidden states that are not normed, keys and values
            from normed ones.
        table_len: of a learned encoding: the distances told apart by "shaw" and "shaw-released"
            (longer ones share the last), the longest segment of "learned" and "learned-released".
            None for the others.
        window: keys a token sees, itself included; None for all of memory and segment. The original
            PyTorch code's same_length is window = mem_len, the TensorFlow one's mem_len + 1.
        clamp_len: largest distance told apart; None for no limit. For "relative" only.
        pre_norm, final_norm: layer norms before attention and feed-forward net, not after; with
            one after the last layer.
        untie_r: own biases u and v in each layer, instead of one pair shared by all.
        norm_eps: of the layer norms (TensorFlow: 1e-12).
        norm_std: of the initial weights of layer norms, around 1 (TensorFlow: 0).
        initial_memory: "empty", or "zeros": mem_len zero states that are attended, as the
            TensorFlow code and the published WikiText-103 checkpoint have it.
        second_target: a softmax of its own for the token after the next (Al-Rfou et al. 2018).
    """

    n_layer: int = 12
    d_model: int = 512
    d_inner: int = 2048
    n_head: int = 8
    d_head: int = 64
    attn_dropout: float = 0.0
    mem_len: int = 512
    encoding: Encoding = "relative"
    table_len: int | None = None
    window: int | None = None
    clamp_len: int | None = None
    pre_norm: bool = False
    final_norm: bool = False
    untie_r: bool = False
    norm_eps: float = 1e-5
    norm_std: float = 0.02
    initial_memory: Literal["empty", "zeros"] = "empty"
    second_target: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n_head", "d_head"):
            check_least(name, getattr(self, name), 1)
        for name in ("n_head", "d_head", "table_len", "mem_len", "window", "clamp_len"):
            check_most(name, getattr(self, name), MOST)
        if self.d_model % 2:
            raise TxlError(f"d_model must be even (its sinusoids come in pairs), got {self.d_model}")
        check_rate("attn_dropout", self.attn_dropout)
        check_positive("norm_eps", self.norm_eps)
        if not self.norm_std >= 0:
            raise TxlError(f"norm_std must be >= 0, got {self.norm_std}")
        check_least("mem_len", self.mem_len, 0)
        for name in ("window", "clamp_len", "table_len"):
            check_optional(name, getattr(self, name))
        if self.initial_memory not in ("empty", "zeros"):
            raise TxlError(f"initial_memory must be 'empty' or 'zeros', got {self.initial_memory!r}")
        self._check_encoding()

    def _check_encoding(self) -> None:
        if self.encoding not in ENCODINGS:
            raise TxlError(f"encoding must be one of {', '.join(ENCODINGS)}, got {self.encoding!r}")
        if self.encoding in TABLES and self.table_len is None:
            raise TxlError(f"table_len must be given with encoding={self.encoding!r}: the rows of its learned table")
        if self.encoding not in TABLES and self.table_len is not None:
            raise TxlError(f"table_len is for a learned encoding ({', '.join(TABLES)}), not {self.encoding!r}")
        if self.encoding != "relative":
            if self.clamp_len is not None:
                raise TxlError(f"clamp_len is for encoding='relative', not {self.encoding!r}")
            if self.untie_r:
                raise TxlError(f"untie_r is for encoding='relative', which has biases u and v, not {self.encoding!r}")

    @property
    def absolute(self) -> bool:
        """Whether positions are places in the segment, so that a cache of keys cannot be kept."""
        return self.encoding in ABSOLUTE

    @property
    def raw_queries(self) -> bool:
        """Whether queries are of hidden states before the layer norm, keys and values after it."""
        return self.pre_norm and self.absolute and self.encoding.endswith("-released")

    def attn_len(self, tgt_len: int) -> int:
        """Most keys a token sees when the text is read in segments of tgt_len."""
        reach = self.mem_len + tgt_len
        return reach if self.window is None else min(self.window, reach)
