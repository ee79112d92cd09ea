"""Configurations of the networks: frozen dataclasses that are stored as JSON in checkpoints."""

import math
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeVar, get_args

from txl.errors import TxlError
from txl.fields import check_types, option

Encoding = Literal[
    "relative", "shaw", "shaw-released", "sinusoid", "sinusoid-released", "learned", "learned-released"
]  # fmt: skip
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
PLACES = ("learned", "learned-released")  # one learned vector for each position in the segment and layer
TABLES = ("shaw", "shaw-released", *PLACES)  # encodings with table_len learned rows
ABSOLUTE = ("sinusoid", "sinusoid-released", *PLACES)  # added to hidden states instead of scores
Kind = Literal["lstm", "qrnn"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_MODEL, _REGULAR, _SOFTMAX, _TRAINING = "Model", "Regularisation", "Vocabulary", "Training"  # headings of --help
MAX_BINS = 1000
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1  # larger values are mistakes
_C = TypeVar("_C", bound="NetworkConfig")


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
        """Boundaries of the bins, len(self) + 1 tokens from 0 to vocab_size."""
        return (0, *self.cutoffs, self.vocab_size)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.d_embed // self.div_val**i for i in range(len(self)))

    @property
    def head_size(self) -> int:
        """Width of the head: the tokens of the first bin and one cluster for each other bin."""
        return self.bounds[1] + len(self) - 1


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Embeddings, softmax and dropout of a network; names are those of the paper's released code.

    Attributes:
        d_model: width of the embeddings and of the hidden states that the softmax takes.
        init_std: standard deviation of the initial weights, embeddings and biases u, v (of an LSTM
            or QRNN: of the embeddings). The original's 0.02 suits d_model of at least 400.
        proj_init_std: the same of the projections between embeddings and hidden states.
        cutoffs: bins of adaptive input and softmax (Grave et al. 2017): 0 < c_1 < .. < vocab_size,
            the most frequent tokens first; () for one bin.
        div_val: bin i has embeddings of width d_embed // div_val^i.
        d_embed: embedding width of the first bin; None for d_model.
        tie_weight: the softmax uses the embeddings' tables.
        tie_projs: bins whose softmax also shares the embedding's projection: "none", "tail" (all
            but the first, as in the released WikiText-103 models), or "all".
        proj_same_dim: if div_val > 1, whether a bin whose width is d_model is projected too; False
            in the TensorFlow One Billion Word models.
        variational_dropout: use one mask a segment for all its positions (Gal and Ghahramani 2016)
            on embeddings, attention output, feed-forward hidden units and output, and final states,
            as in the Penn Treebank model.
        embedding_dropout, output_dropout: rates for embeddings and final states; None for
            `dropout`.
        word_dropout: rate at which whole rows of the embedding table are dropped.
    """

    vocab_size: int
    n_layer: int
    d_model: int
    d_inner: int
    dropout: float = option(0.1, _REGULAR, "Dropout.")
    init_std: float = option(0.02, _MODEL, "Of the initial weights.")
    proj_init_std: float = 0.01
    cutoffs: tuple[int, ...] = option(
        (), _SOFTMAX, "Bins of adaptive input and softmax, as 20000,40000; none: one bin."
    )
    div_val: int = option(1, _SOFTMAX, "Each bin so many times narrower than the one before.")
    d_embed: int | None = option(None, _SOFTMAX, "Width of the first bin's embeddings.")
    tie_weight: bool = option(True, _SOFTMAX, "Whether softmax and input share tables.", "--tie-weight/--untie-weight")
    tie_projs: Literal["none", "tail", "all"] = option(
        "none", _SOFTMAX, "Bins whose projections are shared, too: none, tail or all."
    )
    proj_same_dim: bool = True
    variational_dropout: bool = option(False, _REGULAR, "One mask a segment.", "--variational-dropout/--plain-dropout")
    embedding_dropout: float | None = None
    output_dropout: float | None = None
    word_dropout: float = option(0.0, _REGULAR, "Words dropped from the input, whole.")

    def __post_init__(self) -> None:
        if isinstance(self.cutoffs, list):  # a list if read from JSON
            object.__setattr__(self, "cutoffs", tuple(self.cutoffs))
        self._check_types()
        for name in ("vocab_size", "n_layer", "d_model", "d_inner", "div_val"):
            check_min(name, getattr(self, name), 1)
        check_max("n_layer", self.n_layer, MAX_LAYERS)
        for name in ("vocab_size", "d_model", "d_inner", "d_embed", "div_val"):
            check_max(name, getattr(self, name), MAX_SIZE)
        check_optional("d_embed", self.d_embed)
        for name in ("dropout", "embedding_dropout", "output_dropout", "word_dropout"):
            check_rate(name, getattr(self, name))
        for name in ("init_std", "proj_init_std"):
            check_positive(name, getattr(self, name))
        self._check_tying()

    def _check_types(self) -> None:
        """Check field types, since values read from a file can be anything."""
        if isinstance(self.cutoffs, tuple):
            if len(self.cutoffs) > MAX_BINS:
                raise TxlError(f"cutoffs must be at most {MAX_BINS}, got {len(self.cutoffs):,}")
            if not all(type(cutoff) is int for cutoff in self.cutoffs):
                raise TxlError(f"cutoffs must be whole numbers, got {list(self.cutoffs)}")
        check_types(self)
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise TxlError(f"{f.name} must be a finite number, got {value!r}")

    def _check_tying(self) -> None:
        if self.tie_projs not in ("none", "tail", "all"):
            raise TxlError(f"tie_projs must be 'none', 'tail' or 'all', got {self.tie_projs!r}")
        if self.tie_projs != "none" and not self.tie_weight:
            raise TxlError("tie_projs needs tie_weight: projections are tied where the tables are")
        _ = self.bins  # raises where the cutoffs do

    def ties_projection(self, i: int) -> bool:
        """Whether the softmax of bin i shares the embedding's projection."""
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
        """Make a configuration from JSON; raise TxlError for an unknown or missing field."""
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """Sizes and options of a `TransformerXL`; names are the paper's and its released code's.

    Attributes:
        mem_len: hidden states that each layer caches from earlier segments; 0 for no recurrence.
        encoding: position encoding (paper, Tables 6 and 7). "relative": the paper's (section 3.3).
            "shaw": Shaw et al. 2018, a learned vector for each layer, head and distance; terms (a)
            and (b). "shaw-released": the released code's attn_type 1, which adds term (c), a bias
            for each key, and for (d) a learned bias for each distance. "sinusoid": Vaswani et al.
            2017, added to the embeddings. "learned": Al-Rfou et al. 2018, added to the input of
            every layer. "sinusoid-released", "learned-released": the released code's attn_type 2
            and 3. They number positions so that a segment's last token has sinusoid 0 or the
            table's last row; with pre_norm, queries are projected from hidden states before the
            layer norm, keys and values from those after it.
        table_len: rows of a learned encoding, None for other encodings. For "shaw" and
            "shaw-released": the number of distances (longer ones share the last row). For "learned"
            and "learned-released": the longest segment.
        window: keys a query sees, its own position included; None for all of memory and segment.
            The original PyTorch code's same_length is window = mem_len, the TensorFlow code's
            mem_len + 1.
        clamp_len: distances above it are encoded as clamp_len; None for no limit. Only for
            "relative".
        pre_norm, final_norm: apply layer norms before attention and feed-forward net instead of
            after; final_norm adds one after the last layer.
        untie_r: biases u and v are separate in each layer instead of shared by all.
        norm_eps: epsilon of the layer norms (TensorFlow: 1e-12).
        norm_std: standard deviation, around 1, of the initial layer-norm weights (TensorFlow: 0).
        initial_memory: "empty", or "zeros": mem_len zero states that queries attend to, as in the
            TensorFlow code and the published WikiText-103 checkpoint.
        second_target: add a second softmax, for the token after the next (Al-Rfou et al. 2018).
    """

    n_layer: int = option(12, _MODEL, "Layers.")
    d_model: int = option(512, _MODEL, "Width of the hidden states.")
    n_head: int = option(8, _MODEL, "Attention heads.")
    d_head: int = option(64, _MODEL, "Width of a head.")
    d_inner: int = option(2048, _MODEL, "Width of the feed-forward net.")
    attn_dropout: float = option(0.0, _REGULAR, "Dropout on attention weights.")
    mem_len: int = option(512, _MODEL, "Tokens of memory; 0: no recurrence.")
    encoding: Encoding = option("relative", _MODEL, f"Of positions: {', '.join(ENCODINGS)}.")
    table_len: int | None = option(None, _MODEL, "Rows of a learned encoding.")
    window: int | None = option(None, _MODEL, "Keys a token sees, itself included; default: all.")
    clamp_len: int | None = option(None, _MODEL, "Largest distance told apart; default: no limit.")
    pre_norm: bool = option(False, _MODEL, "Where layer norms stand.", "--pre-norm/--post-norm")
    final_norm: bool = option(False, _MODEL, "A layer norm after the last layer.", "--final-norm/--no-final-norm")
    untie_r: bool = option(False, _MODEL, "Biases u, v a layer, or shared.", "--untie-r/--tie-r")
    norm_eps: float = 1e-5
    norm_std: float = 0.02
    initial_memory: Literal["empty", "zeros"] = "empty"
    second_target: bool = option(False, _TRAINING, "A softmax for the token after the next, too.", "--second-target")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n_head", "d_head"):
            check_min(name, getattr(self, name), 1)
        for name in ("n_head", "d_head", "table_len", "mem_len", "window", "clamp_len"):
            check_max(name, getattr(self, name), MAX_SIZE)
        if self.d_model % 2:
            raise TxlError(f"d_model must be even (its sinusoids come in pairs), got {self.d_model}")
        check_rate("attn_dropout", self.attn_dropout)
        check_positive("norm_eps", self.norm_eps)
        if not self.norm_std >= 0:
            raise TxlError(f"norm_std must be >= 0, got {self.norm_std}")
        check_min("mem_len", self.mem_len, 0)
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
        """Whether positions are absolute, within the segment, so that keys cannot be cached."""
        return self.encoding in ABSOLUTE

    @property
    def raw_queries(self) -> bool:
        """Whether queries are projected from hidden states before the layer norm, keys and values
        after."""
        return self.pre_norm and self.absolute and self.encoding.endswith("-released")

    def attn_len(self, tgt_len: int) -> int:
        """Return the maximum number of keys a token sees when text is read in segments of
        tgt_len."""
        reach = self.mem_len + tgt_len
        return reach if self.window is None else min(self.window, reach)


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(NetworkConfig):
    """An LSTM or QRNN: layers of d_inner features, the last of d_model (Merity et al. 2017, 2018).

    Attributes:
        network: "lstm", or "qrnn" (Bradbury et al. 2017).
        dropout: rate for the embeddings and each layer's output.
        mem_len: always 0; the network carries a recurrent state instead of a memory.
    """

    mem_len: ClassVar[int] = 0
    network: Kind
    n_layer: int = 3
    d_model: int = 400
    d_inner: int = 1750

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network not in KINDS:
            raise TxlError(f"network must be one of {', '.join(KINDS)}, got {self.network!r}")

    def attn_len(self, tgt_len: int) -> int:
        """Return the tokens that gradients go through, as for a Transformer without memory."""
        return tgt_len

    @property
    def widths(self) -> list[tuple[int, int]]:
        """The number of input and output features of each layer."""
        outer = [self.d_model, *[self.d_inner] * (self.n_layer - 1), self.d_model]
        return list(pairwise(outer))


Config = ModelConfig | RecurrentConfig


def config_from_json(values: dict[str, Any]) -> Config:
    """Make the configuration that `to_json` wrote: of an LSTM or QRNN if there is a field
    "network", else of a Transformer.

    Raises:
        TxlError: a field is unknown to that network, missing, or out of range.
    """
    if "network" not in values:
        return ModelConfig.from_json(values)
    if values["network"] not in KINDS:
        raise TxlError(f"network must be one of {', '.join(KINDS)}, got {values['network']!r}")
    known = {f.name for f in fields(RecurrentConfig)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise TxlError(f"a network of kind {values['network']!r} has no {', '.join(unknown)}")
    return RecurrentConfig.from_json(values)


def check_max(name: str, value: int | None, maximum: int) -> None:
    if value is not None and value > maximum:
        raise TxlError(f"{name} must be <= {maximum:,}, got {value:,}")


def check_min(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise TxlError(f"{name} must be >= {minimum}, got {value}")


def check_optional(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise TxlError(f"{name} must be None or >= 1, got {value}")


def check_rate(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value < 1:
        raise TxlError(f"{name} must be in [0, 1), got {value}")


def check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise TxlError(f"{name} must be > 0, got {value}")
