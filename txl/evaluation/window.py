"""Reading with a window that slides, everything in it computed anew: models without recurrence."""

from collections.abc import Iterator

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.readers import Reader, check_attn_len, check_clamp_len, seeing
from txl.model import Network
from txl.model.config import PLACES, ModelConfig
from txl.text.corpus import as_tensor
from txl.text.vocabulary import Tokens


def check_window(model: Network, attn_len: int, stride: int) -> None:
    """Raises TxlError if a window cannot have these sizes, or is longer than learned positions."""
    check_attn_len(attn_len)
    if not 1 <= stride <= attn_len:
        raise TxlError(f"stride must be from 1 to the window's {attn_len} tokens, got {stride}")
    longest = learned_positions(model)
    if longest is not None and attn_len > longest:
        raise TxlError(f"a window of {attn_len} tokens is beyond the model's {longest} learned positions (table_len)")


def learned_positions(model: Network) -> int | None:
    """Most tokens that a segment can have: the rows of a table of learned positions; None without
    one."""
    config = model.config
    return config.table_len if isinstance(config, ModelConfig) and config.encoding in PLACES else None


class WindowReader(Reader):
    """Each call reads the last `attn_len` tokens from an empty state; gives the new ones' states.

    So the last of L new tokens sees attn_len keys, the first attn_len - L + 1; with L = 1 it is
    the evaluation of Al-Rfou et al. (2018), and the vanilla side of the paper's Table 9.
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
        """As `Reader.feed`; of a long prompt only the last window is read."""
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
    """Losses of a split, windows of attn_len tokens side by side, the last `stride` of each scored.

    Windows do not depend on each other, so no text is cut: each token sees as much as it can, and
    those near the start all that is before them (`start` first).

    first: leaves out tokens before this one.

    Yields: losses, flat, in order of the tokens.

    Raises:
        TxlError: as `check_window`.
    """
    check_window(model, attn_len, stride)
    check_clamp_len(model, clamp_len)
    model.eval()
    count = len(tokens)

    def inputs(begin: int, end: int) -> Tensor:
        """Tokens begin - 1 .. end - 2, where -1 is `start`: what predicts begin .. end - 1."""
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
        if end <= attn_len:  # at the start windows are shorter, each of another length
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
