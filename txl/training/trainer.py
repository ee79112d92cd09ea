"""The trainer: updates, validations and checkpoints of a run, which can be resumed bit for bit."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl.distributed import World, agree_on
from txl.errors import Interrupted, TxlError
from txl.evaluation.evaluate import Reading, Score, default_method, evaluate, perplexity
from txl.model import Network, make_network
from txl.model.config import Config, RecurrentConfig
from txl.model.recurrent import has_bf16_lstm
from txl.paths import AnyPath, append_text, replace_text
from txl.text.corpus import Corpus
from txl.text.streams import training_streams
from txl.training import checkpoint as checkpoints
from txl.training import run as runs
from txl.training.checkpoint import Checkpoint
from txl.training.config import TrainConfig, learning_rate, resolved
from txl.training.segments import Batches
from txl.training.update import Updated, Updater

_DAMAGED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)
_UNTIMED = 4  # updates before the clock is followed, which first calls and compilation make slow
INTERVALS = ("eval_every", "save_every")  # options that may follow the clock
OnEntry = Callable[[dict[str, Any]], None]  # receives an entry of the log


class Trainer:
    """A run: model, optimizers, data, and the folder where they are stored.

    Files: `run.json` (configurations), `log.jsonl` (one object a line), `last.safetensors` (for
    resuming), `best.safetensors` (parameters with the lowest validation loss, those of the average
    if there is one).

    With several processes, each makes a trainer with the same arguments except `world` and device,
    and all call the same methods. Only the first process writes files and reports.

    Attributes:
        model: the network in training. updater: the network with its optimizers, gradients and
            average.
        batches: segments and memory of this process's streams.
        step: number of updates done. saved_step: that of the newest checkpoint; None if there is
            none.
        attn_len: maximum number of keys a token sees in training.
        segment: number of tokens of a training segment, including context.
        unvalidated: whether the validation of this step is still to be done: the run ended during
            its first one, and was resumed from the checkpoint before it.
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
        init: Checkpoint | None = None,
        world: World = World(),  # noqa: B008 - frozen
    ) -> None:
        """Start a run, or resume one from its last checkpoint; the number of processes may differ
        from before.

        init: a checkpoint whose parameters a new run begins with; None to draw them.

        Raises:
            TxlError: `init` has another vocabulary or other sizes; without `resume`, the folder
                already holds a run; with it, the folder holds none or one with other options;
                another process trains there; the corpus is too short, or damaged; the batch is not
                divisible by the number of processes; or the processes differ in code, configuration
                or corpus.
        """
        self.folder = folder = Path(folder)
        self.device = torch.device(device)
        # Resolved, so that a run stores what it computes in; processes that differ are refused.
        self.config = config = dataclasses.replace(config, precision=resolved(config.precision, self.device))
        self.corpus, self.world = corpus, world
        self.best, self.last = folder / checkpoints.BEST, folder / checkpoints.LAST
        agree_on(world, corpus.fingerprint, model_config.to_json(), config.to_json())
        _check_fit(model_config, config, corpus, self.device)
        streams = training_streams(corpus, config.batch, config.scored, config.context, config.seed, config.streams)
        self.batches = Batches(streams, config, model_config, world, self.device)
        world.first_does(corpus.verify)
        torch.manual_seed(config.seed)
        network = make_network(model_config)
        if init is not None and not resume:
            if init.vocabulary != corpus.vocabulary:
                raise TxlError(f"{init.path}: its vocabulary is not that of the corpus in {corpus.folder}")
            checkpoints.load_parameters(network, init)
        world.first_does(lambda: _lock(folder) if resume else runs.begin(folder, "folder"))
        self.updater = Updater(network.to(self.device), config, world, self.device)
        self.step = 0
        self.saved_step: int | None = None
        self.attn_len = model_config.attn_len(self.segment)
        self.best_loss = math.inf
        self.stop_requested = self.unvalidated = False
        if resume:
            self._restore()
        elif not world.first:
            self._seed_anew()
        self._board: Any = None
        world.first_does(lambda: self._open_logs(not resume, tensorboard))

    @property
    def model(self) -> Network:
        return self.updater.network

    @property
    def segment(self) -> int:
        return self.config.scored + self.config.context

    def request_stop(self) -> None:
        """Make `run` write a checkpoint after the current update and raise `Interrupted`."""
        self.stop_requested = True

    def advance(self, updates: int) -> None:
        """Do a number of updates without log, evaluation or checkpoint."""
        for _ in range(updates):
            self._update()

    def run(
        self, report: OnEntry | None = None, seconds: float | None = None, follow: Collection[str] = INTERVALS
    ) -> None:
        """Train up to `config.steps`.

        report: called after each logged update and each evaluation with the entry of the log.
        seconds: time to train for; `config.steps`, and with it the learning-rate schedule, follows
        the measured speed from the fifth update on.
        follow: of eval_every and save_every those that become a quarter of these steps.

        Raises:
            Interrupted: `request_stop` was called.
            TxlError: loss or gradient are no longer finite, or a checkpoint cannot be written.
        """
        if self.unvalidated:
            self._evaluate(report)
        began = since = time.perf_counter()
        first, updates, settled = self.step, 0, began
        while self.step < (c := self.config).steps:
            updated = self._update()
            updates += 1
            rate_of_learning, logged = learning_rate(self.step - 1, c), self.step % c.log_every == 0
            if self.step - first == _UNTIMED:
                settled = time.perf_counter()
            elif (
                seconds is not None
                and self.step - first > _UNTIMED
                and (logged or self.world.size == 1 or self.step == c.steps)
            ):
                c = self._follow_clock(self.step - first - _UNTIMED, settled, began + seconds, follow)
            if logged or self.step == c.steps:
                now = time.perf_counter()
                rate = updates * c.batch * c.scored * c.accumulate / (now - since)
                loss = updated.loss
                entry = {"step": self.step, "loss": loss, "bpc": loss / math.log(2), "ppl": perplexity(loss)}
                entry["grad_norm"] = updated.norm
                entry |= {"lr": rate_of_learning, "tokens_per_s": rate}
                self._log(entry, report)
                since, updates = now, 0
            validates = self.step % c.eval_every == 0 or self.step == c.steps
            if validates:
                paused = time.perf_counter()
                self._evaluate(report)
                since += time.perf_counter() - paused
            # With several processes, only the exchanged flag counts: a process's own may have been
            # set since.
            stop = (self.stop_requested if self.world.size == 1 else updated.stop) and self.step < c.steps
            if stop and seconds is not None and self.step - first <= _UNTIMED:  # its steps are estimated
                self._follow_clock(self.step - first, began, began + seconds, follow, minimum=1)
                self.save()
            elif not validates and (stop or self.step % c.save_every == 0):
                self.save()
            if stop:
                raise Interrupted

    def _follow_clock(
        self, updates: int, since: float, end: float, follow: Collection[str], minimum: int = 0
    ) -> TrainConfig:
        """Set `config.steps` to the number that is done at the time `end`, after a number of
        `updates` since the time `since`; at least `minimum` more. Set eval_every before the first
        validation, and save_every before the first checkpoint, to a quarter of it if `follow` names
        them. All processes use the first one's clock."""
        now = time.perf_counter()
        left = self.world.gather(max(int((end - now) * updates / (now - since)), minimum))[0]
        steps = self.step + left
        c, every = self.config, max(-(-steps // 4), self.step)
        eval_every = every if "eval_every" in follow and not self.updater.average.losses else c.eval_every
        save_every = every if "save_every" in follow and self.saved_step is None else c.save_every
        self.config = dataclasses.replace(c, steps=steps, eval_every=eval_every, save_every=save_every)
        self.updater.config = self.config
        return self.config

    def _update(self) -> Updated:
        updated = self.updater.update(self.step, self.batches, lambda: self.stop_requested)
        self.step += 1
        self.unvalidated = False
        return updated

    def _score(self, model: Network) -> Score:
        """Score the validation split at training's longest attention length, in the first
        process."""
        # In segments as in training; a sliding window moves by half a segment.
        reach, half = model.config.mem_len + self.segment, max(self.segment // 2, 1)
        method = default_method(model)
        segment = {"cached": None, "segments": self.config.scored, "sliding": half}[method]
        reading = Reading(self.attn_len if method == "cached" else reach, method, segment)
        return self.world.first_does(
            lambda: evaluate(
                model, self.corpus.valid, self.corpus.vocabulary.start, reading, limit=self.config.eval_tokens
            )
        )

    def _evaluate(self, report: OnEntry | None) -> None:
        """Validate the average, or the parameters if there is none, and write the best checkpoint,
        then the last one.

        In this order, a run that ends between both is resumed from an earlier checkpoint, and comes
        here again with the same parameters. Before the first checkpoint there is none to resume
        from, so one is written that says that the validation is still to be done.
        """
        if self.saved_step is None:
            self.unvalidated = True
            self.save()
        model = self.updater.average.model
        score = self._score(model)
        self.updater.average.validated(score.nats)
        entry = {"step": self.step, "valid_loss": score.nats, "valid_bpc": score.bpc, "valid_ppl": score.ppl}
        self._log(entry, report)
        if score.nats < self.best_loss:
            self.best_loss = score.nats
            state = {"step": self.step, "attn_len": self.attn_len, "segment": self.segment}
            self.world.first_does(lambda: checkpoints.save(self.best, model, self.corpus.vocabulary, state, {}))
        self.unvalidated = False
        self.save()

    def _open_logs(self, new: bool, tensorboard: bool) -> None:
        self._write_record()
        if new:
            replace_text(self.folder / "log.jsonl", "")
        if tensorboard:
            self._board = _summary_writer(self.folder)

    def _log(self, entry: dict[str, Any], report: OnEntry | None) -> None:
        if not self.world.first:
            return
        append_text(self.folder / "log.jsonl", json.dumps(entry) + "\n")
        if self._board is not None:
            for name, value in entry.items():
                if name != "step":
                    self._board.add_scalar(name, value, entry["step"])
        if report:
            report(entry)

    def save(self) -> None:
        """Write a checkpoint with all state for a bit-exact continuation. All processes must call
        it.

        Raises:
            TxlError: it cannot be written.
        """
        self.world.first_does(self._write_record)
        average, tensors = self.updater.average, self.updater.state_dict() | self.batches.state_dict()
        state: dict[str, Any] = {"step": self.step, "best_loss": self.best_loss, "train": self.config.to_json()}
        state |= {"corpus": self.corpus.fingerprint, "attn_len": self.attn_len, "segment": self.segment}
        state |= {"ranks": self.world.size, "losses": average.losses, "averaging": average.started}
        state |= {"unvalidated": self.unvalidated}
        for own in self.world.gather(self._rng()):
            tensors |= own
        self.world.first_does(lambda: checkpoints.save(self.last, self.model, self.corpus.vocabulary, state, tensors))
        self.saved_step = self.step

    def _write_record(self) -> None:
        """Write run.json again, because the number of steps may have changed with the clock."""
        runs.write_record(self.folder, self.model.config.to_json(), self.config.to_json(), self.corpus.folder)

    def _rng(self) -> dict[str, Tensor]:
        """Return the states of this process's random generators."""
        own = {f"rng.{self.world.rank}.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            own[f"rng.{self.world.rank}.cuda"] = torch.cuda.get_rng_state(self.device)
        return own

    def _seed_anew(self) -> None:
        """Seed this process's random generators differently from those of all other processes and
        steps."""
        torch.manual_seed((self.config.seed + 1_000_003 * self.step + self.world.rank) % 2**63)

    def _restore(self) -> None:
        """Resume the run from its newest checkpoint.

        Raises:
            TxlError: there is none, it is damaged, or it has other options or another corpus.
        """
        saved = checkpoints.load(self.last)
        state = saved.state
        if "train" not in state:
            raise TxlError(f"{saved.path}: holds parameters only (a best checkpoint?); it cannot be resumed")
        self.world.agree({"the checkpoint to resume from": f"{saved.path.name}, {saved.digest[:16]}"})
        try:
            runs.refuse_changes(self.folder, "model", saved.config.to_json(), self.model.config.to_json())
            runs.refuse_changes(self.folder, "training", state["train"], self.config.to_json(), runs.CHANGEABLE)
            if state["corpus"] != self.corpus.fingerprint:
                raise TxlError(
                    f"{self.folder}: cannot resume on another text: {self.corpus.folder} is not what it was trained on"
                )
            if self.config.steps < state["step"]:
                raise TxlError(
                    f"{self.folder}: steps is {self.config.steps}, but {state['step']} updates are done already"
                )
            self.updater.load_state_dict(saved)
            self.batches.load_state_dict(saved)
            self.step, self.best_loss = state["step"], state["best_loss"]
            self.unvalidated = state.get("unvalidated", False)  # earlier versions wrote no such checkpoint
            self._restore_rng(saved)
        except _DAMAGED as error:
            raise TxlError(f"{saved.path}: the checkpoint is damaged: {type(error).__name__}: {error}") from error
        self.saved_step = self.step
        if self.world.first:
            runs.truncate_log(self.folder / "log.jsonl", self.step, self.unvalidated)

    def _restore_rng(self, saved: Checkpoint) -> None:
        """Set the states of this process's random generators, or seed them where the number of
        processes differs from before."""
        if saved.state["ranks"] != self.world.size:
            self._seed_anew()
            return
        torch.set_rng_state(saved.tensors[f"rng.{self.world.rank}.cpu"])
        on_device = saved.tensors.get(f"rng.{self.world.rank}.cuda")
        if on_device is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(on_device, self.device)


def _lock(folder: Path) -> None:
    """Lock the folder of a run that is resumed, if there is one."""
    if folder.is_dir():
        runs.lock(folder)


def _check_fit(model: Config, training: TrainConfig, corpus: Corpus, device: torch.device) -> None:
    """Raise TxlError if corpus, network, options of training and device do not fit together."""
    segment = training.scored + training.context
    if model.vocab_size != len(corpus.vocabulary):
        raise TxlError(f"vocab_size is {model.vocab_size}, but the corpus has {len(corpus.vocabulary)} symbols")
    if isinstance(model, RecurrentConfig):
        for name in ("compile", "recompute", "intermediate_losses"):
            if getattr(training, name):
                raise TxlError(f"{name} is for Transformers, not for a network of kind {model.network!r}")
        if training.context:
            raise TxlError(
                f"a network of kind {model.network!r} cannot read tokens again: ext_len must be 0 and loss 'full', got "
                f"{training.ext_len} and {training.loss!r}"
            )
        if model.network == "lstm" and training.precision == "bf16" and device.type == "cpu" and not has_bf16_lstm():
            raise TxlError(
                "precision must be 'fp32' for an LSTM on this CPU, for which PyTorch has no bf16, got 'bf16'"
            )
    elif model.encoding == "learned" and segment > (model.table_len or 0):
        raise TxlError(f"segments of {segment} tokens are beyond the {model.table_len} learned positions of table_len")


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TxlError('--tensorboard needs a package: pip install "txl-kernels[tensorboard]"') from error
    try:
        return SummaryWriter(str(folder))
    except UnicodeEncodeError as error:
        raise TxlError(f"{folder}: --tensorboard cannot write to a folder whose name is not UTF-8") from error
