"""Configurations: frozen dataclasses that travel as JSON inside checkpoints."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from txl.errors import TxlError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a `TransformerXL`; names are the paper's and its released code's.

    Attributes:
        window: keys a token sees, itself included; None for all of memory and segment. The original
            PyTorch code's same_length is window = mem_len, the TensorFlow one's mem_len + 1.
        untie_r: own biases u and v in each layer, instead of one pair shared by all.
        init_std: of the initial weights, embeddings and biases u, v. The original's 0.02 suits
            d_model from 400 on.
        clamp_len: largest distance told apart; None for no limit.
        initial_memory: "empty", or "zeros": mem_len zero states that are attended, as the
            TensorFlow code and the published WikiText-103 checkpoint have it.
    """

    vocab_size: int
    n_layer: int = 12
    d_model: int = 512
    n_head: int = 8
    d_head: int = 64
    d_inner: int = 2048
    dropout: float = 0.1
    attn_dropout: float = 0.0
    mem_len: int = 512
    window: int | None = None
    clamp_len: int | None = None
    pre_norm: bool = False
    untie_r: bool = False
    init_std: float = 0.02
    initial_memory: Literal["empty", "zeros"] = "empty"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner"):
            if getattr(self, name) < 1:
                raise TxlError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.d_model % 2:
            raise TxlError(f"d_model must be even (its sinusoids come in pairs), got {self.d_model}")
        for name in ("dropout", "attn_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise TxlError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not self.init_std > 0:
            raise TxlError(f"init_std must be > 0, got {self.init_std}")
        if self.mem_len < 0:
            raise TxlError(f"mem_len must be >= 0, got {self.mem_len}")
        for name in ("window", "clamp_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise TxlError(f"{name} must be None or >= 1, got {value}")
        if self.initial_memory not in ("empty", "zeros"):
            raise TxlError(f"initial_memory must be 'empty' or 'zeros', got {self.initial_memory!r}")

    def attn_len(self, tgt_len: int) -> int:
        """Most keys a token sees when the text is read in segments of tgt_len."""
        reach = self.mem_len + tgt_len
        return reach if self.window is None else min(self.window, reach)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ModelConfig":
        """Raises TxlError on a field this version does not know or that is missing."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise TxlError(f"the configuration has unknown fields: {', '.join(unknown)}")
        if "vocab_size" not in values:
            raise TxlError("the configuration has no vocab_size")
        return cls(**values)


# Named starting points for `txl train --model`; vocab_size comes from the corpus.
MODELS: dict[str, dict[str, Any]] = {
    # Trains on a laptop's CPU.
    "small": {
        "n_layer": 4, "d_model": 192, "n_head": 3, "d_head": 64, "d_inner": 768, "dropout": 0.05, "mem_len": 256,
    },
    # What `txl demo` trains: 0.9M parameters, since minutes of 2 cores see under 2 million tokens.
    "demo": {
        "n_layer": 4, "d_model": 128, "n_head": 4, "d_head": 32, "d_inner": 512, "dropout": 0.0, "mem_len": 256,
        "pre_norm": True, "untie_r": True, "init_std": 0.06,
    },
    # The released enwik8 configurations: 41M parameters, 1.06 bpc, and 277M, 0.99 bpc in the paper.
    "enwik8-base": {
        "n_layer": 12, "d_model": 512, "n_head": 8, "d_head": 64, "d_inner": 2048, "dropout": 0.1, "mem_len": 512,
    },
    "enwik8-large": {
        "n_layer": 24, "d_model": 1024, "n_head": 8, "d_head": 128, "d_inner": 3072, "dropout": 0.15,
        "attn_dropout": 0.15, "mem_len": 768,
    },
}  # fmt: skip
