"""Attention layers and whole encoders of other libraries, original and accelerated.

The environment variable PEERS names the folder that `make peers` filled.
"""

import copy
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from harness.comparison import Entry, Unavailable, require
from harness.machine import Machine
from implementations import bare_peers, peer_cases
from implementations.memory import probe
from implementations.methods import passes
from txl_kernels.integrations import accelerate

bare_peers.use()
D_MODEL, HEADS = 512, 8
BATCHES = {256: 4, 1000: 2, 3000: 1}  # batch size by length
ACCELERATED, ORIGINAL, ROTARY = "accelerated", "original", "baseline: rotary positions, SDPA"
PARAKEET = "transformers Parakeet"


class Layer(NamedTuple):
    """Name and options for `peer_cases.make`."""

    name: str
    options: dict[str, Any]


LAYERS = {
    "NeMo": Layer("nemo", {}),
    "NeMo, its SDPA flag": Layer("nemo", {"sdpa": True}),
    PARAKEET: Layer("parakeet", {}),
    "transformers w2v-BERT, relative_key": Layer("w2v-bert relative_key", {}),
    "ESPnet": Layer("espnet", {}),
    "ESPnet, legacy": Layer("espnet legacy", {}),
    "SpeechBrain": Layer("speechbrain", {}),
    "transformers Wav2Vec2-Conformer": Layer("wav2vec2-conformer", {}),
    "transformers SeamlessM4T v2": Layer("seamless v2", {}),
    "transformers FastSpeech2-Conformer": Layer("fastspeech2", {}),
    "FunASR": Layer("funasr", {}),
    "transformers XLNet, 3 segments": Layer("xlnet", {"segments": 3}),
    "DI-engine GTrXL": Layer("ding", {}),
    "RLlib GTrXL": Layer("rllib", {}),
    "NeMo, local attention": Layer("nemo local", {"context": (128, 128)}),
    "transformers Granite Speech": Layer("granite", {"context": 200}),
    "FunASR, legacy": Layer("funasr legacy", {}),
    "CosyVoice": Layer("cosyvoice", {}),
    "Enformer": Layer("enformer", {"values": 192}),
    "transformers T5, 3 layers": Layer("t5", {}),
    "transformers WavLM, 3 layers": Layer("wavlm", {}),
    "Zipformer": Layer("zipformer", {}),
}
STEPS_OF_RUN = 50
SHORT = tuple(LAYERS)[:7]  # layers that are run without --full
WITH_MEMORY = ("ding", "rllib")  # causal, with a memory of as many frames as the segment; never padded


class Rotary(nn.Module):
    """Attention with rotary positions by SDPA, with a Conformer layer's projections except the one
    of positions."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.heads, width = heads, size // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.register_buffer("rates", 10000.0 ** -(torch.arange(0, width, 2) / width))

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """Compute attention of x [B, T, size]; keys: bool [B, T], True for keys that are seen."""
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        angle = torch.arange(x.size(1), device=x.device)[:, None] * self.rates.float()
        cos, sin = (f(torch.cat([angle, angle], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        q, k = (y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin for y in (q, k))
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keys[:, None, None])
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _case(
    title: str, length: int, batch: int, d_model: int, heads: int, machine: Machine | None = None
) -> peer_cases.PeerCase:
    """Make the case of a layer, on a machine or in float32 on the CPU."""
    layer = LAYERS[title]
    masks, more = ("none", {"memory": length}) if layer.name in WITH_MEMORY else ("right", {})
    sizes = peer_cases.Sizes(d_model, heads, length, batch)
    device, dtype = (torch.device("cpu"), torch.float32) if machine is None else (machine.device, machine.dtype)
    with device:
        case = peer_cases.make(layer.name, masks, sizes=sizes, **layer.options, **more)
    case.module.to(dtype).eval()
    case.x = case.x.to(dtype)
    return case


def _apply(method: str, case: peer_cases.PeerCase) -> None:
    """Accelerate the case's module, or replace it by one with rotary positions."""
    if method == ACCELERATED:
        accelerate(case.module, strict=True, verify=True)
    elif method == ROTARY:
        keys = case.valid
        case.module = Rotary(HEADS, case.x.size(-1)).to(case.x)
        case.call = lambda module, x: module(x, keys)


def layer_step(
    title: str,
    method: str,
    length: int,
    backward: bool,
    batch: int = 0,
    d_model: int = D_MODEL,
    machine: Machine | None = None,
) -> Callable[[], Tensor]:
    """Return a function that runs one layer with its projections on a padded batch; batch: 0 for
    that of the length in BATCHES."""
    _require(title)
    case = _case(title, length, batch or BATCHES[length], d_model, HEADS, machine)
    _apply(method, case)
    leaves = case.x.requires_grad_(backward), *(p for p in case.module.parameters() if p.requires_grad)
    return passes(lambda: case.call(case.module, case.x), leaves, backward)


def layer_entry(title: str, method: str, *sizes: Any, machine: Machine | None = None) -> Entry:
    """Make an entry of `layer_step`. sizes: its length, backward, batch and d_model."""
    step = layer_step(title, method, *sizes, machine=machine)
    return Entry(step, None if method == ROTARY else lambda: check_layer(title, method, machine))


def memory_entry(title: str, method: str, lengths: tuple[int, ...], length: int, machine: Machine) -> Entry:
    """Make an entry that measures the peak memory of forward and backward in a separate process."""
    _require(title)
    return probe("peer", f"{method} {title}", lengths, length, machine, functools.partial(check_layer, title, method))


def check_layer(title: str, method: str, machine: Machine | None = None) -> None:
    """Check the output against the library's own in float64, or in float32 if it cannot run in
    float64."""
    case = _case(title, 45, 3, 256, 4, machine)
    if LAYERS[title].name == "speechbrain":  # its softmax is computed in float32
        exact = case.call(case.module, case.x)[case.valid].double()
    else:
        exact = case.call(copy.deepcopy(case.module).double(), case.x.double())[case.valid]
    _apply(method, case)
    require(case.call(case.module, case.x)[case.valid], exact, title)


def _require(title: str) -> None:
    """Raise Unavailable if the library is not here; Parakeet may be that of an installed
    transformers, of which older ones have none."""
    names = ("transformers", "transformers.models.parakeet")
    if not bare_peers.AVAILABLE and not (title == PARAKEET and all(map(importlib.util.find_spec, names))):
        raise Unavailable("other libraries are not here: `make peers`, and PEERS=.peers in the environment")


STEPS = ((70, 1), (70, 14), (256, 16))  # cached and new frames of NeMo's streaming step


def stream_entry(method: str, held: int, new: int) -> Entry:
    """Make an entry that runs steps of NeMo's cache-aware attention, each with the cache of the
    previous step."""
    _require("NeMo")
    case = _case("NeMo", held, 1, D_MODEL, HEADS)
    module: Any = case.module
    module.cache_drop_size = 0
    encodings = peer_cases.sinusoids(held + new - 1, 1 - held - new, D_MODEL)
    frames, first = torch.randn(1, new, D_MODEL), torch.randn(1, held, D_MODEL)
    cache = first

    def step(cache: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            result: tuple[Tensor, Tensor] = module(frames, frames, frames, None, encodings, cache)
        return result

    own, after = step(first)
    later = step(after)[0].double()
    if method == ACCELERATED:
        accelerate(module, strict=True, streaming=True)

    def run() -> None:
        nonlocal cache
        for _ in range(STEPS_OF_RUN):
            _, cache = step(cache)

    def check() -> None:
        out, after = step(first)
        require(out, own.double(), "first step")
        require(step(after)[0], later, "second step")

    return Entry(run, check, per=STEPS_OF_RUN)


def _last_hidden_state(model: Any, x: Tensor) -> Tensor:
    return model(x).last_hidden_state


class Encoder(NamedTuple):
    """A whole model with random weights.

    Attributes:
        frames: number of input frames per second of audio.
        call: returns the output of frames [1, T, features].
    """

    make: Callable[[int], Any]
    frames: int
    features: int
    call: Callable[[Any, Tensor], Tensor] = _last_hidden_state


def _parakeet(layers: int) -> Any:
    m = bare_peers.transformers("parakeet")
    config = m.ParakeetEncoderConfig(num_hidden_layers=layers)
    config._attn_implementation = "sdpa"
    return m.ParakeetEncoder(config)


def _w2v_bert(layers: int) -> Any:
    m = bare_peers.transformers("wav2vec2_bert")
    config = m.Wav2Vec2BertConfig(num_hidden_layers=layers, layerdrop=0.0)
    config._attn_implementation = "sdpa"
    return m.Wav2Vec2BertModel(config)


def _zipformer(layers: int) -> Any:
    """Return icefall's medium size, with this number of layers in each of its six stacks."""
    with mock.patch.dict(os.environ, {"K2_ONNX_EXPORT": "1"}):  # its activations are not compiled
        return bare_peers.zipformer().Zipformer(
            downsampling_factor=(1, 2, 4, 8, 4, 2), encoder_dim=(192, 256, 384, 512, 384, 256), num_encoder_layers=layers,
            encoder_unmasked_dim=(192, 192, 256, 256, 256, 192), query_head_dim=32, pos_head_dim=4, value_head_dim=12,
            num_heads=(4, 4, 4, 8, 4, 4), feedforward_dim=(512, 768, 1024, 1536, 1024, 768),
            cnn_module_kernel=(31, 31, 15, 15, 15, 31), pos_dim=48,
        )  # fmt: skip


def _call_zipformer(model: Any, x: Tensor) -> Tensor:
    return model(x.transpose(0, 1), torch.tensor([x.size(1)]))[0]


ZIPFORMER = "Zipformer"
ENCODERS = {
    "Parakeet": Encoder(_parakeet, 100, 80),
    "w2v-BERT 2.0": Encoder(_w2v_bert, 50, 160),
    ZIPFORMER: Encoder(_zipformer, 50, 192, _call_zipformer),
}
LAYERS_OF_ENCODER = {"Parakeet": 4, "w2v-BERT 2.0": 4, ZIPFORMER: 2}  # of each stack of Zipformer


def encoder_entry(title: str, method: str, frames: int) -> Entry:
    """Make an entry that runs a whole encoder forward over one recording."""
    _require(title)
    encoder = ENCODERS[title]
    torch.manual_seed(0)
    model = encoder.make(LAYERS_OF_ENCODER[title]).eval()
    features = torch.randn(1, frames, encoder.features)

    def run(x: Tensor = features) -> Tensor:
        with torch.no_grad():
            return encoder.call(model, x)

    short = features[:, :400]
    own = run(short).double()
    if method == ACCELERATED:
        accelerate(model, strict=True)
    return Entry(run, lambda: require(run(short), own, title, 1e-4))


def encoder_memory_entry(title: str, method: str, lengths: tuple[int, ...], length: int, machine: Machine) -> Entry:
    """Make an entry that measures the peak memory of an encoder in a separate process."""
    _require(title)

    def check() -> None:
        entry = encoder_entry(title, method, 400)
        assert entry.check is not None
        entry.check()

    return probe("encoder", f"{method} {title}", lengths, length, machine, check)
