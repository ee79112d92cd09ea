"""The training loop: one run folder, resumable bit for bit."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.evaluate import Score, evaluate
from txl.model.config import ModelConfig
from txl.model.transformer import HiddenMemory, TransformerXL
from txl.paths import AnyPath
from txl.text.corpus import Corpus
from txl.text.streams import OrderedStreams
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig

Report = Callable[[dict[str, Any]], None]


class Interrupted(Exception):
    """Training was asked to stop; the checkpoint is written."""


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of update `step`, from 0 on: linear warm-up, then half a cosine down to lr * min_lr_ratio."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def make_optimizer(model: TransformerXL, config: TrainConfig) -> torch.optim.Optimizer:
    """Adam, or AdamW with decay on matrices only."""
    if config.weight_decay == 0:
        return torch.optim.Adam(model.parameters(), lr=config.lr)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr)


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 if asked for, or if "auto" and the device multiplies it natively; else None."""
    helps = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and helps) else None


class Trainer:
    """A run: model, optimizer, data, and the folder they are kept in.

    Files: `run.json` (configurations), `log.jsonl` (one object a line), `last.safetensors`
    (resumable), `best.safetensors` (parameters with the lowest validation loss).
    """

    def __init__(
        self,
        folder: AnyPath,
        corpus: Corpus,
        model_config: ModelConfig,
        config: TrainConfig,
        *,
        resume: bool = False,
        device: torch.device | str = "cpu",
        tensorboard: bool = False,
    ) -> None:
        """Starts a run, or takes one up again at its last checkpoint.

        Raises:
            TxlError: the folder already holds a run (without `resume`), or holds none or one of
                other options (with it); or the corpus is too short.
        """
        self.folder = folder = Path(folder)
        self.corpus, self.config = corpus, config
        self.device = torch.device(device)
        self.last, self.best = folder / "last.safetensors", folder / "best.safetensors"
        self.streams = OrderedStreams(corpus.train, config.batch, config.tgt_len)
        if model_config.vocab_size != len(corpus.vocabulary):
            raise TxlError(
                f"vocab_size is {model_config.vocab_size}, but the corpus has {len(corpus.vocabulary)} symbols"
            )
        torch.manual_seed(config.seed)
        self.model = TransformerXL(model_config).to(self.device)
        self.optimizer = make_optimizer(self.model, config)
        self.step = 0
        self.attn_len = model_config.attn_len(config.tgt_len)
        self.best_loss = math.inf
        self.memory: HiddenMemory | None = None
        self.stop_requested = False
        if resume:
            self._resume()
        else:
            refuse_used_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
            text = corpus.folder.resolve()
            inside = text.is_relative_to(folder.resolve())  # such a run can be moved
            where = text.relative_to(folder.resolve()) if inside else text
            record = {"model": model_config.to_json(), "train": asdict(config), "corpus": str(where)}
            (folder / "run.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
            (folder / "log.jsonl").write_text("", encoding="utf-8")
        self._board = None
        if tensorboard:
            self._board = _summary_writer(folder)

    def request_stop(self) -> None:
        """Asks `run` to write a checkpoint after the update in progress and raise `Interrupted`."""
        self.stop_requested = True

    def advance(self, updates: int) -> None:
        """So many updates without log, evaluation or checkpoint."""
        for _ in range(updates):
            self._update()

    def run(self, report: Report | None = None) -> None:
        """Trains to `config.steps`.

        report: called after each logged update and each evaluation with what goes into the log.

        Raises:
            Interrupted: `request_stop` was called.
            TxlError: loss or gradient are no longer finite, or a checkpoint cannot be written.
        """
        c = self.config
        since, updates = time.perf_counter(), 0
        while self.step < c.steps:
            loss, norm = self._update()
            updates += 1
            if self.step % c.log_every == 0 or self.step == c.steps:
                now = time.perf_counter()
                rate = updates * c.batch * c.tgt_len * c.accumulate / (now - since)
                entry = {"step": self.step, "loss": loss, "bpc": loss / math.log(2), "grad_norm": norm}
                entry |= {"lr": learning_rate(self.step - 1, c), "tokens_per_s": rate}
                self._log(entry, report)
                since, updates = now, 0
            if self.step % c.eval_every == 0 or self.step == c.steps:
                began = time.perf_counter()
                self._evaluate(report)
                since += time.perf_counter() - began
            if self.stop_requested or self.step % c.save_every == 0 or self.step == c.steps:
                self.save()
            if self.stop_requested and self.step < c.steps:
                raise Interrupted

    def _update(self) -> tuple[float, float]:
        """One optimizer step; its mean loss in nats and the gradient's norm before clipping."""
        c, dtype = self.config, autocast_dtype(self.config.precision, self.device)
        self.model.train()
        total = 0.0
        for part in range(c.accumulate):
            n = self.step * c.accumulate + part
            if self.streams.starts_epoch(n):
                self.memory = None
            tokens, targets = (x.to(self.device) for x in self.streams.segment(n))
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                logits, self.memory = self.model(tokens, self.memory)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            (loss / c.accumulate).backward()
            total += loss.item() / c.accumulate
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.clip).item()
        if not math.isfinite(total) or not math.isfinite(norm):
            what = f"the loss became {total}" if not math.isfinite(total) else f"the gradient's norm became {norm}"
            raise TxlError(f"{what} at step {self.step + 1}; {self._last_good()}")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, c)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total, norm

    def _last_good(self) -> str:
        if not self.last.exists():
            return "no checkpoint had been written yet"
        return f"the last good checkpoint is {self.last} (step {checkpoints.load(self.last).state['step']})"

    def validate(self) -> Score:
        """The validation split at the longest attention of training."""
        start = self.corpus.vocabulary.start
        return evaluate(self.model, self.corpus.valid, start, self.attn_len, limit=self.config.eval_tokens)

    def _evaluate(self, report: Report | None) -> None:
        score = self.validate()
        self._log({"step": self.step, "valid_loss": score.nats, "valid_bpc": score.bpc}, report)
        if score.nats < self.best_loss:
            self.best_loss = score.nats
            state = {"step": self.step, "valid": score.nats, "attn_len": self.attn_len}
            checkpoints.save(self.best, self.model, self.corpus.vocabulary, state, {})

    def _log(self, entry: dict[str, Any], report: Report | None) -> None:
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self._board is not None:
            for name, value in entry.items():
                if name != "step":
                    self._board.add_scalar(name, value, entry["step"])
        if report:
            report(entry)

    def save(self) -> None:
        """Writes `last.safetensors` with everything a bit-exact continuation needs."""
        extra: dict[str, Tensor] = {"rng.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            extra["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        for i, state in self.optimizer.state_dict()["state"].items():
            extra |= {f"optimizer.{i}.{name}": torch.as_tensor(x) for name, x in state.items()}
        for i, x in enumerate(self.memory or ()):
            extra[f"memory.{i}"] = x
        state = {"step": self.step, "best_loss": self.best_loss, "train": asdict(self.config)}
        state |= {"corpus": self.corpus.fingerprint, "attn_len": self.attn_len}
        checkpoints.save(self.last, self.model, self.corpus.vocabulary, state, extra)

    def _resume(self) -> None:
        saved = checkpoints.load(self.last)
        if "train" not in saved.state:
            raise TxlError(f"{self.last}: holds parameters only (a best checkpoint?); it cannot be resumed")
        _refuse_changes(self.folder, "model", saved.config.to_json(), self.model.config.to_json())
        _refuse_changes(self.folder, "training", saved.state["train"], asdict(self.config))
        if saved.state["corpus"] != self.corpus.fingerprint:
            raise TxlError(
                f"{self.folder}: cannot resume on another text: {self.corpus.folder} is not what it was trained on"
            )
        checkpoints.load_parameters(self.model, saved)
        state = self.optimizer.state_dict()
        state["state"] = {}
        for name, x in saved.part("optimizer").items():
            i, key = name.split(".", 1)
            state["state"].setdefault(int(i), {})[key] = x
        self.optimizer.load_state_dict(state)
        memory = saved.part("memory")
        self.memory = tuple(memory[str(i)].to(self.device) for i in range(len(memory))) or None
        self.step, self.best_loss = saved.state["step"], saved.state["best_loss"]
        rng = saved.part("rng")
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and self.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"], self.device)
        _truncate_log(self.folder / "log.jsonl", self.step)


def refuse_used_folder(folder: AnyPath) -> None:
    """Raises TxlError if a run has left a checkpoint in the folder."""
    if any(Path(folder, name).exists() for name in ("last.safetensors", "best.safetensors")):
        raise TxlError(f"{folder}: already holds a run; continue it with --resume or choose another folder")


@dataclass(frozen=True)
class RunRecord:
    """What `run.json` says of a run."""

    model: dict[str, Any]
    train: dict[str, Any]
    corpus: Path


def read_record(folder: AnyPath) -> RunRecord:
    """The options and the corpus of the run in a folder.

    Raises:
        TxlError: there is none.
    """
    folder = Path(folder)
    try:
        values = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return RunRecord(values["model"], values["train"], folder / values["corpus"])
    except (OSError, ValueError, KeyError) as error:
        raise TxlError(f"{folder}: holds no run ({error})") from error


def _refuse_changes(folder: Path, what: str, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    changed = [f"{k} is {asked.get(k)}, was {saved.get(k)}" for k in {**saved, **asked} if saved.get(k) != asked.get(k)]
    if changed:
        raise TxlError(f"{folder}: cannot resume with other {what} options: {'; '.join(changed)}")


def _truncate_log(path: Path, step: int) -> None:
    """Drops what a killed run logged after its last checkpoint."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        path.write_text("".join(kept), encoding="utf-8")


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TxlError('--tensorboard needs a package: pip install "txl-kernels[tensorboard]"') from error
    return SummaryWriter(str(folder))
