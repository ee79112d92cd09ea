"""The original PyTorch code's model.pt: its module, pickled whole."""

from pathlib import Path
from typing import Any

from torch import Tensor

from txl.errors import TxlError
from txl.importing import torch_files, vocabulary
from txl.importing.foreign import Foreign, Lengths, check_kind, ties, window
from txl.importing.inert import Inert
from txl.model.config import ModelConfig

FILE = "model.pt"
MODEL = "mem_transformer.MemTransformerLM"
_ITS_MODULES = (
    "MemTransformerLM", "RelPartialLearnableDecoderLayer", "RelPartialLearnableMultiHeadAttn", "RelLearnableDecoderLayer",
    "RelLearnableMultiHeadAttn", "DecoderLayer", "MultiHeadAttn", "PositionwiseFF", "PositionalEmbedding",
    "AdaptiveEmbedding",
)  # fmt: skip
_TORCHS = (
    "container.ModuleList", "container.ParameterList", "container.Sequential", "linear.Linear", "sparse.Embedding",
    "normalization.LayerNorm", "dropout.Dropout", "activation.ReLU", "activation.Threshold",
)  # fmt: skip
CLASSES = (
    *(f"mem_transformer.{name}" for name in _ITS_MODULES),
    *(f"{package}proj_adaptive_softmax.ProjectedAdaptiveLogSoftmax" for package in ("", "utils.")),
    *(f"{package}log_uniform_sampler.LogUniformSampler" for package in ("", "utils.")),
    *(f"torch.nn.modules.{name}" for name in _TORCHS),
    "torch.nn.backends.thnn._get_thnn_function_backend",
)
_MOST_MODULES, _DEEPEST, _LONGEST_NAME = 100_000, 12, 100


def find(source: Path) -> Path | None:
    """The file at `source`, or in that folder; None if there is none by its looks."""
    path = source / FILE if source.is_dir() else source
    return path if torch_files.mentions(path, b"MemTransformerLM") else None


def read(path: Path, lengths: Lengths) -> Foreign:
    """Its memory begins empty; same_length is a window of mem_len keys.

    Raises:
        TxlError: it is damaged, of another kind, or a model that the paper does not describe.
    """
    model = torch_files.load(path, CLASSES)
    if not isinstance(model, Inert) or model.kind != MODEL:
        raise TxlError(f"{path}: must hold a {MODEL}, got {getattr(model, 'kind', type(model).__name__)}")
    try:
        tensors: dict[str, Tensor] = {}
        _collect(model, "", tensors)
        return Foreign(_config(model, tensors, path), tensors, True, model.state["tgt_len"], vocabulary.beside(path))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise TxlError(f"{path}: not the module of the released code: {type(error).__name__}: {error}") from error


def _collect(module: Any, prefix: str, found: dict[str, Tensor], seen: set[int] | None = None) -> None:
    """Parameters and buffers by their full names; no module is in two places."""
    seen = set() if seen is None else seen
    if id(module) in seen or len(seen) > _MOST_MODULES or prefix.count(".") > _DEEPEST:
        raise ValueError("modules without end")
    seen.add(id(module))
    state = module.state
    for name, x in [*state["_parameters"].items(), *state["_buffers"].items()]:
        if isinstance(x, Tensor):
            found[_longer(prefix, name)] = x
    for name, child in state["_modules"].items():
        if child is not None:
            _collect(child, f"{_longer(prefix, name)}.", found, seen)


def _longer(prefix: str, name: object) -> str:
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise ValueError("a name that is none")
    return prefix + name


def _config(model: Inert, tensors: dict[str, Tensor], path: Path) -> ModelConfig:
    m = model.state
    check_kind(m["attn_type"], m.get("sample_softmax", -1), m["ext_len"], str(path))
    word_emb, layer = m["_modules"]["word_emb"].state, m["_modules"]["layers"].state["_modules"]["0"].state["_modules"]
    attention, feed_forward = layer["dec_attn"].state, layer["pos_ff"].state
    tables = len(word_emb["_modules"]["emb_layers"].state["_modules"])
    tie_weight = all(
        _same(tensors, f"crit.out_layers.{i}.weight", f"word_emb.emb_layers.{i}.weight") for i in range(tables)
    )
    bins = range(len(word_emb["cutoffs"]))
    one = word_emb["div_val"] == 1
    tied = [_same(tensors, f"crit.out_projs.{i}", f"word_emb.emb_projs.{0 if one else i}") for i in bins]
    return ModelConfig(
        vocab_size=m["n_token"],
        n_layer=m["n_layer"],
        d_model=m["d_model"],
        n_head=m["n_head"],
        d_head=m["d_head"],
        d_inner=feed_forward["d_inner"],
        dropout=attention["dropout"],
        attn_dropout=attention["_modules"]["dropatt"].state["p"],
        mem_len=m["mem_len"],
        window=window(m["same_length"], m["mem_len"], str(path)),
        clamp_len=m["clamp_len"] if m["clamp_len"] > 0 else None,
        pre_norm=bool(attention["pre_lnorm"]),
        norm_eps=attention["_modules"]["layer_norm"].state["eps"],
        cutoffs=tuple(word_emb["cutoffs"][:-1]),
        div_val=word_emb["div_val"],
        d_embed=word_emb["d_embed"],
        tie_weight=tie_weight,
        tie_projs=ties(tied, str(path)) if tie_weight else "none",
    )


def _same(tensors: dict[str, Tensor], a: str, b: str) -> bool:
    """Whether two names are of one parameter."""
    return a in tensors and b in tensors and tensors[a].data_ptr() == tensors[b].data_ptr()
