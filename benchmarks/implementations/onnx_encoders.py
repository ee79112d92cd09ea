"""The attention of NeMo's encoder in ONNX Runtime: the graph that torch's exporter writes, and the
same, rewritten (`txl_kernels.onnx.rewrite`). Parakeet's sizes: 8 heads of width 128.

Each layer is NeMo's own, with the table of its encoder and a mask from lengths. All layers have the
same weights, so that the graph of 24 is small.
"""

import functools
import importlib.util
import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from harness.comparison import Entry, Unavailable, require
from harness.machine import Machine
from implementations import bare_peers
from implementations.memory import probe

ORIGINAL, REWRITTEN = "exported", "rewritten"
HEADS, WIDTH, THREADS = 8, 128, 2
MAX_FRAMES = 8000
D_MODEL = HEADS * WIDTH


class Attention(nn.Module):
    """Layers of NeMo's attention with residuals.

    projections: False for what lies between the projections: queries, keys, values and the table
    are the frames and the encodings themselves.
    """

    def __init__(self, layers: int, projections: bool) -> None:
        super().__init__()
        nemo = bare_peers.nemo()
        self.layers = layers
        self.positions = nemo.RelPositionalEncoding(D_MODEL, 0.0, max_len=MAX_FRAMES)
        self.positions.extend_pe(MAX_FRAMES, torch.device("cpu"), torch.float32)
        self.attention = nemo.RelPositionMultiHeadAttention(HEADS, D_MODEL, 0.0, None, None)
        self.norm = nn.LayerNorm(D_MODEL)
        for bias in (self.attention.pos_bias_u, self.attention.pos_bias_v):
            nn.init.normal_(bias, 0, 0.2)
        if not projections:
            for name in ("q", "k", "v", "out", "pos"):
                setattr(self.attention, f"linear_{name}", nn.Identity())

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Take frames [B, T, D_MODEL] and lengths [B]."""
        count = frames.size(1)
        real = (torch.arange(count).expand(lengths.size(0), -1) < lengths.unsqueeze(-1)).unsqueeze(1)
        seen = real.repeat([1, count, 1])
        hidden = ~torch.logical_and(seen, seen.transpose(1, 2))
        x, encodings = self.positions(frames)
        for _ in range(self.layers):
            y = self.norm(x)
            x = x + self.attention(y, y, y, hidden, encodings)
        return x  # type: ignore[no-any-return]


def _require() -> None:
    bare_peers.use()
    packages = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))
    if not (bare_peers.AVAILABLE and packages):
        raise Unavailable("NeMo, onnx or onnxruntime is not here: `make peers`, and PEERS=.peers in the environment")


@functools.cache
def _exported(layers: int, projections: bool) -> tuple[nn.Module, bytes]:
    """Return the layers, and their graph for any batch and length."""
    torch.manual_seed(0)
    model, file = Attention(layers, projections).eval(), io.BytesIO()
    example = torch.randn(2, 50, D_MODEL), torch.tensor([50, 30])
    axes = {"frames": {0: "batch", 1: "length"}, "lengths": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, example, file, dynamo=False, input_names=list(axes), dynamic_axes=axes)
    return model, file.getvalue()


def session_of(method: str, layers: int, projections: bool) -> Any:
    """Return a session of the graph.

    Raises:
        AssertionError: not every attention could be replaced.
    """
    bare_peers.use()
    import onnx
    import onnxruntime

    from txl_kernels.onnx import library, rewrite

    _, graph = _exported(layers, projections)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    if method == REWRITTEN:
        model = onnx.load_from_string(graph)
        report = rewrite(model)
        assert len(report.replaced) == layers, report
        graph = model.SerializeToString()
        options.register_custom_ops_library(library())
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def inputs_of(frames: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"frames": torch.randn(1, frames, D_MODEL, generator=generator), "lengths": torch.tensor([frames])}


def run_of(session: Any, frames: int) -> Any:
    """Return a function that runs a session on one recording and returns its output."""
    given = {name: x.numpy() for name, x in inputs_of(frames).items()}
    return lambda: torch.from_numpy(session.run(None, given)[0])


def entry(method: str, layers: int, projections: bool, frames: int) -> Entry:
    """Make an entry that runs layers on one recording."""
    _require()
    session = session_of(method, layers, projections)

    def check() -> None:
        """Compare padded batch rows with the layers in float64."""
        model, _ = _exported(layers, projections)
        x, lengths = torch.randn(2, 60, D_MODEL), torch.tensor([60, 41])
        with torch.no_grad():
            want = model.double()(x.double(), lengths)
        model.float()
        got = torch.from_numpy(session.run(None, {"frames": x.numpy(), "lengths": lengths.numpy()})[0])
        require(got, want, method)

    return Entry(run_of(session, frames), check)


def memory_entry(method: str, layers: int, frames: int, machine: Machine) -> Entry:
    """Make an entry that measures the peak memory of layers in a separate process."""
    _require()

    def check() -> None:
        found = entry(method, 2, True, 60)
        assert found.check is not None
        found.check()

    return probe("onnx", f"{method} {layers}", (frames,), frames, machine, check)
