"""Generation on a GPU: a step of one token is one CUDA graph instead of some hundred launches.

A graph repeats addresses, while a cache's keys move on by a row each token. So there is a graph for
each of the `LAP` places that keys can end at, all of the same shape; at the lap's end the keys move
back, outside of graphs. Each graph is the engine's own calls as they are, and no kernel has to know
of it; one graph for all places would need kernels that read their position from memory.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from txl.evaluation.cuda_graphs import CudaGraphs, Recorder
from txl.evaluation.engine import Engine
from txl.model.networks import Network
from txl.model.transformer import TransformerXL
from txl_kernels.backends import BACKENDS, choose_unasked
from txl_kernels.cache import CacheFrame
from txl_kernels.layer import SegmentAttention

LAP = 32  # a move of the memory in as many tokens; up to twice as many graphs


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
    name = attention.backend or choose_unasked(weight.device, weight.dtype, attention.kernel_width)
    return not BACKENDS[name].READS_BOUNDS


def generation_engine(
    model: TransformerXL, batch: int, attn_len: int, max_segment: int, clamp_len: int | None = None
) -> Engine:
    """An `Engine` for tokens one at a time: with CUDA graphs where steps can be captured, unless
    TXL_CUDA_GRAPHS=0 is in the environment. Arguments and errors as in `Engine`."""
    if os.environ.get("TXL_CUDA_GRAPHS", "1") == "0" or not can_be_captured(model):
        return Engine(model, batch, attn_len, max_segment, clamp_len)
    return DecodingEngine(model, batch, attn_len, max_segment, clamp_len, recorder=CudaGraphs(model.device))
