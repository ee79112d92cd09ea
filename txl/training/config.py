"""How to train, as a frozen dataclass that travels as JSON inside checkpoints."""

from dataclasses import dataclass
from typing import Literal

from txl.errors import TxlError


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train: Adam or AdamW, warm-up, cosine to `min_lr_ratio`, clipping by global norm.

    Attributes:
        steps: updates; each sees batch x tgt_len x accumulate tokens.
        batch: streams the corpus is cut into, each with its own memory.
        accumulate: segments a stream advances per update, their gradients averaged.
        eval_tokens: tokens of the validation split scored at each evaluation; None for all.
        save_every: updates between checkpoints; one is also written at the end and on Ctrl-C.
    """

    steps: int = 1000
    batch: int = 16
    tgt_len: int = 128
    lr: float = 2.5e-4
    warmup: int = 0
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.25
    accumulate: int = 1
    eval_every: int = 500
    eval_tokens: int | None = 65536
    save_every: int = 500
    log_every: int = 10
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "tgt_len", "accumulate", "eval_every", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise TxlError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.eval_tokens is not None and self.eval_tokens < 1:
            raise TxlError(f"eval_tokens must be None or >= 1, got {self.eval_tokens}")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise TxlError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("warmup", "weight_decay", "min_lr_ratio"):
            if not getattr(self, name) >= 0:
                raise TxlError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise TxlError(f"precision must be auto, fp32 or bf16, got {self.precision!r}")
