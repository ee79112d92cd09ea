"""NeMo's encoder in ONNX Runtime: the graph that torch's exporter writes, and the same, rewritten
(`txl_kernels.onnx.rewrite`).

Its attention alone has Parakeet's sizes: 8 heads of width 128. Each layer is NeMo's own, with the
table of its encoder and a mask from lengths. All layers have the same weights, so that the graph of
24 is small. The whole encoder has those of FastConformer Large: 17 layers, 8 heads of width 64.
"""

import copy
import functools
import importlib.util
import io
import warnings
from collections.abc import Callable
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


class Encoder(nn.Module):
    """NeMo's FastConformer Large: features [B, 80, 8 T] and lengths [B] to [B, 512, T]."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"feat_in": 80, "n_layers": 17, "d_model": 512, "n_heads": 8, "conv_kernel_size": 9}
        subsampling = {"subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": 256}
        self.encoder = bare_peers.nemo_encoder().ConformerEncoder(**sizes, **subsampling)
        self.encoder.export_cache_support = False
        for name, x in self.named_parameters():
            if name.endswith(("pos_bias_u", "pos_bias_v")):
                nn.init.normal_(x, 0, 0.2)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return self.encoder.forward_for_export(frames, lengths)[0]  # type: ignore[no-any-return]


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
def exported(layers: int, projections: bool) -> tuple[nn.Module, bytes]:
    """Return attention layers, and their graph for any batch and length."""
    torch.manual_seed(0)
    model = Attention(layers, projections).eval()
    return model, _graph_of(model, torch.randn(2, 50, D_MODEL), 1)


@functools.cache
def _whole() -> tuple[nn.Module, bytes]:
    """Return the whole encoder, and its graph for any batch and length."""
    torch.manual_seed(0)
    model = Encoder().eval()
    return model, _graph_of(model, torch.randn(2, 80, 400), 2)


def _graph_of(model: nn.Module, frames: Tensor, time: int) -> bytes:
    """Return the graph of a model that reads frames, whose axis `time` is that of time."""
    bare_peers.use()
    file = io.BytesIO()
    axes = {"frames": {0: "batch", time: "length"}, "lengths": {0: "batch"}}
    lengths = torch.tensor([frames.size(time), frames.size(time) * 3 // 5])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (frames, lengths), file, dynamo=False, input_names=list(axes), dynamic_axes=axes)
    return file.getvalue()


def session_of(method: str, graph: bytes, layers: int) -> Any:
    """Return a session of a graph.

    Raises:
        AssertionError: not every attention could be replaced.
    """
    bare_peers.use()
    import onnx
    import onnxruntime

    from txl_kernels.onnx import library, rewrite

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
    model, graph = exported(layers, projections)
    session = session_of(method, graph, layers)
    return Entry(run_of(session, frames), _check(method, session, model, torch.randn(2, 60, D_MODEL)))


def _check(method: str, session: Any, model: nn.Module, x: Tensor) -> Callable[[], None]:
    def check() -> None:
        """Compare padded batch rows with the model in float64."""
        total = x.size(1 + (x.size(1) == 80))  # features lie before the time in the whole encoder
        lengths = torch.tensor([total, total * 2 // 3])
        with torch.no_grad():
            want = copy.deepcopy(model).double()(x.double(), lengths)
        got = torch.from_numpy(session.run(None, {"frames": x.numpy(), "lengths": lengths.numpy()})[0])
        require(got, want, method)

    return check


def encoder_entry(method: str, frames: int) -> Entry:
    """Make an entry that runs the whole encoder on a recording of frames, as its layers count."""
    _require()
    model, _ = _whole()
    session = _whole_session(method)
    given = {"frames": torch.randn(1, 80, 8 * frames).numpy(), "lengths": torch.tensor([8 * frames]).numpy()}
    check = _check(method, session, model, torch.randn(2, 80, 400))
    return Entry(lambda: torch.from_numpy(session.run(None, given)[0]), check)


@functools.cache
def _whole_session(method: str) -> Any:
    return session_of(method, _whole()[1], 17)


def memory_entry(method: str, layers: int, frames: int, machine: Machine) -> Entry:
    """Make an entry that measures the peak memory of layers in a separate process."""
    _require()

    def check() -> None:
        found = entry(method, 2, True, 60)
        assert found.check is not None
        found.check()

    return probe("onnx", f"{method} {layers}", (frames,), frames, machine, check)
