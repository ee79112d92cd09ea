"""Rows dealt to devices, without the processes (see tests/txl/commands/test_sweep.py for those)."""

import threading
from pathlib import Path

import pytest
import torch

from txl.sweeps.devices import Deal
from txl.training.trainer import Interrupted

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


class Fake(Deal):
    """`a` takes until all others are done; a row's exit code is that of `codes`."""

    def __init__(self, names: str, codes: dict[str, int] | None = None, stops_at: str = "") -> None:
        self.ended: dict[str, str | None] = {}
        self.where: dict[str, torch.device] = {}
        self.codes, self.count, self.stops_at = codes or {}, len(names), stops_at
        self.others_done = threading.Event()
        devices = [CPU] if stops_at else [CPU, GPU]
        super().__init__(Path(), list(names), devices, lambda line: None, self.ended.__setitem__)

    def _row(self, name: str, device: torch.device) -> tuple[int, str | None]:
        self.where[name] = device
        if name == self.stops_at:
            self.stop()
        elif name == "a":
            assert self.others_done.wait(20)
        if len(self.where) == self.count:
            self.others_done.set()
        return self.codes.get(name, 0), None


def test_the_first_free_device_takes_the_next_row() -> None:
    deal = Fake("abcd")
    deal.run()
    busy = deal.where.pop("a")
    assert set(deal.where.values()) == {CPU, GPU} - {busy}
    assert list(deal.where) == ["b", "c", "d"]
    assert deal.ended == dict.fromkeys("abcd")


def test_a_process_that_died_is_a_row_that_failed() -> None:
    deal = Fake("abcd", {"b": -9, "c": 3})
    deal.run()
    told = {"b": "its process ended with exit code -9", "c": "its process ended with exit code 3"}
    assert deal.ended == {"a": None, "d": None} | told


def test_no_row_begins_after_a_stop() -> None:
    deal = Fake("bcde", {"b": 130}, stops_at="b")
    with pytest.raises(Interrupted):
        deal.run()
    assert deal.ended == {}, "it has been stopped, not finished"
    assert list(deal.where) == ["b"]


@pytest.mark.parametrize(("threads", "each"), [(1, 1), (2, 1), (5, 2), (16, 8)])
def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch, threads: int, each: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert Fake("ab").threads == each
