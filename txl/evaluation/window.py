"""Evaluation with a sliding window that is recomputed at each step, for models without
recurrence."""

from collections.abc import Iterator

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.readers import Reader, check_attn_len, check_clamp_len, seeing
from txl.model import Network
from txl.model.config import ModelConfig
from txl.text.corpus import as_tensor
from txl.text.vocabulary import Tokens


def check_window(model: Network, attn_len: int, stride: int) -> None:
    """Raise TxlError if a window cannot have these sizes, or is longer than the table of learned
    positions."""
    check_attn_len(attn_len)
    if not 1 <= stride <= attn_len:
        raise TxlError(f"stride must be from 1 to the window's {attn_len} tokens, got {stride}")
    longest = learned_positions(model)
    if longest is not None and attn_len > longest:
        raise TxlError(f"a window of {attn_len} tokens is beyond the model's {longest} learned positions (table_len)")


def learned_positions(model: Network) -> int | None:
    """Return the maximum length of a segment, which is the number of learned positions; None if the
    model has none."""
    config = model.config
    return config.table_len if isinstance(config, ModelConfig) and config.encoding == "learned" else None


class WindowReader(Reader):
    """A reader that at each call recomputes the last `attn_len` tokens from an empty memory and
    returns the states of the new ones.

    Of L new tokens the last sees attn_len keys, the first attn_len - L + 1. L = 1 is the evaluation
    of Al-Rfou et al. (2018), and the vanilla model's in the paper's Table 9.
    """

    def __init__(
        self, model: Network, batch: int, attn_len: int, max_segment: int = 1, clamp_len: int | None = None
    ) -> None:
        super().__init__(model, batch, max_segment)
        check_window(model, attn_len, max_segment)
        check_clamp_len(model, clamp_len)
        self.attn_len, self.clamp_len = attn_len, clamp_len
        self.reset()

    def reset(self) -> None:
        self.window = torch.zeros(self.batch, 0, dtype=torch.long, device=self.model.device)

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        self._check_segment(tokens)
        self.window = torch.cat([self.window, tokens], 1)[:, -self.attn_len :]
        with seeing(self.model, self.attn_len, self.clamp_len):
            return self.model.read(self.window, mem_len=0, last=tokens.size(1)).hidden

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        """As `Reader.feed`; only the last window of a long prompt is read."""
        if tokens.size(1) == 0:
            raise TxlError("the prompt is empty: at least one token is needed to predict the next")
        before = tokens[:, :-1]
        self.window = torch.cat([self.window, before], 1)[:, -self.attn_len :]
        return self.model.logits(self.hidden(tokens[:, -1:]))[:, 0]


@torch.inference_mode()
def sliding_losses(
    model: Network,
    tokens: Tokens,
    start: int,
    attn_len: int,
    stride: int,
    batch: int,
    clamp_len: int | None = None,
    first: int = 0,
) -> Iterator[Tensor]:
    """Yield the losses of a split read in windows of attn_len tokens, the last `stride` of each
    scored.

    Windows are independent, so the split is not cut into streams: each token sees attn_len - stride
    + 1 to attn_len keys, or, near the start, all tokens before it (`start` is the first).

    first: index of the first token to score.

    Yields: losses [n], in order of the tokens.

    Raises:
        TxlError: as `check_window`.
    """
    check_window(model, attn_len, stride)
    check_clamp_len(model, clamp_len)
    model.eval()
    count = len(tokens)

    def inputs(begin: int, end: int) -> Tensor:
        """Inputs that predict tokens begin .. end - 1: tokens begin - 1 .. end - 2, where -1 is
        `start`."""
        part = as_tensor(tokens[max(begin - 1, 0) : end - 1])
        return torch.cat([torch.tensor([start], device="cpu"), part]) if begin == 0 else part

    def losses(windows: list[tuple[int, int]], scored: int) -> Tensor:
        block = torch.stack([inputs(begin, end) for begin, end in windows]).to(model.device)
        targets = torch.stack([as_tensor(tokens[end - scored : end]) for _, end in windows]).to(model.device)
        with seeing(model, attn_len, clamp_len):
            hidden = model.read(block, mem_len=0, last=scored).hidden
        return model.softmax.nll(hidden, targets).flatten()

    full: list[tuple[int, int]] = []
    for end in range(first + stride, count - (count - first) % stride + 1, stride):
        if end <= attn_len:  # windows at the start are shorter and differ in length, so they cannot be batched
            yield losses([(0, end)], stride)
            continue
        full.append((end - attn_len, end))
        if len(full) == batch:
            yield losses(full, stride)
            full = []
    if full:
        yield losses(full, stride)
    if rest := (count - first) % stride:
        yield losses([(max(count - attn_len, 0), count)], rest)
