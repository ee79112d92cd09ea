"""Generation on a GPU: a step of one token is one CUDA graph instead of some hundred launches.

A graph repeats addresses, while a cache's keys move on by a row each token. So there is a graph for
each of the `LAP` places that keys can end at, all of the same shape; at the lap's end the keys move
back, outside of graphs. Each graph is the engine's own calls as they are, and no kernel has to know
of it; one graph for all places would need kernels that read their position from memory.
"""

import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.readers import Engine
from txl.model import Network
from txl.model.transformer import TransformerXL
from txl_kernels.backends import BACKENDS, choose_unasked
from txl_kernels.cache import CacheFrame
from txl_kernels.layer import SegmentAttention

LAP = 32  # a move of the memory in as many tokens; up to twice as many graphs


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


class DecodingEngine(Engine):
    """An `Engine` that records its steps of one token and repeats them.

    A place is run as it is when it is first met, recorded when it is met again, repeated from then
    on: texts of up to `lap` tokens cost what they do without. A cache that is not full yet is read
    as a full one whose first keys are masked, by steps of its own; when it is full, by those of the
    engine exactly. Other calls, and all under autocast, after `reset` of single rows of a cache, or
    of a wrong shape, are the engine's.

    Args:
        recorder: how steps are recorded.
        lap: places that steps are recorded at.
        others: as in `Engine`.
    """

    def __init__(
        self,
        model: Network,
        batch: int,
        attn_len: int,
        max_segment: int,
        clamp_len: int | None = None,
        *,
        recorder: Recorder,
        lap: int = LAP,
    ) -> None:
        super().__init__(model, batch, attn_len, max_segment, clamp_len)
        self._recorder, self._mem_len = recorder, attn_len - 1
        self._lap = min(lap, self._mem_len + max_segment)  # rows of a cache's buffer beyond its memory
        self._repeats: dict[tuple[int, bool], Callable[[], None] | None] = {}
        self._make_buffers()

    @torch.inference_mode()
    def _make_buffers(self) -> None:
        """What steps read and write: tokens [B, 1], positions not held [B, 1], logits [B, V]."""
        device, table = self._transformer.device, self._transformer.embedding.tables[0]
        self._tokens = torch.zeros(self.batch, 1, dtype=torch.long, device=device)
        self._unheld = torch.zeros(self.batch, 1, dtype=torch.int32, device=device)
        hidden = table.new_zeros(self.batch, 1, self._transformer.config.d_model)
        self._logits = self._transformer.logits(hidden)[:, 0].clone()

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        if not self._is_step(tokens):
            return super().feed(tokens)
        first = self.caches[0]
        if not self._mem_len <= first.place < self._mem_len + self._lap:
            for cache in self.caches:
                cache.move(self._mem_len)
        full = len(first) == self._mem_len
        self._tokens.copy_(tokens)
        if not full:
            self._unheld.fill_(self._mem_len - len(first))
        self._advance(first.place, full)
        for cache in self.caches:
            cache.advance(1)
        return self._logits.clone()

    def _is_step(self, tokens: Tensor) -> bool:
        device = self._transformer.device
        return (
            tokens.shape == self._tokens.shape
            and tokens.device == device
            and not torch.is_autocast_enabled(device.type)
            and all(cache.start is None for cache in self.caches)
        )

    def _advance(self, place: int, full: bool) -> None:
        """The step at a place: repeated, recorded or run."""
        repeat = self._repeats.get((place, full))
        if repeat is not None:
            repeat()
            return
        frames = [CacheFrame(cache, None if full else self._unheld) for cache in self.caches]

        def step() -> None:
            embedded = self._transformer.embedding.of_any_bin(self._tokens)
            hidden = self._transformer.read_cached(embedded, frames)
            self._logits.copy_(self._transformer.logits(hidden)[:, 0])

        if (place, full) not in self._repeats:
            self._recorder.prepare(step)
            self._repeats[place, full] = None
            return
        repeat = self._repeats[place, full] = self._recorder.record(step)
        repeat()


def can_be_captured(model: TransformerXL) -> bool:
    """Whether steps run on a CUDA device, by kernels that do not read `start` on the host."""
    if model.device.type != "cuda":
        return False
    return all(_waits_for_nothing(block.attention) for block in model.layers)


def _waits_for_nothing(attention: object) -> bool:
    if not isinstance(attention, SegmentAttention):
        return False
    weight = attention.qkv.weight
    name = attention.backend or choose_unasked(
        weight.device, weight.dtype, attention.kernel_width, few=True, gradients=False
    )
    return not BACKENDS[name].READS_BOUNDS


def generation_engine(
    model: TransformerXL, batch: int, attn_len: int, max_segment: int, clamp_len: int | None = None
) -> Engine:
    """An `Engine` for tokens one at a time: with CUDA graphs where steps can be captured, unless
    TXL_CUDA_GRAPHS=0 is in the environment. Arguments and errors as in `Engine`."""
    if os.environ.get("TXL_CUDA_GRAPHS", "1") == "0" or not can_be_captured(model):
        return Engine(model, batch, attn_len, max_segment, clamp_len)
    return DecodingEngine(model, batch, attn_len, max_segment, clamp_len, recorder=CudaGraphs(model.device))
