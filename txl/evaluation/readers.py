"""Readers, which run a model over a text segment by segment with memory and time per token that do
not depend on the length of the text."""

import abc
import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from txl import graphs
from txl.errors import TxlError
from txl.model import Network, as_transformer
from txl.model.config import ModelConfig
from txl.model.recurrent import RecurrentNetwork
from txl.model.transformer import HiddenMemory, TransformerXL
from txl_kernels import KeyValueCache
from txl_kernels.cache import unchanged_on_error
from txl_kernels.layer import SegmentAttention


class Reader(abc.ABC):
    """A reader of `batch` parallel texts; the model's parameters must not change while it is in
    use.

    Args:
        model: switched to evaluation mode.
        batch: number of parallel texts.
        max_segment: maximum number of tokens of one call.
    """

    def __init__(self, model: Network, batch: int, max_segment: int) -> None:
        if batch < 1 or max_segment < 1:
            raise TxlError(f"batch and max_segment must be >= 1, got {batch} and {max_segment}")
        self.model = model.eval()
        self.batch, self.max_segment = batch, max_segment

    def _check_segment(self, tokens: Tensor) -> None:
        if tokens.size(1) > self.max_segment:
            raise TxlError(f"a segment has at most max_segment = {self.max_segment} tokens, got {tokens.size(1)}")

    @abc.abstractmethod
    def reset(self) -> None:
        """Return to the start of a text."""

    @abc.abstractmethod
    def hidden(self, tokens: Tensor) -> Tensor:
        """Read tokens [B, L <= max_segment].

        Returns: the softmax's inputs, [B, L, d_model].
        """

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Read tokens [B, L <= max_segment].

        Returns: scores [B, L, vocab_size] of the tokens that follow (`AdaptiveSoftmax.logits`).
        """
        return self._step(self._logits, tokens)

    @torch.inference_mode()
    def nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Read tokens [B, L <= max_segment] and return the losses [B, L] of targets [B, L] (see
        `AdaptiveSoftmax.nll`)."""
        return self._step(self._nll, tokens, targets)

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        """Read tokens [B, any L >= 1] in segments.

        Returns: scores [B, vocab_size] of the token after the last.
        """
        if tokens.size(1) == 0:
            raise TxlError("the prompt is empty: at least one token is needed to predict the next")
        for part in tokens.split(self.max_segment, 1):
            logits = self._step(self._last_logits, part)
        return logits

    def _step(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return function(*inputs), one of the three below."""
        return function(*inputs)

    def _logits(self, tokens: Tensor) -> Tensor:
        return self.model.logits(self.hidden(tokens))

    def _nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.softmax.nll(self.hidden(tokens), targets)

    def _last_logits(self, tokens: Tensor) -> Tensor:
        return self.model.logits(self.hidden(tokens)[:, -1:])[:, 0]


class Engine(Reader):
    """A reader that caches keys and values. If the model's parameters change, keys and values that
    are cached remain those of the earlier ones until `reset`.

    Every token attends to exactly the last `attn_len` positions, its own included (fewer at the
    start of a text), however the text is cut into segments. The result equals that of recomputing
    the keys from a memory of hidden states (paper, section 3.2). A step that fails leaves the
    caches as they were; on a CUDA device, and after a call of several steps, they must be reset.

    On a CUDA device, steps of a kind and length that repeat are replayed as CUDA graphs (see
    `txl.graphs.why_not` for the models that cannot be); the caches then are `StaticCache`s.

    Args:
        model: switched to evaluation mode; its positions must be relative ("relative" or Shaw's).
        batch: number of parallel texts.
        attn_len: number of keys a token sees.
        max_segment: maximum number of tokens of one call.
        graph: whether to use CUDA graphs; None where they can be used.

    Attributes:
        caches: the cache of each layer.

    Raises:
        TxlError: a size is below 1, or the model has absolute positions or no attention; or graph
            is True and the model's steps cannot be captured.
    """

    def __init__(
        self, model: Network, batch: int, attn_len: int, max_segment: int, *, graph: bool | None = None
    ) -> None:
        super().__init__(model, batch, max_segment)
        self._transformer = model = as_transformer(model, "a cache of keys")
        if attn_len < 1:
            raise TxlError(f"the attention length must be >= 1 (a token sees at least itself), got {attn_len}")
        if model.config.absolute:
            raise TxlError(
                f"encoding {model.config.encoding!r} puts places into the hidden states, so keys cannot be cached: use "
                "a sliding window or segments"
            )
        uses_graphs = _uses_graphs(model, graph)
        hidden: Tensor | None = None
        if uses_graphs:
            with torch.inference_mode(False):
                hidden = torch.zeros(batch, 1, dtype=torch.int32, device=model.device)
        self.attention: list[SegmentAttention] = [block.attention for block in model.layers]  # type: ignore[misc]
        self.caches = [
            attention.new_cache(batch, attn_len - 1, max_segment, window=attn_len, start=hidden)
            for attention in self.attention
        ]
        self._graphs = StepGraphs(model, self.caches) if uses_graphs else None
        self._begin()

    @torch.inference_mode()
    def reset(self) -> None:
        """Return to the start of a text: empty caches, or zero states if the model begins with
        them. Tables of positions are computed anew from the present parameters."""
        for attention, cache in zip(self.attention, self.caches, strict=True):
            attention.update_cache(cache)
        self._begin()

    def _begin(self) -> None:
        self.fill(self._transformer.initial_memory(self.batch, self.caches[0].mem_len))

    @torch.inference_mode()
    def fill(self, memory: Sequence[Tensor] | None) -> None:
        """Begin with a memory of hidden states, [B, M, d_model] for each layer; None for none."""
        self._transformer.begin(self.caches, memory)
        if memory is not None:
            self._lower(memory[0].size(1))

    def _lower(self, length: int) -> None:
        """Hide `length` positions fewer of static caches, which share `start`."""
        if self._graphs is not None:
            self.caches[0].start.sub_(length).clamp_(min=0)  # type: ignore[union-attr]

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        states = self._transformer.read_cached(self._transformer.embed(tokens), self.caches)
        self._lower(tokens.size(1))
        return states

    def feed(self, tokens: Tensor) -> Tensor:
        with unchanged_on_error(self.caches):
            return super().feed(tokens)

    def _step(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        with unchanged_on_error(self.caches):
            if self._graphs is None:
                return function(*inputs)
            self._check_segment(inputs[0])
            for attention, cache in zip(self.attention, self.caches, strict=True):
                attention.update_cache(cache, if_changed=True)
            return self._graphs(function, inputs)


def _uses_graphs(model: TransformerXL, asked: bool | None) -> bool:
    """Whether an engine uses CUDA graphs. asked: its option `graph`."""
    if asked is False or (asked is None and not graphs.is_capturable(model.device)):
        return False
    reason = graphs.why_not(model)
    if not graphs.is_capturable(model.device):
        reason = f"the model is on {model.device}, not on a CUDA device"
    if reason is None:
        return True
    if asked:
        raise TxlError(f"graph must be None or False for this model: {reason}")
    graphs.log.info("evaluation runs without CUDA graphs: %s", reason)
    return False


class StepGraphs:
    """The CUDA graphs of an engine's steps: two for each kind of step (`graphs.Steps`), one a
    buffer of the caches, in one memory pool."""

    MAX_KINDS = 8  # kinds of steps with graphs; others run without

    def __init__(self, model: TransformerXL, caches: Sequence[KeyValueCache]) -> None:
        self._model, self._caches = model, caches
        self._steps = graphs.Steps("evaluation", graphs.Watch(model, others=self._of_caches), self._drop)
        self._graphs: dict[tuple[Hashable, int], graphs.Captured[Tensor]] = {}
        self._pool: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepGraphs":
        return StepGraphs(copy.deepcopy(self._model, memo), copy.deepcopy(self._caches, memo))

    def _of_caches(self) -> tuple[list[Any], list[Any]]:
        tensors = [x for cache in self._caches for x in (cache.r, cache.start)]
        return tensors, [x for cache in self._caches for x in (cache.window, cache.zero_row)]

    def _drop(self) -> bool:
        had, self._graphs, self._pool = bool(self._graphs), {}, []
        return had

    def __call__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        """Return function(*inputs), a step that reads and writes the caches; on an error from a
        replay, of which the device may have executed any part, these must be cleared."""
        kind = self._steps.kind(function.__name__, inputs, self._model.device)
        turn, *others = (cache.turn for cache in self._caches)  # type: ignore[attr-defined]
        if kind is None or any(other != turn for other in others):
            return function(*inputs)
        for cache in self._caches:
            cache.check_whole()
        graph = self._graphs.get((kind, turn)) or self._capture((kind, turn), function, inputs)
        if graph is None:
            return function(*inputs)
        try:
            result = graph(*inputs).clone()
            for cache in self._caches:
                cache.after_replay(inputs[0].size(1))  # type: ignore[attr-defined]
        except BaseException:
            for cache in self._caches:
                cache.take_back(1)
            raise
        return result

    def _capture(
        self, name: tuple[Hashable, int], function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
    ) -> graphs.Captured[Tensor] | None:
        """Capture a step for later replays and return it; None if there are enough kinds, or if
        that fails, after which no step runs in a graph."""
        if len({kind for kind, _ in self._graphs} | {name[0]}) > self.MAX_KINDS:
            return None
        with torch.inference_mode(False):
            static = [x.clone() for x in inputs]
        appends = [cache.appends for cache in self._caches]
        try:
            with graphs.sharing_memory(self._pool):
                self._graphs[name] = graphs.Captured(function, static)
        except Exception as error:  # of any kind: memory, or what cannot be captured
            self._steps.turn_off(f"a capture failed with {type(error).__name__}: {error}")
        finally:  # a capture computes nothing
            for cache, before in zip(self._caches, appends, strict=True):
                if cache.appends > before:
                    cache.after_capture(inputs[0].size(1))  # type: ignore[attr-defined]
        return self._graphs.get(name)


class SegmentReader(Reader):
    """The released evaluation: a segment attends to its memory of mem_len states and to itself.

    Its tokens see from mem_len + 1 to mem_len + L keys, so the loss depends on L.

    Args:
        mem_len: number of states each layer keeps; 0 for none. An LSTM or QRNN carries its state
            unless mem_len is 0.
    """

    def __init__(self, model: Network, batch: int, mem_len: int, max_segment: int) -> None:
        super().__init__(model, batch, max_segment)
        if mem_len < 0:
            raise TxlError(f"mem_len must be >= 0, got {mem_len}")
        self.mem_len = mem_len
        self.reset()

    def reset(self) -> None:
        self.memory: HiddenMemory | None = None

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        self._check_segment(tokens)
        with seeing(self.model, None):  # all of memory and segment
            states = self.model.read(tokens, self.memory, mem_len=self.mem_len)
        self.memory = states.memory
        return states.hidden


def check_window(model: Network, attn_len: int, stride: int) -> None:
    """Raise TxlError if a window cannot have these sizes, or is longer than the table of learned
    positions."""
    if not 1 <= stride <= attn_len:
        raise TxlError(f"stride must be from 1 to the window's {attn_len} tokens, got {stride}")
    longest = model.config.table_len if isinstance(model.config, ModelConfig) and model.config.absolute else None
    if longest is not None and attn_len > longest:
        raise TxlError(f"a window of {attn_len} tokens is beyond the model's {longest} learned positions (table_len)")


class WindowReader(Reader):
    """A reader that at each call recomputes the last `attn_len` tokens from an empty memory and
    returns the states of the new ones.

    Of L new tokens the last sees attn_len keys, the first attn_len - L + 1. L = 1 is the evaluation
    of Al-Rfou et al. (2018), and the vanilla model's in the paper's Table 9.
    """

    def __init__(self, model: Network, batch: int, attn_len: int, max_segment: int = 1) -> None:
        super().__init__(model, batch, max_segment)
        check_window(model, attn_len, max_segment)
        self.attn_len = attn_len
        self.reset()

    def reset(self) -> None:
        self.window = torch.zeros(self.batch, 0, dtype=torch.long, device=self.model.device)

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        self._check_segment(tokens)
        self.window = torch.cat([self.window, tokens], 1)[:, -self.attn_len :]
        with seeing(self.model, None):
            return self.model.read(self.window, mem_len=0, last=tokens.size(1)).hidden

    def feed(self, tokens: Tensor) -> Tensor:
        """Feed tokens as `Reader.feed` does; only the last window of a long prompt is read."""
        self.window = torch.cat([self.window, tokens[:, :-1]], 1)
        return super().feed(tokens[:, -1:])


@contextmanager
def seeing(model: Network, window: int | None) -> Iterator[None]:
    """A context in which a query sees `window` keys, its own position included; None for all. An
    LSTM or QRNN is not changed."""
    layers = [] if isinstance(model, RecurrentNetwork) else [block.attention for block in model.layers]
    own = [attention.window for attention in layers]
    for attention in layers:
        attention.window = window
    try:
        yield
    finally:
        for attention, before in zip(layers, own, strict=True):
            attention.window = before
