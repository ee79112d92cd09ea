"""Attention modules of heavy packages, each loaded without its package: the packages above it are
replaced by empty ones, and what it needs of others by stubs.

`make peers` puts the packages into one folder, which the environment variable PEERS names.
"""

import contextlib
import functools
import importlib
import logging
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER = Path(os.environ.get("PEERS", "")).resolve()
AVAILABLE = "PEERS" in os.environ


def use() -> None:
    """Put the folder's packages before all others on sys.path."""
    if not AVAILABLE or str(FOLDER) in sys.path:
        return
    if not (FOLDER / "transformers").is_dir():
        raise FileNotFoundError(f"PEERS names {FOLDER}, where there is no transformers: run `make peers`")
    sys.path.insert(0, str(FOLDER))


def _module(name: str, **attributes: Any) -> Any:
    """Make an empty module or package, unless it exists."""
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__path__ = [str(FOLDER / name.replace(".", "/"))]
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], leaf, module)
    for key, value in attributes.items():
        setattr(sys.modules[name], key, value)
    return sys.modules[name]


def _alone(dotted: str) -> Any:
    """Load a module without running the code of its parent packages."""
    parts = dotted.split(".")
    for n in range(1, len(parts)):
        _module(".".join(parts[:n]))
    return importlib.import_module(dotted)


cosyvoice = functools.partial(_alone, "cosyvoice.transformer.attention")
chatterbox = functools.partial(_alone, "chatterbox.models.s3gen.transformer.attention")
indextts = functools.partial(_alone, "indextts.gpt.conformer.attention")
fireredasr = functools.partial(_alone, "fireredasr.models.module.conformer_encoder")
espnet = functools.partial(_alone, "espnet.nets.pytorch_backend.transformer.attention")
espnet_transducer = functools.partial(_alone, "espnet2.asr_transducer.encoder.modules.attention")
funasr = functools.partial(_alone, "funasr.models.transformer.attention")
zipenhancer = functools.partial(_alone, "zipenhancer.models.layers.zipformer")
modelscope = functools.partial(_alone, "modelscope.models.audio.ans.zipenhancer_layers.zipformer")


def transformers(model: str) -> Any:
    """Load modeling_<model> of transformers, whose imports are limited to what is used."""
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def nemo() -> Any:
    _module("nemo")
    _module("nemo.utils", avoid_float16_autocast_context=contextlib.nullcontext)
    return _alone("nemo.collections.asr.parts.submodules.multi_head_attention")


def nemo_transformer() -> Any:
    nemo()
    _module("nemo.core")
    _module("nemo.core.classes")
    _module("nemo.core.classes.module", freeze=None, unfreeze=None)
    _module("nemo.utils.decorators", experimental=lambda c: c)
    _module(
        "nemo.collections.asr.parts.submodules.subsampling", FeatureStacking=nn.Module, StackingSubsampling=nn.Module
    )
    return _alone("nemo.collections.asr.modules.transformer_encoder")


class _TypeCheck:
    """The decorator typecheck of NeMo, which checks nothing here."""

    def __call__(self, function: Any) -> Any:
        return function


class _Adapters:
    """The part of NeMo's mixin of adapters that its layers call."""

    def is_adapter_available(self) -> bool:
        return False


class _Access:
    """The part of NeMo's AccessMixin that its encoder calls."""

    def is_access_enabled(self, *_: Any) -> bool:
        return False


def _real(dotted: str, *parents: str) -> Any:
    """Load a module alone; those of `parents` that were replaced by stubs are loaded, too."""
    for name in parents:
        if getattr(sys.modules.get(name), "__file__", None) is None:
            sys.modules.pop(name, None)
    return _alone(dotted)


def nemo_encoder() -> Any:
    """Load the module of NeMo's ConformerEncoder."""
    nemo()
    parts = "nemo.collections.asr.parts"
    _module("nemo.utils", logging=logging.getLogger("nemo"))
    for name in ("nemo.core", "nemo.core.classes", "nemo.collections.common.parts", f"{parts}.submodules.adapters"):
        for n in range(1, name.count(".") + 2):
            _module(".".join(name.split(".")[:n]))
    for name in ("nemo.collections.asr.models", f"{parts}.mixins", f"{parts}.utils", f"{parts}.utils.adapter_utils"):
        _module(name)
    _module("nemo.collections.asr.models.configs", CacheAwareStreamingConfig=functools.partial(
        types.SimpleNamespace, chunk_size=0, shift_size=0, cache_drop_size=0, last_channel_cache_size=0, valid_out_len=0,
        pre_encode_cache_size=0, drop_extra_pre_encoded=0, last_channel_num=0, last_time_num=0,
    ))  # fmt: skip
    _module(f"{parts}.mixins.streaming", StreamingEncoder=type("StreamingEncoder", (), {}))
    _module("nemo.core.classes.common", typecheck=_TypeCheck)
    _module("nemo.core.classes.exportable", Exportable=type("Exportable", (), {}))
    adapters = types.SimpleNamespace(AdapterModuleMixin=_Adapters, get_registered_adapter=lambda kind: kind)
    _module("nemo.core.classes.mixins", AccessMixin=_Access, adapter_mixins=adapters)
    _module("nemo.core.classes.module", NeuralModule=nn.Module)
    types_of_values = [
        "AcousticEncodedRepresentation",
        "BoolType",
        "ChannelType",
        "LengthsType",
        "NeuralType",
        "SpectrogramType",
    ]
    _module("nemo.core.neural_types", **dict.fromkeys(types_of_values, object))
    mixin = type("AttentionAdapterModuleMixin", (_Adapters,), {})
    _module(f"{parts}.submodules.adapters.attention_adapter_mixin", AttentionAdapterModuleMixin=mixin)
    _module("nemo.collections.common.parts.utils", activation_registry={"swish": nn.SiLU})
    with _stub("omegaconf", DictConfig=dict, ListConfig=list, open_dict=None):
        return _real("nemo.collections.asr.modules.conformer_encoder", f"{parts}.submodules.subsampling")


def espnet_encoder() -> Any:
    """Load the module of ESPnet's ConformerEncoder."""
    for name in ("espnet2", "espnet2.asr", "espnet2.asr.frontend"):
        _module(name)
    _module("espnet2.asr.ctc", CTC=nn.Module)
    _module("espnet2.asr.frontend.cnn", dim_1_layer_norm=None)
    with _stub("typeguard", typechecked=lambda function: function):
        utilities = "espnet.nets.pytorch_backend.nets_utils"
        return _real("espnet2.asr.encoder.conformer_encoder", utilities, "espnet2.asr.encoder.abs_encoder")


@contextlib.contextmanager
def _stub(name: str, **attributes: Any) -> Iterator[None]:
    """A context in which an empty module replaces one, installed or not."""
    before = sys.modules.pop(name, None)
    _module(name, **attributes)
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def enformer() -> Any:
    _module("enformer_pytorch")
    _module("enformer_pytorch.data", str_to_one_hot=None, seq_indices_to_one_hot=None)
    return _alone("enformer_pytorch.modeling_enformer")


def _beats(dotted: str) -> Any:
    """Load a module that imports torchaudio, which its attention does not use. The empty torchaudio
    is removed again, because importlib.util.find_spec raises ValueError for a module without a
    specification; transformers asks for it when it is imported."""
    importlib.import_module("transformers")
    names = ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")
    added = [name for name in names if name not in sys.modules]
    for name in names:
        _module(name)
    try:
        return _alone(dotted)
    finally:
        for name in added:
            del sys.modules[name]


def espnet_beats() -> Any:
    for name in ("espnet2", "espnet2.asr"):
        _module(name)
    for name, leaf in (("encoder.abs_encoder", "AbsEncoder"), ("specaug.specaug", "SpecAug")):
        _module(f"espnet2.asr.{name.partition('.')[0]}")
        _module(f"espnet2.asr.{name}", **{leaf: nn.Module})
    for name in ("espnet", "espnet.nets", "espnet.nets.pytorch_backend"):
        _module(name)
    _module("espnet.nets.pytorch_backend.nets_utils", make_pad_mask=None, roll_tensor=None)
    return _beats("espnet2.asr.encoder.beats_encoder")


def speechbrain() -> Any:
    for name in ("speechbrain", "speechbrain.dataio", "speechbrain.utils", "speechbrain.nnet"):
        _module(name)
    _module("speechbrain.dataio.dataio", length_to_mask=None)
    _module("speechbrain.utils.logger", get_logger=logging.getLogger)
    return _alone("speechbrain.nnet.attention")


def speechbrain_beats() -> Any:
    speechbrain()
    return _beats("speechbrain.lobes.models.beats")


def ding() -> Any:
    _module("ding")
    _module("ding.compatibility", torch_ge_131=lambda: True)
    return _alone("ding.torch_utils.network.gtrxl")


def zipformer() -> Any:
    for name in ("zipformer", "zipformer.modules"):
        _module(name)
    _module("zipformer.utils", torch_autocast=functools.partial(torch.autocast, "cuda"))
    return _alone("zipformer.modules.zipformer")


def x_transformers() -> Any:
    return importlib.import_module("x_transformers")


def beside(module: Any, name: str) -> Any:
    """Load another module of a loaded module's package."""
    return importlib.import_module(f"{module.__package__}.{name}")


def original(peer: Any) -> Any:
    """Return the original class of a peer in txl_kernels.integrations, from its module loaded
    alone."""
    for load in LOADERS.get(peer.distribution, ()):
        load()
    return peer.original()


class SlimFC(nn.Module):
    """The part of RLlib's SlimFC that its attention uses."""

    def __init__(self, in_size: int, out_size: int, use_bias: bool = True, activation_fn: Any = None, **_: Any) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(in_size, out_size, bias=use_bias)]
        self._model = nn.Sequential(*layers, *([] if activation_fn is None else [activation_fn()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._model(x)


def _sequence_mask(
    lengths: torch.Tensor, maxlen: int | None = None, dtype: Any = None, time_major: bool = False
) -> Any:
    positions = torch.arange(int(lengths.max()) if maxlen is None else maxlen)
    return (positions < lengths.unsqueeze(1)).to(dtype or torch.bool)


def rllib() -> Any:
    for name in ("ray", "ray.rllib", "ray.rllib.models", "ray.rllib.models.torch", "ray.rllib.utils"):
        _module(name)
    _module("ray.rllib.models.torch.misc", SlimFC=SlimFC)
    _module("ray.rllib.utils.annotations", OldAPIStack=lambda c: c)
    _module("ray.rllib.utils.framework", try_import_torch=lambda: (torch, nn))
    _module("ray.rllib.utils.torch_utils", sequence_mask=_sequence_mask)
    _module("ray.rllib.utils.typing", TensorType=torch.Tensor)
    return _alone("ray.rllib.models.torch.modules.relative_multi_head_attention")


LOADERS: dict[str, tuple[Any, ...]] = {
    "nemo-toolkit": (nemo, nemo_transformer),
    "espnet": (espnet, espnet_transducer, espnet_beats),
    "funasr": (funasr,),
    "cosyvoice2-eu": (cosyvoice,),
    "indextts2-inference": (indextts,),
    "fireredasr": (fireredasr,),
    "speechbrain": (speechbrain, speechbrain_beats),
    "enformer-pytorch": (enformer,),
    "DI-engine": (ding,),
    "ray": (rllib,),
    "zipformer": (zipformer,),
    "zipenhancer": (zipenhancer,),
    "modelscope": (modelscope,),
}
