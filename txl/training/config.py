"""Options of training (a frozen dataclass that is stored as JSON in checkpoints), the learning rate
of each update, and the precision of training and evaluation."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from txl.errors import TxlError
from txl.fields import COUNT, POSITIVE, RATE, check_ranges, check_types, option
from txl.text.streams import Counting
from txl_kernels.backends import cpu

Schedule = Literal["cosine", "cosine-released", "constant"]
Average = Literal["none", "ema", "triggered"]

_TRAINING, _OPTIMIZER, _KEEPING = "Training", "Optimizer", "Evaluation and checkpoints"  # headings of --help
PRECISIONS = ("auto", "fp32", "bf16")
MAX_LR = 1e6  # larger than any useful rate, and far below float32's maximum


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of training, named as in the released code where it has them.

    Attributes:
        steps: number of updates; each scores batch x tgt_len x accumulate tokens.
        batch: number of streams that the corpus is cut into, each with its own memory.
        streams: how the corpus is cut, see `Streams`: "all" trains on every token,
            "released" as the released code does. Shuffled sentences support "all" only.
        batch_chunk: number of parts into which a batch is split, computed one after the other to
            save memory.
        tgt_len: tokens of a segment. ext_len: tokens before it that are read again as context.
        loss: "full", or "half": only the second half of a segment's tgt_len tokens is scored, and
            the next segment begins in its middle, so that every token is scored once an epoch.
        accumulate: segments that a stream advances per update; their gradients are averaged.
        optimizer: "adam" (AdamW with weight_decay), or "muon" for the layers' matrices, with q, k
            and v as separate ones, and Adam for all other parameters.
        weight_decay: applied only to the layers' projections and feed-forward matrices.
        lr: peak learning rate. warmup: updates until it is reached; None for a thirtieth of steps.
        schedule: the learning rate after warm-up. "cosine": half a cosine over the remaining
            updates (TensorFlow code). "cosine-released": half a cosine over all updates including
            warm-up; the first update has the peak rate, and each later one the rate of the update
            before it (PyTorch code). "constant".
        min_lr_ratio: ratio of the last learning rate to the peak (TensorFlow code: 0.004).
        clip: maximum norm of the gradient.
        average: an average of the weights, used for validation and the best checkpoint. "ema":
            exponential, with ema_decay. "triggered": the mean over all updates since a validation's
            loss first exceeded the best of all earlier validations but the last `patience`
            (AWD-LSTM, Merity et al. 2018).
        intermediate_losses: add the loss of a prediction from layer l of n during the first l / 2n
            of the updates (Al-Rfou et al. 2018).
        eval_tokens: tokens of the validation split scored at each validation; None for all.
        save_every: updates between checkpoints; one is also written at validations and on Ctrl-C.
        precision: "fp32"; "bf16", by torch.autocast; "auto": see `resolved`.
            `Trainer` stores the precision that it resolves "auto" to.
        compile: compile the layers with torch.compile. recompute: recompute each layer's
            activations in backward (activation checkpointing) to save memory.
    """

    steps: int = option(1000, _TRAINING, "Updates.")
    batch: int = option(16, _TRAINING, "Parallel streams of text.")
    streams: Counting = option("all", _TRAINING, "How text is cut: all (every token), or released (as that code).")
    batch_chunk: int = option(1, _TRAINING, "Parts the batch is computed in, to save memory.")
    tgt_len: int = option(128, _TRAINING, "Tokens of a segment.")
    ext_len: int = option(0, _TRAINING, "Tokens before it that are read again.")
    loss: Literal["full", "half"] = option("full", _TRAINING, "full, or half: only a segment's later half is scored.")
    accumulate: int = option(1, _TRAINING, "Segments an update.")
    optimizer: Literal["adam", "muon"] = option(
        "adam", _OPTIMIZER, "adam, or muon (torch >= 2.9) for the layers' matrices."
    )
    lr: float = option(2.5e-4, _OPTIMIZER, "Peak learning rate.")
    warmup: int | None = option(0, _OPTIMIZER, "Updates of linear warm-up.")
    schedule: Schedule = option("cosine", _OPTIMIZER, "cosine, cosine-released or constant.")
    min_lr_ratio: float = option(0.0, _OPTIMIZER, "Last learning rate over the peak.")
    weight_decay: float = option(0.0, _OPTIMIZER, "AdamW's, of the layers' matrices; 0 is Adam.")
    clip: float = option(0.25, _OPTIMIZER, "Largest norm of the gradient.")
    average: Average = option("none", _OPTIMIZER, "Of the weights: none, ema or triggered.")
    ema_decay: float = option(0.999, _OPTIMIZER, "Of the exponential average.")
    patience: int = 5
    intermediate_losses: bool = option(
        False, _TRAINING, "Lower layers predict, too, at first.", "--intermediate-losses"
    )
    eval_every: int = option(500, _KEEPING, "Updates between evaluations.")
    eval_tokens: int | None = option(65536, _KEEPING, "Tokens scored at each; 0: the whole split.")
    save_every: int = option(500, _KEEPING, "Updates between checkpoints.")
    log_every: int = option(10, _KEEPING, "Updates between lines of the log.")
    seed: int = option(0, _TRAINING, "Of initialisation, dropout and shuffling.", min=0, max=2**63 - 1)
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", _TRAINING, "auto (bf16 where the device multiplies it faster), fp32 or bf16."
    )
    compile: bool = option(False, _TRAINING, "The layers by torch.compile.", "--compile")
    recompute: bool = option(False, _TRAINING, "Activations in backward, to save memory.", "--recompute")

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(
            self, steps=COUNT, batch=COUNT, batch_chunk=COUNT, tgt_len=COUNT, accumulate=COUNT, patience=COUNT,
            eval_every=COUNT, save_every=COUNT, log_every=COUNT, eval_tokens=COUNT, ext_len=(0, COUNT[1]),
            warmup=(0, math.inf), lr=(POSITIVE[0], MAX_LR), clip=(POSITIVE[0], math.inf), weight_decay=(0, math.inf),
            min_lr_ratio=(0, 1), ema_decay=(POSITIVE[0], RATE[1]),
        )  # fmt: skip
        if self.batch % self.batch_chunk:
            raise TxlError(f"batch must be a multiple of batch_chunk, got {self.batch} and {self.batch_chunk}")
        if self.loss == "half" and (self.ext_len or self.tgt_len < 2):
            raise TxlError(
                f"loss 'half' needs tgt_len >= 2 and no ext_len of its own, got {self.tgt_len} and {self.ext_len}"
            )

    @property
    def scored(self) -> int:
        """Number of tokens of a stream that a segment scores."""
        return self.tgt_len - self.context if self.loss == "half" else self.tgt_len

    @property
    def context(self) -> int:
        """Number of tokens before the scored ones that the segment reads again."""
        return self.tgt_len // 2 if self.loss == "half" else self.ext_len

    @property
    def warmup_updates(self) -> int:
        return self.steps // 30 if self.warmup is None else self.warmup

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainConfig":
        """Make the options from JSON; raise TxlError for an unknown field or a value of the wrong
        type."""
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise TxlError(f"the options of training are damaged: {error}") from error


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of update `step` (from 0): linear warm-up, then `config.schedule`.

    The released PyTorch code sets the rate after each update, by the number of updates done. So
    with "cosine-released" update 0 has the peak rate, and update n the rate of step n of the
    schedule, which is lr / warmup for update 1.
    """
    warmup, released = config.warmup_updates, config.schedule == "cosine-released"
    if released and step == 0:
        return config.lr
    if step < warmup:
        return config.lr * (step if released else step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    began = 0 if released else warmup
    done = (step - began) / max(config.steps - began, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def resolved(precision: str, device: torch.device) -> Literal["fp32", "bf16"]:
    """Return the precision, or for "auto" the one that the device multiplies faster: bf16 on a GPU
    with native bfloat16 and on a CPU with AMX or fast AVX512_BF16, else fp32. Arm's units
    (`neon_bf16`) do not count: they have been run in an emulator only."""
    bf16 = precision == "bf16"
    if precision == "auto" and device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    elif precision == "auto":
        bf16 = instruction_set() in ("amx", "avx512_bf16")
    return "bf16" if bf16 else "fp32"


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype for torch.autocast: bfloat16, or None for the parameters' own."""
    return torch.bfloat16 if resolved(precision, device) == "bf16" else None


def instruction_set() -> str | None:
    """Return the instruction set of the CPU kernels, or None if they are not built."""
    return None if cpu.native.module is None else cpu.native.module.isa()
