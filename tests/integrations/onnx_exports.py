"""Small encoders of other libraries with random weights, exported to ONNX, and inputs for them."""

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from onnx_models import onnx, session_of
from small_models import model_of, randomized
from torch import Tensor, nn

from implementations import bare_peers

FEATURES = 16
Arrays = dict[str, np.ndarray[Any, Any]]


class Export(NamedTuple):
    """An encoder and how it is exported.

    Attributes:
        make: makes the encoder.
        dynamo: the exporter: that of torch.export, or that of TorchScript.
        time: the axis of frames of the first input.
        mask: whether the second input is a mask [B, frames], or lengths [B].
        width: of the first input.
    """

    make: Any
    dynamo: bool = False
    time: int = 1
    mask: bool = False
    width: int = FEATURES


class Outputs(nn.Module):
    """An encoder that returns a tensor alone, or several."""

    def __init__(self, encoder: Any, method: str | None = None) -> None:
        super().__init__()
        self.encoder, self.method = encoder, method

    def forward(self, features: Tensor, lengths: Tensor) -> Any:
        if self.method is not None:
            return getattr(self.encoder, self.method)(features, lengths)
        return self.encoder(features, attention_mask=lengths)[0]


class EspnetOutputs(Outputs):
    def forward(self, features: Tensor, lengths: Tensor) -> Any:
        return self.encoder(features, lengths)[:2]


class Streaming(nn.Module):
    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, *inputs: Tensor) -> Any:
        return self.encoder.forward_for_export(*inputs)


def lively(model: Any) -> Any:
    """Return a model with random weights whose output depends on its input and on its attention."""
    model = randomized(model)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
    return model


def hugging_face(name: str, attention: str) -> Any:
    return Outputs(lively(model_of(name, attn_implementation=attention)))


def nemo_model(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "feat_in": FEATURES,
        "n_layers": 2,
        "d_model": 32,
        "n_heads": 2,
        "ff_expansion_factor": 1,
        "conv_kernel_size": 5,
    }
    subsampling = {"subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": 8}
    return lively(bare_peers.nemo_encoder().ConformerEncoder(**sizes, **subsampling, **options))


def nemo(**options: Any) -> Any:
    encoder = nemo_model(**options)
    encoder.export_cache_support = False
    return Outputs(encoder, "forward_for_export")


def espnet(kind: str) -> Any:
    torch.manual_seed(0)
    types = {"pos_enc_layer_type": "rel_pos", "selfattention_layer_type": "rel_selfattn", "rel_pos_type": kind}
    sizes = {"output_size": 32, "attention_heads": 2, "linear_units": 32, "num_blocks": 2, "cnn_module_kernel": 5}
    return EspnetOutputs(lively(bare_peers.espnet_encoder().ConformerEncoder(FEATURES, **sizes, **types)))


P = functools.partial
LIMITED, CHUNKS = {"att_context_size": [7, 3]}, {"att_context_size": [8, 3], "att_context_style": "chunked_limited"}
EXPORTS = {
    "Parakeet": Export(P(hugging_face, "Parakeet", "sdpa"), mask=True),
    "Parakeet, eager": Export(P(hugging_face, "Parakeet", "eager"), mask=True),
    "Parakeet, dynamo": Export(P(hugging_face, "Parakeet", "eager"), dynamo=True, mask=True),
    "w2v-BERT": Export(P(hugging_face, "w2v-BERT relative", "sdpa"), mask=True, width=10),
    "w2v-BERT, eager": Export(P(hugging_face, "w2v-BERT relative", "eager"), mask=True, width=10),
    "w2v-BERT, dynamo": Export(P(hugging_face, "w2v-BERT relative", "eager"), dynamo=True, mask=True, width=10),
    "NeMo": Export(nemo, time=2),
    "NeMo, SDPA": Export(P(nemo, use_pytorch_sdpa=True), time=2),
    "NeMo, limited context": Export(P(nemo, **LIMITED), time=2),
    "NeMo, chunks": Export(P(nemo, **CHUNKS), time=2),
    "NeMo, dynamo": Export(P(nemo, **LIMITED), dynamo=True, time=2),
    "ESPnet": Export(P(espnet, "latest")),
    "ESPnet, dynamo": Export(P(espnet, "latest"), dynamo=True),
}  # fmt: skip
OTHERS = {
    "ESPnet, legacy": Export(P(espnet, "legacy")),
    "w2v-BERT, relative_key": Export(P(hugging_face, "w2v-BERT relative_key", "eager"), mask=True, width=10),
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context without what exporters print and warn of."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def inputs_of(export: Export, batch: int, frames: int) -> Arrays:
    """Return random features, and lengths or a mask; rows after the first are padded."""
    rng = np.random.default_rng(frames)
    shape = (batch, frames, export.width) if export.time == 1 else (batch, export.width, frames)
    lengths = frames - frames * np.arange(batch) // (batch + 1)
    mask = (np.arange(frames) < lengths[:, None]).astype(np.int64)
    return {"features": rng.standard_normal(shape, dtype=np.float32), "lengths": mask if export.mask else lengths}


@functools.cache
def _exported(name: str) -> bytes:
    export = (EXPORTS | OTHERS)[name]
    tensors = {key: torch.from_numpy(x) for key, x in inputs_of(export, 3, 200).items()}
    axes = {"features": {0: "batch", export.time: "frames"}}
    axes["lengths"] = {0: "batch", 1: "frames"} if export.mask else {0: "batch"}
    return to_onnx(export.make(), tensors, axes, export.dynamo)


def to_onnx(
    model: nn.Module, inputs: dict[str, Tensor], axes: dict[str, dict[int, str]], dynamo: bool = False
) -> bytes:
    """Return an exported model."""
    options: dict[str, Any] = {"dynamo": dynamo, "input_names": list(inputs), "verbose": False}
    with quiet():
        if dynamo:
            shapes = tuple(dict.fromkeys(axes[name], torch.export.Dim.DYNAMIC) for name in inputs)
            program = torch.onnx.export(model, tuple(inputs.values()), dynamic_shapes=shapes, **options)
            assert program is not None
            return bytes(program.model_proto.SerializeToString())
        file = io.BytesIO()
        torch.onnx.export(model, tuple(inputs.values()), file, dynamic_axes=axes, **options)
        return file.getvalue()


def exported(name: str) -> Any:
    """Return a model of its own of an export."""
    return onnx.load_from_string(_exported(name))


@functools.cache
def _streaming() -> bytes:
    encoder = nemo_model(**CHUNKS, causal_downsampling=True, conv_context_size="causal")
    encoder.export_cache_support = True
    encoder.setup_streaming_params()
    axes = {name: {0: "batch"} for name in streaming_inputs(1, 41)}
    axes["audio_signal"][2] = "frames"
    axes["cache_last_channel"][2] = axes["cache_last_time"][3] = "steps"  # as NeMo's exporter has it
    tensors = {name: torch.from_numpy(x) for name, x in streaming_inputs(2, 41).items()}
    return to_onnx(Streaming(encoder), tensors, axes)


def streaming() -> Any:
    """Return NeMo's cache-aware encoder, exported with its caches."""
    return onnx.load_from_string(_streaming())


def streaming_inputs(batch: int, frames: int) -> Arrays:
    rng = np.random.default_rng(frames)
    x, cache, last = (
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((batch, FEATURES, frames), (batch, 2, 8, 32), (batch, 2, 32, 4))
    )
    lengths, held = np.array([frames, frames - 9, frames - 20])[:batch], np.array([3, 8, 0])[:batch]
    return {"audio_signal": x, "length": lengths, "cache_last_channel": cache, "cache_last_time": last,
            "cache_last_channel_len": held}  # fmt: skip


def run(model: Any, inputs: Arrays) -> list[Any]:
    found: list[Any] = session_of(model).run(None, inputs)
    return found
