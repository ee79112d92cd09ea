"""Configurations of the networks: frozen dataclasses that are stored as JSON in checkpoints."""

from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

from txl.errors import TxlError
from txl.fields import POSITIVE, RATE, check_ranges, check_types, option

Encoding = Literal["relative", "shaw", "shaw-released", "sinusoid", "learned"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
TABLES = ("shaw", "shaw-released", "learned")  # encodings with table_len learned rows

_MODEL, _REGULAR, _SOFTMAX, _TRAINING = "Model", "Regularisation", "Vocabulary", "Training"  # headings of --help
MAX_BINS = 1000
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1  # larger values are mistakes
_SIZE = (1, MAX_SIZE)


def of_other_encodings(encoding: str) -> set[str]:
    """Return the fields of `ModelConfig` that a model with this encoding leaves at their
    defaults."""
    names = set() if encoding in TABLES else {"table_len"}
    return names if encoding == "relative" else names | {"clamp_len", "untie_r"}


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
        check_types(self)
        check_ranges(
            self, vocab_size=_SIZE, n_layer=(1, MAX_LAYERS), d_model=_SIZE, d_inner=_SIZE, div_val=_SIZE, d_embed=_SIZE,
            dropout=RATE, embedding_dropout=RATE, output_dropout=RATE, word_dropout=RATE,
            init_std=POSITIVE, proj_init_std=POSITIVE,
        )  # fmt: skip
        if self.tie_projs != "none" and not self.tie_weight:
            raise TxlError("tie_projs needs tie_weight: projections are tied where the tables are")
        self._check_bins()

    def _check_bins(self) -> None:
        count = len(self.cutoffs) + 1
        if count > MAX_BINS:
            raise TxlError(f"cutoffs must be fewer than {MAX_BINS}, got {count - 1:,}")
        if any(b <= a for a, b in pairwise(self.bounds)):
            raise TxlError(
                f"cutoffs must increase, above 0 and below the {self.vocab_size} of vocab_size, got {list(self.cutoffs)}"
            )
        if self.div_val > 1 and count == 1:
            raise TxlError(f"div_val = {self.div_val} needs cutoffs: with one bin there is nothing to make narrower")
        if self.tie_projs == "tail" and count == 1:
            raise TxlError("tie_projs = tail needs cutoffs: with one bin there is none but the first")
        if not self.embed_widths[-1]:
            raise TxlError(
                f"div_val = {self.div_val} makes the last of {count} bins 0 wide: d_embed = {self.embed_width} is less than "
                f"{self.div_val}^{count - 1}"
            )

    def ties_projection(self, i: int) -> bool:
        """Whether the softmax of bin i shares the embedding's projection."""
        return self.tie_projs == "all" or (self.tie_projs == "tail" and i > 0)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Bin i holds the tokens from bounds[i] to bounds[i + 1] - 1."""
        return (0, *self.cutoffs, self.vocab_size)

    @property
    def embed_widths(self) -> tuple[int, ...]:
        """Width of each bin's embeddings."""
        return tuple(self.embed_width // self.div_val**i for i in range(len(self.cutoffs) + 1))

    @property
    def embed_width(self) -> int:
        return self.d_model if self.d_embed is None else self.d_embed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
            every layer.
        table_len: rows of a learned encoding, None for other encodings. For "shaw" and
            "shaw-released": the number of distances (longer ones share the last row). For
            "learned": the longest segment.
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
    clamp_len: int | None = option(None, _MODEL, "Largest distinct distance; default: no limit.")
    pre_norm: bool = option(False, _MODEL, "Where layer norms stand.", "--pre-norm/--post-norm")
    final_norm: bool = option(False, _MODEL, "A layer norm after the last layer.", "--final-norm/--no-final-norm")
    untie_r: bool = option(False, _MODEL, "Biases u, v a layer, or shared.", "--untie-r/--tie-r")
    norm_eps: float = 1e-5
    norm_std: float = 0.02
    initial_memory: Literal["empty", "zeros"] = "empty"
    second_target: bool = option(False, _TRAINING, "A softmax for the token after the next, too.", "--second-target")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(
            self, n_head=_SIZE, d_head=_SIZE, mem_len=(0, MAX_SIZE), table_len=_SIZE, window=_SIZE, clamp_len=_SIZE,
            attn_dropout=RATE, norm_eps=POSITIVE, norm_std=(0, 1e38),
        )  # fmt: skip
        if self.d_model % 2:
            raise TxlError(f"d_model must be even (its sinusoids come in pairs), got {self.d_model}")
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
        return self.encoding in ("sinusoid", "learned")

    def cached_segment(self, batch: int) -> int:
        """Return the number of tokens to read at once with a cache of keys: 512, or the largest
        power of two below with which logits, and activations of a layer, take at most 1 GiB in
        float32.

        batch: number of parallel texts.
        """
        scores = max(after - before for before, after in pairwise(self.bounds))
        # Logits and log-softmax; q, k, v and out; the feed-forward net's two; four hidden states.
        width = 2 * scores + 4 * self.n_head * self.d_head + 2 * self.d_inner + 4 * self.d_model
        segment = 512
        while segment > 1 and 4 * width * batch * segment > 2**30:
            segment //= 2
        return segment

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
    network: Literal["lstm", "qrnn"]
    n_layer: int = 3
    d_model: int = 400
    d_inner: int = 1750

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
    kind: type[Config] = RecurrentConfig if "network" in values else ModelConfig
    own = {x.name: x for x in fields(kind)}
    unknown = [name for name in values if name not in own]
    missing = [name for name, x in own.items() if x.default is MISSING and name not in values]
    if unknown or missing:
        what = f"has no {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise TxlError(f"{'an LSTM or QRNN' if 'network' in values else 'a Transformer'} {what}")
    return kind(**values)
