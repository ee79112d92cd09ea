"""LSTM and QRNN language models, with whose effective context the paper compares (Table 8)."""

import torch
from torch import Tensor, nn

from txl.errors import TxlError
from txl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, init_parameters
from txl.model.config import RecurrentConfig
from txl.model.transformer import HiddenMemory, LanguageNetwork, States, check_tokens, hidden_dropout

State = tuple[Tensor, ...]  # of a layer
Layer = tuple[Tensor, State]


def linear_recurrence(a: Tensor, b: Tensor, before: Tensor) -> Tensor:
    """Compute states h_t = a_t * h_{t-1} + b_t, [L, ..].

    a, b: [L, ..], L >= 1, of the same dtype. before: [..], the state before the first.
    """
    states = []
    for factor, added in zip(a, b, strict=True):
        before = torch.addcmul(added, factor, before)
        states.append(before)
    return torch.stack(states)


def has_bf16_lstm() -> bool:
    """Whether torch's LSTM runs under autocast to bfloat16 on this CPU: oneDNN's needs AVX-512."""
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(1, 1, device="cpu")(torch.zeros(1, 1, 1, device="cpu"))
    except RuntimeError:
        return False
    return True


class LSTMLayer(nn.LSTM):
    """torch's LSTM with one layer; its state is h and c, [B, width] each."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, batch_first=True)

    def begin(self, x: Tensor) -> State:
        zero = x.new_zeros(x.size(0), self.hidden_size)
        return zero, zero

    def advance(self, x: Tensor, state: State) -> Layer:
        """Compute [B, L, d_in] -> [B, L, d_out] and the state after the last position."""
        h, c = (part.to(x.dtype).unsqueeze(0).contiguous() for part in state)
        out, (h, c) = self(x, (h, c))
        return out, (h[0], c[0])


class QRNNLayer(nn.Module):
    """QRNN layer: z = tanh, f and o = sigmoid of a convolution; c_t = f z + (1 - f) c_{t-1}, h = o
    c.

    This is "fo-pooling" of Bradbury et al. (2017), with f as the weight of the new value, as in
    AWD-QRNN's code. The state is c [B, d_out] and, with a window of 2, the last input [B, d_in].

    Args:
        window: inputs of the convolution: 1 for the current one, 2 to include the one before.
    """

    def __init__(self, d_in: int, d_out: int, window: int) -> None:
        super().__init__()
        self.d_in, self.d_out, self.window = d_in, d_out, window
        self.gates = nn.Linear(window * d_in, 3 * d_out)  # rows: z, f, o; columns: x_t, then x_{t-1}

    def begin(self, x: Tensor) -> State:
        state = (x.new_zeros(x.size(0), self.d_out),)
        return state if self.window == 1 else (*state, x.new_zeros(x.size(0), self.d_in))

    def advance(self, x: Tensor, state: State) -> Layer:
        """Compute [B, L, d_in] -> [B, L, d_out] and the state after the last position."""
        source = x
        if self.window == 2:
            earlier = torch.cat([state[1].to(x.dtype).unsqueeze(1), x[:, :-1]], 1)
            source = torch.cat([x, earlier], -1)
        gates = self.gates(source).transpose(0, 1)
        gates = gates if gates.dtype == torch.float64 else gates.float()  # also under autocast
        z, f, o = gates.split(self.d_out, -1)  # [L, B, d_out] each
        f = f.sigmoid()
        cells = linear_recurrence(1 - f, f * z.tanh(), state[0].to(f.dtype))
        after = (cells[-1],) if self.window == 1 else (cells[-1], x[:, -1])
        return (o.sigmoid() * cells).transpose(0, 1), after


def state_shapes(config: RecurrentConfig, batch: int) -> list[list[int]]:
    """Return the shapes of the state of all layers, in order: h and c of an LSTM's; c of a QRNN's,
    the first of which also has its last input."""
    found = []
    for n, (d_in, d_out) in enumerate(config.widths):
        second = [[batch, d_out]] if config.network == "lstm" else [[batch, d_in]] if n == 0 else []
        found += [[batch, d_out], *second]
    return found


class RecurrentNetwork(LanguageNetwork):
    """Language model of LSTM or QRNN layers; its memory is the layers' state.

    Attributes:
        blocks: the layers.
        second_softmax: None, as in a `TransformerXL` without one.
    """

    second_softmax: None = None

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = AdaptiveEmbedding(config)
        self.embedding_dropout = hidden_dropout(config, config.embedding_dropout)
        made = [
            LSTMLayer(d_in, d_out) if config.network == "lstm" else QRNNLayer(d_in, d_out, 2 if i == 0 else 1)
            for i, (d_in, d_out) in enumerate(config.widths)
        ]
        self.blocks = nn.ModuleList(made)  # initialized by torch: uniform in +- 1 / sqrt(width)
        self.dropout = hidden_dropout(config)
        self.output_dropout = hidden_dropout(config, config.output_dropout)
        self.softmax = AdaptiveSoftmax(config, self.embedding)
        for module in (self.embedding, self.softmax):
            init_parameters(module, config)

    def read(
        self,
        tokens: Tensor,
        memory: HiddenMemory | None = None,
        *,
        mem_len: int | None = None,
        ext_len: int = 0,
        last: int | None = None,
    ) -> States:
        """Compute the hidden states of a segment, without those of single layers; arguments and
        errors as in `Trunk.read`.

        memory: the detached state after the segment before. mem_len: 0 to return no state. ext_len:
        must be 0, because a recurrent network cannot read tokens again.

        Raises:
            TxlError: memory is not the state of such a network, as in a forged checkpoint.
        """
        check_tokens(tokens)
        if ext_len:
            raise ValueError(f"ext_len must be 0 for a {self.config.network}, got {ext_len}")
        if memory is not None and memory[0].size(0) != tokens.size(0):
            raise ValueError(f"memory must be for a batch of {tokens.size(0)}, got {memory[0].size(0)}")
        if memory is not None:
            wanted = state_shapes(self.config, tokens.size(0))
            if [list(x.shape) for x in memory] != wanted or not all(x.is_floating_point() for x in memory):
                got = ", ".join(f"{x.dtype} {list(x.shape)}" for x in memory)
                raise TxlError(
                    f"memory of a network of kind {self.config.network!r} must be floating-point tensors {wanted}, got {got}"
                )
        hidden = self.embedding_dropout(self.embedding(tokens))
        left = None if memory is None else list(memory)
        kept: list[Tensor] = []
        for block in self.blocks:
            assert isinstance(block, (LSTMLayer, QRNNLayer))
            state = block.begin(hidden)
            if left is not None:
                state, left = tuple(left[: len(state)]), left[len(state) :]
            hidden, state = block.advance(hidden, state)
            kept += [part.detach() for part in state]
            if block is not self.blocks[-1]:
                hidden = self.dropout(hidden)
        hidden = self.output_dropout(hidden if last is None else hidden[:, -last:])
        return States(hidden, None if mem_len == 0 else tuple(kept), [], [])
