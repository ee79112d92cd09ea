"""Work of a CUDA device, captured once and replayed by one launch."""

from collections.abc import Callable
from typing import Protocol

import torch

from txl.errors import TxlError


class Recorder(Protocol):
    """Records steps: work on tensors that stay where they are, the same calls each time."""

    def prepare(self, step: Callable[[], None]) -> None:
        """Runs a step as it will be recorded, so that what is made once (compiled kernels,
        workspaces of libraries) is there by then."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """What repeats a step that was prepared. Whether recording runs it is left open."""


class CudaGraphs:
    """A CUDA graph for each recorded step. They share memory, so one may run at a time, and all
    that a step leaves must be in tensors made before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, step: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # that of capture: libraries keep workspaces for each
            step()
        current.wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Captures the step, which does not run it.

        Raises:
            TxlError: it cannot be captured, for want of memory say. Nothing goes on without graphs
                by itself: what a broken capture leaves of the device's state is not known.
        """
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which waits for the device and empties torch's cache each time.
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            raise TxlError(
                f"a step of generation could not be captured in a CUDA graph: {error}; TXL_CUDA_GRAPHS=0 generates "
                "without graphs, more slowly"
            ) from error
        return graph.replay
