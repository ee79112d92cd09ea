"""How to train, as a frozen dataclass that travels as JSON inside checkpoints."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from txl.errors import TxlError

Schedule = Literal["cosine", "cosine-released", "constant"]
Average = Literal["none", "ema", "triggered"]

MOST_LR = 1e6  # far beyond any use, and far from the end of float32


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; names are those of the released code where it has them.

    Attributes:
        steps: updates; each scores batch x tgt_len x accumulate tokens.
        batch: streams the corpus is cut into, each with its own memory.
        batch_chunk: parts that the batch is computed in, one after the other, for less memory.
        tgt_len: tokens of a segment. ext_len: tokens before it that are read again as context.
        loss: "full", or "half": a segment is tgt_len tokens, of which the later half is scored;
            the next begins in its middle, so that every token is scored once an epoch.
        accumulate: segments a stream advances per update, their gradients averaged.
        optimizer: "adam" (AdamW with weight_decay), or "muon" for the matrices of the layers, q, k
            and v apart, and Adam for the rest.
        weight_decay: of the layers' projections and feed-forward matrices, of nothing else.
        lr: peak learning rate. warmup: updates until it is reached; None for a thirtieth of steps.
        schedule: after warm-up. "cosine": half a cosine over the updates that are left (TensorFlow
            code). "cosine-released": over all updates, warm-up included (PyTorch code).
            "constant".
        min_lr_ratio: of the last learning rate to the peak (TensorFlow code: 0.004).
        clip: largest norm of the gradient.
        average: of the weights, for validation and the best checkpoint. "ema": exponential, with
            ema_decay. "triggered": the mean of all since validation was worse than the best of all
            but the last `patience` ones (AWD-LSTM, Merity et al. 2018).
        intermediate_losses: layer l of n predicts, too, for the first l / 2n of the updates
            (Al-Rfou et al. 2018).
        eval_tokens: tokens of the validation split scored at each evaluation; None for all.
        save_every: updates between checkpoints; one is also written at the end and on Ctrl-C.
        precision: "fp32"; "bf16", by torch.autocast; "auto": bf16 on a GPU that multiplies it, else
            fp32. The commands put what they have measured for "auto" on a CPU in its place.
        compile: the layers, by torch.compile. recompute: each layer's activations in backward
            (activation checkpointing), for less memory.
    """

    steps: int = 1000
    batch: int = 16
    batch_chunk: int = 1
    tgt_len: int = 128
    ext_len: int = 0
    loss: Literal["full", "half"] = "full"
    accumulate: int = 1
    optimizer: Literal["adam", "muon"] = "adam"
    lr: float = 2.5e-4
    warmup: int | None = 0
    schedule: Schedule = "cosine"
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.25
    average: Average = "none"
    ema_decay: float = 0.999
    patience: int = 5
    intermediate_losses: bool = False
    eval_every: int = 500
    eval_tokens: int | None = 65536
    save_every: int = 500
    log_every: int = 10
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        counts = ("steps", "batch", "batch_chunk", "tgt_len", "accumulate", "patience", "eval_every", "save_every")
        for name in (*counts, "log_every"):
            if getattr(self, name) < 1:
                raise TxlError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.eval_tokens is not None and self.eval_tokens < 1:
            raise TxlError(f"eval_tokens must be None or >= 1, got {self.eval_tokens}")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise TxlError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.lr > MOST_LR:
            raise TxlError(f"lr must be <= {MOST_LR:g}, got {self.lr:g}")
        for name in ("ext_len", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise TxlError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.warmup is not None and self.warmup < 0:
            raise TxlError(f"warmup must be None or >= 0, got {self.warmup}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise TxlError(f"min_lr_ratio must be in [0, 1], got {self.min_lr_ratio}")
        if not 0 < self.ema_decay < 1:
            raise TxlError(f"ema_decay must be in (0, 1), got {self.ema_decay}")
        choices = {
            "loss": ("full", "half"), "optimizer": ("adam", "muon"), "schedule": get_args(Schedule),
            "average": get_args(Average), "precision": ("auto", "fp32", "bf16"),
        }  # fmt: skip
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                raise TxlError(f"{name} must be {', '.join(accepted)}, got {getattr(self, name)!r}")
        if self.batch % self.batch_chunk:
            raise TxlError(f"batch must be a multiple of batch_chunk, got {self.batch} and {self.batch_chunk}")
        if self.loss == "half" and (self.ext_len or self.tgt_len < 2):
            raise TxlError(
                f"loss 'half' needs tgt_len >= 2 and no ext_len of its own, got {self.tgt_len} and {self.ext_len}"
            )

    @property
    def scored(self) -> int:
        """Tokens of a stream that a segment scores."""
        return self.tgt_len - self.context if self.loss == "half" else self.tgt_len

    @property
    def context(self) -> int:
        """Tokens before them that the segment reads again."""
        return self.tgt_len // 2 if self.loss == "half" else self.ext_len

    @property
    def warmup_updates(self) -> int:
        return self.steps // 30 if self.warmup is None else self.warmup

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainConfig":
        """Raises TxlError on a field this version does not know, or a value of another type."""
        try:
            return cls(**{k: v for k, v in values.items() if (k, v) != ("offload_memory", False)})  # of older runs
        except (TypeError, ValueError) as error:
            raise TxlError(f"the options of training are damaged: {error}") from error
