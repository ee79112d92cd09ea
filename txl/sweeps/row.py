"""One row of a table: trained, then scored at one attention length after another, all kept."""

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from typing import Protocol

import torch

from txl.errors import TxlError
from txl.evaluation.evaluate import Reading as HowRead
from txl.evaluation.evaluate import Score, evaluate
from txl.model.transformer import count_parameters
from txl.sweeps.ledger import Ledger, Progress
from txl.sweeps.lengths import next_length
from txl.sweeps.plan import Plan, Reading
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig
from txl.training.lock import unlock
from txl.training.timing import timed
from txl.training.trainer import Interrupted, Report, Trainer


class Watch(Protocol):
    """Whoever shows a row's progress and may ask it to stop."""

    def training(self, name: str, trainer: Trainer) -> AbstractContextManager[Report]:
        """While a row is trained; gives what is called with each entry of the log."""

    def scoring(self, name: str, attn_len: int, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """While a length is scored; gives what is called with the tokens done, of total."""

    def scored(self, name: str, score: Score) -> None:
        """A length has been scored."""


def run_row(ledger: Ledger, plan: Plan, corpus: Corpus, device: torch.device, watch: Watch) -> None:
    """Begins a row, or goes on with it where it was; a finished one is left alone.

    Raises:
        Interrupted: `Trainer.request_stop` was called; the checkpoint is written.
        TxlError: as `Trainer`, or a loss is not finite.
    """
    progress = ledger.progress(plan.name)
    if progress.finished is None:
        if not progress.trained:
            progress = _train(ledger, plan, progress, corpus, device, watch)
        _score(ledger, plan, progress, corpus, device, watch)


def _train(
    ledger: Ledger, plan: Plan, progress: Progress, corpus: Corpus, device: torch.device, watch: Watch
) -> Progress:
    folder, config = ledger.folder / plan.name, plan.train_config()
    if progress.train is None:
        if ledger.settings["minutes"] is not None:
            config = timed(ledger.settings["minutes"], corpus, plan.model_config(), config, device)
        # Kept before the first update, so that a row that is killed has as many when it goes on.
        progress = dataclasses.replace(progress, train=config.to_json())
        ledger.keep(plan.name, progress)
    else:
        config = TrainConfig.from_json(progress.train)
    resume = (folder / "last.safetensors").exists()
    try:
        trainer = Trainer(folder, corpus, plan.model_config(), config, resume=resume, device=device)
        progress = dataclasses.replace(
            progress, parameters=count_parameters(trainer.model), device=_device_name(device),
            threads=torch.get_num_threads(),
        )  # fmt: skip
        began = time.perf_counter()
        try:
            with watch.training(plan.name, trainer) as report:
                trainer.run(report)
            progress = dataclasses.replace(progress, trained=True)
        finally:
            seconds = progress.train_seconds + time.perf_counter() - began
            progress = dataclasses.replace(progress, train_seconds=seconds)
            ledger.keep(plan.name, progress)
    finally:
        unlock(folder)
    if trainer.stop_requested:  # during the last update
        raise Interrupted
    return progress


def _score(ledger: Ledger, plan: Plan, progress: Progress, corpus: Corpus, device: torch.device, watch: Watch) -> None:
    reading = plan.reading
    model, _ = checkpoints.restore(ledger.folder / plan.name / "best.safetensors", device)
    tokens = corpus.split(reading.split)
    corpus.verify(reading.split)
    while (attn_len := _next(reading, progress)) is not None:
        with watch.scoring(plan.name, attn_len, min(len(tokens), reading.limit or len(tokens))) as told:
            how = HowRead(attn_len, reading.clamp_len, method=reading.method, segment=reading.segment(attn_len))
            score = evaluate(
                model, tokens, corpus.vocabulary.start, how, batch=reading.batch, limit=reading.limit, progress=told
            )
        if not math.isfinite(score.nats):
            raise TxlError(f"the loss at attention length {attn_len} is {score.nats}")
        progress = dataclasses.replace(progress, scores=(*progress.scores, score))
        ledger.keep(plan.name, progress)
        watch.scored(plan.name, score)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    ledger.keep(plan.name, dataclasses.replace(progress, finished=now))


def _next(reading: Reading, progress: Progress) -> int | None:
    ppl = {score.attn_len: score.ppl for score in progress.scores}
    return next_length(ppl, reading.init, reading.step, longest=reading.longest, also=reading.also)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
