"""The training loop: one run folder, resumable bit for bit."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from txl.errors import TxlError
from txl.evaluation.evaluate import default_method, evaluate
from txl.evaluation.score import Score, perplexity
from txl.model.memory import HiddenMemory
from txl.model.networks import Config, make_network
from txl.model.recurrent_config import RecurrentConfig
from txl.model.transformer import TransformerXL
from txl.paths import AnyPath
from txl.text.corpus import Corpus
from txl.text.streams import training_streams
from txl.training import checkpoint as checkpoints
from txl.training import log
from txl.training import resume as resuming
from txl.training.average import WeightAverage
from txl.training.config import TrainConfig
from txl.training.lock import lock
from txl.training.losses import layers_that_predict, segment_loss
from txl.training.optimizer import make_optimizers
from txl.training.run_folder import refuse_used_folder, write_record
from txl.training.schedule import learning_rate

Report = Callable[[dict[str, Any]], None]


class Interrupted(Exception):
    """Training was asked to stop; the checkpoint is written."""


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 if asked for, or if "auto" and the device multiplies it natively; else None."""
    helps = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and helps) else None


class Trainer:
    """A run: model, optimizers, data, and the folder they are kept in.

    Files: `run.json` (configurations), `log.jsonl` (one object a line), `last.safetensors`
    (resumable), `best.safetensors` (parameters with the lowest validation loss; the average's
    where one is kept).

    Attributes:
        step: updates done.
        attn_len: most keys a token sees in training.
        segment: tokens that a segment of training has, context and all.
        memories: of each chunk of the batch.
    """

    def __init__(
        self,
        folder: AnyPath,
        corpus: Corpus,
        model_config: Config,
        config: TrainConfig,
        *,
        resume: bool = False,
        device: torch.device | str = "cpu",
        tensorboard: bool = False,
        init: checkpoints.Checkpoint | None = None,
    ) -> None:
        """Starts a run, or takes one up again at its last checkpoint.

        init: whose parameters a new run begins with; None to draw them.

        Raises:
            TxlError: `init` is of another vocabulary or other sizes; the folder already holds a run
                (without `resume`), or holds none or one of other options (with it); another process
                trains there; or the corpus is too short, or not as it was prepared.
        """
        self.folder = folder = Path(folder)
        self.corpus, self.config = corpus, config
        self.device = torch.device(device)
        self.last, self.best = folder / "last.safetensors", folder / "best.safetensors"
        self.streams = training_streams(corpus, config.batch, config.scored, config.context, config.seed)
        if model_config.vocab_size != len(corpus.vocabulary):
            raise TxlError(
                f"vocab_size is {model_config.vocab_size}, but the corpus has {len(corpus.vocabulary)} symbols"
            )
        corpus.verify()
        self.segment = config.scored + config.context
        _check_fit(model_config, config, self.segment)
        torch.manual_seed(config.seed)
        self.model = make_network(model_config)
        if init is not None and not resume:
            if init.vocabulary != corpus.vocabulary:
                raise TxlError(f"{init.path}: its vocabulary is not that of the corpus in {corpus.folder}")
            checkpoints.load_parameters(self.model, init)
        self.model.to(self.device)
        self.optimizers = make_optimizers(self.model, config)
        self.average = WeightAverage(self.model, config)
        if isinstance(self.model, TransformerXL):
            for block in self.model.layers:
                block.recompute = config.recompute
                if config.compile:
                    block.compile(dynamic=True)
        self.step = 0
        self.attn_len = model_config.attn_len(self.segment)
        self.best_loss = math.inf
        self.memories: list[HiddenMemory | None] = [None] * config.batch_chunk
        self.stop_requested = self.validation_due = False
        if not resume:
            refuse_used_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            lock(folder)
            checkpoints.remove_unfinished(folder)
        if resume:
            resuming.restore(self)
        write_record(folder, model_config.to_json(), config.to_json(), corpus.folder)
        if not resume:
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
        if self.validation_due:  # the run was interrupted before it
            self.validation_due = False
            self._evaluate(report)
            self.save()
        since, updates = time.perf_counter(), 0
        while self.step < c.steps:
            loss, norm = self._update()
            updates += 1
            if self.step % c.log_every == 0 or self.step == c.steps:
                now = time.perf_counter()
                rate = updates * c.batch * c.scored * c.accumulate / (now - since)
                entry = {"step": self.step, "loss": loss, "bpc": loss / math.log(2), "ppl": perplexity(loss)}
                entry["grad_norm"] = norm
                entry |= {"lr": learning_rate(self.step - 1, c), "tokens_per_s": rate}
                self._log(entry, report)
                since, updates = now, 0
            if self.stop_requested and self.step < c.steps:  # a validation that is due takes its time
                self.validation_due = self.step % c.eval_every == 0
                self.save()
                raise Interrupted
            if self.step % c.eval_every == 0 or self.step == c.steps:
                began = time.perf_counter()
                if not self.last.exists():  # whatever ends the run from here on, it can be resumed
                    self.validation_due = True
                    self.save()
                    self.validation_due = False
                self._evaluate(report)
                since += time.perf_counter() - began
            if self.step % c.save_every == 0 or self.step == c.steps:
                self.save()

    def _update(self) -> tuple[float, float]:
        """One optimizer step; its mean loss in nats and the gradient's norm before clipping."""
        c, dtype = self.config, autocast_dtype(self.config.precision, self.device)
        self.model.train()
        nll = torch.zeros((), device=self.device)
        intermediate = range(0)
        if c.intermediate_losses:
            intermediate = layers_that_predict(self.model.config.n_layer, self.step / c.steps)
        for part in range(c.accumulate):
            n = self.step * c.accumulate + part
            if self.streams.starts_epoch(n):
                self.memories = [None] * c.batch_chunk
            tokens, targets = (x.to(self.device) for x in self.streams.segment(n))
            chunks = zip(tokens.chunk(c.batch_chunk), targets.chunk(c.batch_chunk), strict=True)
            for i, (inputs, wanted) in enumerate(chunks):
                with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                    loss = segment_loss(
                        self.model, inputs, wanted, self.memories[i], ext_len=c.context, intermediate=intermediate
                    )
                self.memories[i] = loss.memory
                (loss.total / (c.accumulate * c.batch_chunk)).backward()
                nll += loss.nll / (c.accumulate * c.batch_chunk)
        both = torch.stack([nll, torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.clip)])
        total, norm = both.tolist()  # the one wait for the device
        if not math.isfinite(total) or not math.isfinite(norm):
            what = f"the loss became {total}" if not math.isfinite(total) else f"the gradient's norm became {norm}"
            raise TxlError(f"{what} at step {self.step + 1}; {self._last_good()}")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.step, c)
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.average.update()
        self.step += 1
        return total, norm

    def _last_good(self) -> str:
        if not self.last.exists():
            return "no checkpoint had been written yet"
        return f"the last good checkpoint is {self.last} (step {checkpoints.load(self.last).state['step']})"

    def validate(self) -> Score:
        """The validation split at the longest attention of training, by the average if there is
        one."""
        model = self.average.model
        method = default_method(model)
        # By segments as in training; a window slides by half of itself.
        segment = {"cached": 128, "segments": self.config.scored, "sliding": max(self.segment // 2, 1)}[method]
        attn_len = self.attn_len if method == "cached" else model.config.mem_len + self.segment
        return evaluate(
            model, self.corpus.valid, self.corpus.vocabulary.start, attn_len, method=method, segment=segment,
            limit=self.config.eval_tokens,
        )  # fmt: skip

    def _evaluate(self, report: Report | None) -> None:
        score = self.validate()
        self.average.validated(score.nats)
        entry = {"step": self.step, "valid_loss": score.nats, "valid_bpc": score.bpc, "valid_ppl": score.ppl}
        self._log(entry, report)
        if score.nats < self.best_loss:
            self.best_loss = score.nats
            state = {"step": self.step, "valid": score.nats, "attn_len": self.attn_len, "segment": self.segment}
            checkpoints.save(self.best, self.average.model, self.corpus.vocabulary, state, {})

    def _log(self, entry: dict[str, Any], report: Report | None) -> None:
        log.append(self.folder / "log.jsonl", entry)
        if self._board is not None:
            for name, value in entry.items():
                if name != "step":
                    self._board.add_scalar(name, value, entry["step"])
        if report:
            report(entry)

    def save(self) -> None:
        """Writes `last.safetensors` with everything a bit-exact continuation needs."""
        state, extra = resuming.everything(self)
        checkpoints.save(self.last, self.model, self.corpus.vocabulary, state, extra)


def _check_fit(model: Config, training: TrainConfig, segment: int) -> None:
    """Raises TxlError where a network cannot be trained so."""
    if isinstance(model, RecurrentConfig):
        for name in ("compile", "recompute", "intermediate_losses"):
            if getattr(training, name):
                raise TxlError(f"{name} is for Transformers, not for a network of kind {model.network!r}")
        if training.context:
            raise TxlError(
                f"a network of kind {model.network!r} cannot read tokens again: ext_len must be 0 and loss 'full', got "
                f"{training.ext_len} and {training.loss!r}"
            )
    elif model.encoding == "learned" and segment > (model.table_len or 0):
        raise TxlError(f"segments of {segment} tokens are beyond the {model.table_len} learned positions of table_len")


def updates_in(minutes: float, trial: Trainer, least: int = 16) -> int:
    """Updates that fill so much time, judged by `least` of a trainer that is thrown away after."""
    trial.advance(4)
    began = time.perf_counter()
    trial.advance(least)
    seconds: float = (time.perf_counter() - began) / least
    return max(int(minutes * 60 / seconds), 1)


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TxlError('--tensorboard needs a package: pip install "txl-kernels[tensorboard]"') from error
    return SummaryWriter(str(folder))
