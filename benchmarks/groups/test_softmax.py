"""The softmax in a training step of WikiText-103's base model: txl's adaptive softmax, torch's, and
a full softmax."""

import functools

from harness.case import Case
from harness.comparison import Comparison, Implementation, comparisons
from harness.machine import Machine
from implementations.models import WT103_WORDS
from implementations.softmax import SMALL, SOFTMAXES, entry, note


@comparisons("cpu", "cuda", backend=None)
def test_softmax(machine: Machine, full: bool) -> list[Comparison]:
    vocab_size = SMALL if machine.brief else WT103_WORDS
    runs = [
        Implementation(x.name, functools.partial(entry, algorithm, vocab_size, machine.device), x.role)
        for algorithm, x in SOFTMAXES.items()
    ]
    case = Case(unit="token", direction="forward+backward", model="wt103-base", note=note(vocab_size))
    return [Comparison("softmax", case, runs, clock="wall", seconds=45, minimum=4, maximum=30)]
