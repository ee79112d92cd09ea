"""How torch is asked for CUDA graphs. On a device: test_decoding_device.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from txl.errors import TxlError
from txl.evaluation.cuda_graphs import CudaGraphs

Asked = list[tuple[Any, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What is asked of a torch.cuda that does nothing else."""
    calls: Asked = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            calls.append((self.name, "waits for", other.name))

    class Graph:
        def capture_begin(self, pool: str, capture_error_mode: str) -> None:
            calls.append(("begin", pool, capture_error_mode))

        def capture_end(self) -> None:
            calls.append(("end",))

        def replay(self) -> None:
            calls.append(("replay",))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        calls.append(("on", stream.name))
        yield
        calls.append(("off", stream.name))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    return calls


def test_a_step_is_prepared_and_captured_on_one_stream(asked: Asked) -> None:
    graphs = CudaGraphs(torch.device("cuda"))
    graphs.prepare(lambda: asked.append(("step",)))
    run = [("side", "waits for", "main"), ("on", "side"), ("step",), ("off", "side"), ("main", "waits for", "side")]
    assert asked == run
    asked.clear()
    for _ in range(2):  # in one pool
        repeat = graphs.record(lambda: asked.append(("step",)))
        assert asked == [("on", "side"), ("begin", "pool", "thread_local"), ("step",), ("end",), ("off", "side")]
        asked.clear()
    repeat()
    assert asked == [("replay",)]


def test_a_failed_capture_ends_and_says_what_to_do(asked: Asked) -> None:
    graphs = CudaGraphs(torch.device("cuda"))

    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(TxlError, match=r"could not be captured .* out of memory; TXL_CUDA_GRAPHS=0 generates without"):
        graphs.record(step)
    assert ("end",) in asked
