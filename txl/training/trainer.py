"""The training loop: one run folder, resumable bit for bit."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from txl.distributed.same import agree_on
from txl.distributed.world import SharedError, World
from txl.errors import TxlError
from txl.evaluation.evaluate import Reading, Score, default_method, evaluate, perplexity
from txl.model.config import PLACES
from txl.model.networks import Config, Network, make_network
from txl.model.recurrent_config import RecurrentConfig
from txl.paths import AnyPath
from txl.text.corpus import Corpus
from txl.text.streams import training_streams
from txl.training import checkpoint as checkpoints
from txl.training import log
from txl.training import resume as resuming
from txl.training.batches import Batches
from txl.training.config import TrainConfig
from txl.training.keeping import Keeper
from txl.training.last import remove_unfinished
from txl.training.lock import lock
from txl.training.run_folder import refuse_used_folder, write_record
from txl.training.schedule import learning_rate
from txl.training.update import NotFinite, Updated, Updater, check_shards

Report = Callable[[dict[str, Any]], None]


class Interrupted(Exception):
    """Training was asked to stop; the checkpoint is written."""


class Trainer:
    """A run: model, optimizers, data, and the folder they are kept in.

    Files: `run.json` (configurations), `log.jsonl` (one object a line), `last.safetensors`
    (resumable; a sharded run has a folder `last-STEP`), `best.safetensors` (parameters with the
    lowest validation loss; the average's where one is kept).

    Several processes train as one: each makes a trainer with the same arguments but its own `world`
    and device, and calls its methods as the others do. Only the first writes, and reports.

    Attributes:
        model: with parameters sharded where the run is. updater: that and what trains it.
        batches: segments and memory of this process's streams.
        step: updates done.
        attn_len: most keys a token sees in training.
        segment: tokens that a segment of training has, context and all.
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
        world: World = World(),  # noqa: B008 - frozen
        shard: bool = False,
    ) -> None:
        """Starts a run, or takes one up again at its last checkpoint, with as many processes as
        there are now.

        init: whose parameters a new run begins with; None to draw them.
        shard: parameters, gradients and the optimizer's state over the processes (FSDP2), which
            must have been joined (`txl.distributed.join`).

        Raises:
            TxlError: `init` is of another vocabulary or other sizes; the folder already holds a run
                (without `resume`), or holds none or one of other options (with it); another process
                trains there; the corpus is too short, or not as it was prepared; the processes do
                not divide the batch; or one of them has other code, configuration or corpus.
        """
        self.folder = folder = Path(folder)
        self.corpus, self.config, self.world = corpus, config, world
        self.device = torch.device(device)
        self.best = folder / "best.safetensors"
        with world.together():
            self._check(model_config)
        agree_on(world, corpus, model_config.to_json(), config.to_json(), shard)
        with world.together():
            streams = training_streams(corpus, config.batch, config.scored, config.context, config.seed)
            if shard:
                check_shards(config)
            self.batches = Batches(streams, config, model_config, world, self.device)
            if world.first:
                corpus.verify()
        torch.manual_seed(config.seed)
        with world.together():
            network = make_network(model_config)
            if init is not None and not resume:
                if init.vocabulary != corpus.vocabulary:
                    raise TxlError(f"{init.path}: its vocabulary is not that of the corpus in {corpus.folder}")
                checkpoints.load_parameters(network, init)
            if world.first:
                self._take_folder(resume)
        self.updater = Updater(network.to(self.device), config, world, self.device, shard)
        self.keeper = Keeper(self, shard)
        self.step = 0
        self.attn_len = model_config.attn_len(self.segment)
        self.best_loss = math.inf
        self.stop_requested = self.validation_due = False
        if resume:
            self.keeper.restore()
        elif not world.first:
            resuming.seed_anew(config, 0, world)
        self._board = None
        with world.together():
            if world.first:
                write_record(folder, model_config.to_json(), config.to_json(), corpus.folder)
                if not resume:
                    (folder / "log.jsonl").write_text("", encoding="utf-8")
                self._board = _summary_writer(folder) if tensorboard else None

    @property
    def model(self) -> Network:
        return self.updater.network

    @property
    def segment(self) -> int:
        return self.config.scored + self.config.context

    @property
    def last(self) -> Path:
        """The checkpoint to go on from, or where it will be."""
        return self.keeper.last

    def _check(self, model_config: Config) -> None:
        """Raises TxlError where corpus, network and training do not go together."""
        if model_config.vocab_size != len(self.corpus.vocabulary):
            raise TxlError(
                f"vocab_size is {model_config.vocab_size}, but the corpus has {len(self.corpus.vocabulary)} symbols"
            )
        _check_fit(model_config, self.config, self.segment)

    def _take_folder(self, resume: bool) -> None:
        """Raises TxlError where the folder is another's, or not what was asked for."""
        if not resume:
            refuse_used_folder(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        if self.folder.is_dir():
            lock(self.folder)
            remove_unfinished(self.folder)

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
            updated = self._update()
            updates += 1
            if self.step % c.log_every == 0 or self.step == c.steps:
                now = time.perf_counter()
                rate = updates * c.batch * c.scored * c.accumulate / (now - since)
                loss = updated.loss
                entry = {"step": self.step, "loss": loss, "bpc": loss / math.log(2), "ppl": perplexity(loss)}
                entry["grad_norm"] = updated.norm
                entry |= {"lr": learning_rate(self.step - 1, c), "tokens_per_s": rate}
                self._log(entry, report)
                since, updates = now, 0
            # Of several processes none acts by its own flag, which may have been raised since.
            stop = self.stop_requested if self.world.size == 1 else updated.stop
            if stop and self.step < c.steps:  # a validation that is due takes its time
                self.validation_due = self.step % c.eval_every == 0
                self.save(wait=True)
                raise Interrupted
            if self.step % c.eval_every == 0 or self.step == c.steps:
                began = time.perf_counter()
                if not self.keeper.has_saved:  # whatever ends the run from here on, it can be resumed
                    self.validation_due = True
                    self.save()
                    self.validation_due = False
                self._evaluate(report)
                since += time.perf_counter() - began
            if self.step % c.save_every == 0 or self.step == c.steps:
                self.save(wait=self.step == c.steps)

    def _update(self) -> Updated:
        try:
            updated = self.updater.update(self.step, self.batches, lambda: self.stop_requested)
        except NotFinite as error:  # of all processes
            raise SharedError(f"{error} at step {self.step + 1}; {self._last_good()}", 0) from error
        self.step += 1
        return updated

    def _last_good(self) -> str:
        step = self.keeper.saved_step()
        if step is None:
            return "no checkpoint had been written yet"
        return f"the last good checkpoint is {self.last} (step {step})"

    def validate(self) -> Score:
        """The validation split at the longest attention of training, by the average if there is
        one."""
        return self._score(self._validated())

    def _validated(self) -> Network:
        """What is validated and kept as the best, with all its parameters."""
        return self.updater.whole(self.updater.average.model)

    def _score(self, model: Network) -> Score:
        method = default_method(model)
        # By segments as in training; a window slides by half of itself.
        segment = {"cached": 128, "segments": self.config.scored, "sliding": max(self.segment // 2, 1)}[method]
        attn_len = self.attn_len if method == "cached" else model.config.mem_len + self.segment
        reading, start = Reading(attn_len, method=method, segment=segment), self.corpus.vocabulary.start
        limit = self.config.eval_tokens
        return self.world.first_does(lambda: evaluate(model, self.corpus.valid, start, reading, limit=limit))

    def _evaluate(self, report: Report | None) -> None:
        model = self._validated()
        score = self._score(model)
        self.updater.average.validated(score.nats)
        entry = {"step": self.step, "valid_loss": score.nats, "valid_bpc": score.bpc, "valid_ppl": score.ppl}
        self._log(entry, report)
        if score.nats < self.best_loss:
            self.best_loss = score.nats
            state = {"step": self.step, "valid": score.nats, "attn_len": self.attn_len, "segment": self.segment}
            with self.world.together():
                if self.world.first:
                    checkpoints.save(self.best, model, self.corpus.vocabulary, state, {})

    def _log(self, entry: dict[str, Any], report: Report | None) -> None:
        if not self.world.first:
            return
        log.append(self.folder / "log.jsonl", entry)
        if self._board is not None:
            for name, value in entry.items():
                if name != "step":
                    self._board.add_scalar(name, value, entry["step"])
        if report:
            report(entry)

    def save(self, wait: bool = True) -> None:
        """Writes a checkpoint with everything a bit-exact continuation needs.

        wait: False lets a sharded run go on while it is written.
        """
        self.keeper.save(wait)


def _check_fit(model: Config, training: TrainConfig, segment: int) -> None:
    """Raises TxlError where a network cannot be trained so."""
    if isinstance(model, RecurrentConfig):
        for name in ("compile", "recompute", "intermediate_losses", "offload_memory"):
            if getattr(training, name):
                raise TxlError(f"{name} is for Transformers, not for a network of kind {model.network!r}")
        if training.context:
            raise TxlError(
                f"a network of kind {model.network!r} cannot read tokens again: ext_len must be 0 and loss 'full', got "
                f"{training.ext_len} and {training.loss!r}"
            )
    elif model.encoding in PLACES and segment > (model.table_len or 0):
        raise TxlError(f"segments of {segment} tokens are beyond the {model.table_len} learned positions of table_len")


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TxlError('--tensorboard needs a package: pip install "txl-kernels[tensorboard]"') from error
    return SummaryWriter(str(folder))
