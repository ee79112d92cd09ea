"""A row as lines of text, where several share a terminal, and that may be asked to stop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from txl.commands.header import header
from txl.evaluation.evaluate import Score
from txl.sweeps.terminal import scored_line
from txl.training.trainer import Interrupted, Report, Trainer


class Lines:
    """A `Watch` that says what happens.

    Attributes:
        stopping: whether `stop` was called.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.stopping = False
        self._trainer: Trainer | None = None

    def stop(self) -> None:
        """Asks the row to end as after Ctrl-C; from any thread, or a handler of signals."""
        self.stopping = True
        if self._trainer is not None:
            self._trainer.request_stop()

    @contextmanager
    def training(self, name: str, trainer: Trainer) -> Iterator[Report]:
        self._trainer = trainer
        if self.stopping:
            trainer.request_stop()
        self.say(f"{name}: {header(trainer)}")
        unit = "bpc" if trainer.corpus.vocabulary.unit == "bytes" else "ppl"

        def report(entry: dict[str, Any]) -> None:
            if "valid_loss" in entry:
                told = f"validation loss {entry['valid_loss']:.4f}, {unit} {entry[f'valid_{unit}']:.4f}"
                self.say(f"{name}: step {entry['step']}: {told}")

        try:
            yield report
        finally:
            self._trainer = None

    @contextmanager
    def scoring(self, name: str, attn_len: int, total: int) -> Iterator[Callable[[int], None]]:
        def told(scored: int) -> None:
            if self.stopping:
                raise Interrupted

        told(0)
        yield told

    def scored(self, name: str, score: Score) -> None:
        self.say(scored_line(name, score))
