"""Maps of what trained heads attend to (paper, Appendix D): figures 5, 6 and 7."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.readers import seeing
from txl.model import Network, as_transformer
from txl.model.transformer import TransformerXL
from txl.pictures import new_figure, save, whole_ticks
from txl.text.corpus import as_tensor
from txl.text.vocabulary import Tokens
from txl_kernels.layer import SegmentAttention

SEGMENT = 128
# The paper's figures omit term (c), the bias of each key.
TERMS = {"a": "(a) content", "b": "(b) content-dependent position", "d": "(d) global position bias"}
MARKED = 0.2  # fraction of each row's weights, the largest, that figure 6 marks


def weights_of_terms(attention: SegmentAttention, x: Tensor, memory: Tensor, window: int) -> dict[str, Tensor]:
    """Compute the attention weights of a layer for queries with full windows.

    Args:
        x: [1, L, d_model], input of the layer's projections.
        memory: [1, M >= window - 1, d_model], the same for the positions before x.
        window: W, the number of keys of a query, its own position included.

    Returns:
        "all": the softmax of the scores; "a", "b" and "d": the softmax of that term alone (paper,
        section 3.3: q . k, q . r and v . r); [H, L, W] each. Column d is for the key d positions
        before the query.
    """
    assert memory.size(1) >= window - 1
    hidden, width = torch.cat([memory[0, memory.size(1) - (window - 1) :], x[0]]), attention.d_head
    q, k, _ = attention.qkv(hidden).unflatten(-1, (3, attention.n_head, width)).permute(1, 2, 0, 3)
    q, keys = q[:, window - 1 :], k.flip(1)  # last key first
    table = attention.project_positions(attention.positions(1, window - 1, like=x))  # [H, W, kernel_width >= width]
    u, v = attention.biases()
    scale = 1 / math.sqrt(width)
    a = _by_distance(q @ keys.mT, window) * scale
    b = q @ table[..., :width].mT * scale
    c = _by_distance((keys @ u[:, :width].unsqueeze(-1)).mT.expand(-1, q.size(1), -1).contiguous(), window) * scale
    d = (table @ v.unsqueeze(-1)).mT * scale
    scores = {"all": a + b + c + d, "a": a, "b": b, "d": d}
    return {name: x.softmax(-1).expand_as(a) for name, x in scores.items()}


def _by_distance(scores: Tensor, window: int) -> Tensor:
    """Skew scores [H, L, L + W - 1], last key first, to [H, L, W], each query's own key first; a
    view."""
    heads, length, _ = scores.shape
    return scores.as_strided(
        (heads, length, window), (scores.stride(0), scores.stride(1) - 1, 1), scores.storage_offset() + length - 1
    )


def check_attention(network: Network) -> TransformerXL:
    """Return the network if its scores depend on positions.

    Raises:
        TxlError: they do not (an LSTM, QRNN or absolute positions).
    """
    model = as_transformer(network, "a picture of attention")
    if model.config.absolute:
        raise TxlError(
            f"encoding {model.config.encoding!r} has no positions in its scores; pictures are of 'relative', 'shaw' and "
            "'shaw-released'"
        )
    return model


@torch.inference_mode()
def read_weights(
    model: TransformerXL, tokens: Tokens, start: int, window: int, segment: int = SEGMENT
) -> Iterator[tuple[int, list[dict[str, Tensor]]]]:
    """Yield every layer's weights for all queries whose windows are full of tokens of the text.

    Args:
        model: as `check_attention` returns it.
        tokens: [n], the text. start: the token before its first.
        window: number of keys of each query, its own position included; replaces the model's
            window.
        segment: number of queries computed at once.

    Yields:
        For each segment the index of its first such query, which is that of its token in the text,
        and each layer's weights, as `weights_of_terms` returns them.

    Raises:
        TxlError: the text is too short for a full window.
    """
    model.eval()
    if window < 1 or segment < 1:
        raise TxlError(f"window and segment must be >= 1, got {window} and {segment}")
    if len(tokens) < window:
        raise TxlError(f"the text has {len(tokens):,} tokens, fewer than a window of {window:,}")
    memory: tuple[Tensor, ...] | None = None
    for first in range(0, len(tokens), segment):
        # Query t reads token t - 1 and predicts token t.
        inputs = as_tensor(tokens[max(first - 1, 0) : min(first + segment, len(tokens)) - 1])
        inputs = torch.cat([torch.tensor([start], device="cpu"), inputs]) if first == 0 else inputs
        block = inputs.unsqueeze(0).to(model.device)
        skipped, weights = max(window - 1 - first, 0), []  # queries whose windows are not full
        with seeing(model, window):
            states = model.read(block, memory, mem_len=max(window - 1, 1))
            for layer, inner in enumerate(model.layers if skipped < block.size(1) else []):
                hidden = states.inputs[layer]
                past = hidden[:, :skipped] if memory is None else torch.cat([memory[layer], hidden[:, :skipped]], 1)
                assert isinstance(inner.attention, SegmentAttention)
                x, before = inner.attention_input(hidden[:, skipped:]), inner.attention_input(past)
                weights.append(weights_of_terms(inner.attention, x, before, window))
        if weights:
            yield first + skipped, weights
        memory = states.memory


class Attention:
    """Mean attention over a text, in memory independent of its length, and the attention of a few
    consecutive queries. Rows are heads, layer by layer; column d is for the key d positions before.

    Args:
        layers, heads, window: sizes n_layer, H and W.
        first, count: range of the queries whose weights are stored, by index in the text.

    Attributes:
        queries: number of queries added.
        weights: those of the stored queries, [n_layer * H, count, W] float32.
    """

    def __init__(self, layers: int, heads: int, window: int, first: int = 0, count: int = 0) -> None:
        self.heads, self.first, self.queries = heads, first, 0
        self.weights = torch.zeros(layers * heads, count, window, dtype=torch.float32, device="cpu")
        sums = torch.zeros(4, layers * heads, window, dtype=torch.float64, device="cpu")
        self._sums = dict(zip(("all", *TERMS), sums, strict=True))

    def add(self, first: int, layers: list[dict[str, Tensor]]) -> None:
        """Add the weights of one segment, as `read_weights` yields them."""
        count = layers[0]["all"].size(1)
        begin, end = max(self.first, first), min(self.first + self.weights.size(1), first + count)
        for layer, weights in enumerate(layers):
            rows = slice(layer * self.heads, (layer + 1) * self.heads)
            for name, x in weights.items():
                self._sums[name][rows] += x.sum(1, dtype=torch.float64).cpu()
            if begin < end:
                kept = weights["all"][:, begin - first : end - first].float().cpu()
                self.weights[rows, begin - self.first : end - self.first] = kept
        self.queries += count

    def mean(self, term: str = "all") -> Tensor:
        """Return the mean weight at each distance, [n_layer * H, W] float64; rows sum to 1.

        term: "all", or "a", "b" or "d" for the softmax of that term alone.
        """
        if not self.queries:
            raise TxlError("no query has been added yet")
        if not bool(self._sums["all"].isfinite().all()):
            raise TxlError("the attention is not finite: the model's parameters are damaged, or it diverged")
        mean: Tensor = self._sums[term] / self.queries
        return mean

    def widest(self, layer: int) -> int:
        """Return the index, over all layers, of the head of a layer (both from 0) whose mean
        attention has the largest entropy."""
        rows = self.mean()[layer * self.heads : (layer + 1) * self.heads]
        return layer * self.heads + int(torch.special.entr(rows).sum(-1).argmax())


def by_token(rows: Tensor) -> Tensor:
    """Shift rows [T, W] by distance to [T, W + T - 1] by token; NaN outside a row's window."""
    count, window = rows.shape
    picture = rows.new_full((count, window + count - 1), torch.nan)
    for n, row in enumerate(rows):
        picture[n, n : n + window] = row.flip(0)
    return picture


def marked(weights: Tensor) -> Tensor:
    """Mark the largest fifth of each row: [T, W] by distance -> [T, W + T - 1] by token, with 1 for
    marked weights, 0 for the rest of the window and NaN outside."""
    largest = weights.topk(max(round(MARKED * weights.size(1)), 1)).indices
    return by_token(torch.zeros_like(weights).scatter_(1, largest, 1.0))


def draw_means(attention: Attention, titles: dict[str, str], path: Path) -> None:
    """Draw figure 5 (term "all") or 7: one panel for each term. Rows are heads, layer by layer from
    the top; columns are distances, the nearest at the right; darker is larger, in the colors of
    figure 5. Heads count from 1, as in figure 6."""
    from matplotlib.colors import PowerNorm

    figure = new_figure(7.0 if len(titles) == 1 else 13.0, 4.8)
    panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    cells = attention.mean().flatten()
    top = float(cells.kthvalue(max(int(0.998 * cells.numel()), 1)).values) or 1.0  # above all but a few values
    for axes, (term, title) in zip(panels, titles.items(), strict=True):
        rows = attention.mean(term).flip(1)
        image = axes.imshow(
            rows.numpy(), aspect="auto", interpolation="nearest", cmap="Greys", norm=PowerNorm(0.5, 0, top),
            extent=(0.5 - rows.size(1), 0.5, len(rows), 0),
        )  # fmt: skip
        for head in range(attention.heads, len(rows), attention.heads):
            axes.axhline(head, color="tab:blue", lw=0.4, alpha=0.6)
        axes.set(title=title, xlabel="distance of the key, negative: before the query")
        whole_ticks(axes.xaxis)
        step = max(len(rows) // 16, 1)
        axes.set_yticks([head + 0.5 for head in range(0, len(rows), step)], range(1, len(rows) + 1, step))
    panels[0].set_ylabel("head, from 1, layer by layer")
    if len(titles) > 1:
        figure.suptitle(
            "Mean attention by one term alone; term (c), a key's prior, is left out as in the paper", fontsize=10
        )
    figure.colorbar(image, ax=panels, label="mean weight", extend="max")
    save(figure, path)


def draw_heads(attention: Attention, heads: Sequence[int], path: Path) -> None:
    """Draw figure 6: for each head, successive targets from the top and their weights on the text,
    the largest fifth of each row in red.

    heads: indices over all layers, from 0.
    """
    _, count, window = attention.weights.shape
    figure = new_figure(9.0, 2.4 * len(heads) + 0.4)
    for axes, head in zip(figure.subplots(len(heads), 1, squeeze=False)[:, 0], heads, strict=True):
        axes.imshow(
            marked(attention.weights[head]).numpy(), aspect="auto", interpolation="nearest", cmap="Reds", vmin=0, vmax=1.4,
            extent=(-window, count, count, 0),
        )  # fmt: skip
        axes.set(
            title=f"head {head + 1}, of layer {head // attention.heads + 1}", xlabel="token, from the first target on",
            ylabel="target",
        )  # fmt: skip
        whole_ticks(axes.xaxis, axes.yaxis)
    save(figure, path)
