"""Checkpoints of the original PyTorch code (model.pt, a pickled module) and of NVIDIA's code
derived from it (state_dict, model options and vocabulary)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.importing import pickles, vocabulary
from txl.importing.names import Foreign, Lengths, check_plain, ties, window
from txl.importing.pickles import Inert
from txl.model.config import ModelConfig

FILE = "model.pt"
MODEL = "MemTransformerLM"
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
    *_ITS_MODULES,
    "ProjectedAdaptiveLogSoftmax",
    "LogUniformSampler",
    *(f"torch.nn.modules.{name}" for name in _TORCHS),
    "torch.nn.backends.thnn._get_thnn_function_backend",
)
NVIDIA_FILES = ("checkpoint_best.pt", "checkpoint_last.pt")
NVIDIA_CLASSES = ("argparse.Namespace", *vocabulary.CLASSES)
_SAME_NAMES = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "dropout", "mem_len", "div_val", "d_embed")
_RENAMED = {"out_layers_weights": "weight", "out_layers_biases": "bias"}  # crit.X.i is crit.out_layers.i.Y
_MOST_MODULES, _DEEPEST, _LONGEST_NAME = 100_000, 12, 100


def find(source: Path) -> Path | None:
    """Return the file at `source` or in that folder; None if it does not look like such a
    checkpoint."""
    path = source / FILE if source.is_dir() else source
    return path if pickles.mentions(path, MODEL.encode()) else None


def read(path: Path, lengths: Lengths) -> Foreign:
    """Read a checkpoint. Its memory begins empty; same_length becomes a window of mem_len keys.

    Raises:
        TxlError: it is damaged, of another kind, or not a model that the paper describes.
    """
    model = pickles.load(path, CLASSES)
    if not isinstance(model, Inert) or model.kind.rpartition(".")[2] != MODEL:
        raise TxlError(f"{path}: must hold a {MODEL}, got {getattr(model, 'kind', type(model).__name__)}")
    try:
        tensors: dict[str, Tensor] = {}
        _collect(model, "", tensors)
        return Foreign(_config(model, tensors, path), tensors, True, model.state["tgt_len"], vocabulary.beside(path))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise TxlError(f"{path}: not the module of the released code: {type(error).__name__}: {error}") from error


def _check_kind(attn_type: int, sample_softmax: int, ext_len: int, what: str) -> None:
    """Raise TxlError for options of the released code that select a model that is not supported."""
    if attn_type != 0 or sample_softmax > 0 or ext_len != 0:
        raise TxlError(
            f"{what}: only attn_type 0, no sample_softmax and ext_len 0 are imported, got {attn_type}, {sample_softmax}, "
            f"{ext_len}"
        )


def _collect(module: Any, prefix: str, found: dict[str, Tensor], seen: set[int] | None = None) -> None:
    """Collect parameters and buffers by their full names; raise if a module occurs twice."""
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
    _check_kind(m["attn_type"], m.get("sample_softmax", -1), m["ext_len"], str(path))
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
    """Whether two names are the same parameter."""
    return a in tensors and b in tensors and tensors[a].data_ptr() == tensors[b].data_ptr()


def find_nvidia(source: Path) -> Path | None:
    """As `find`, for NVIDIA's checkpoints; in a folder the best one is returned."""
    paths = [source / name for name in NVIDIA_FILES] if source.is_dir() else [source]
    return next((x for x in paths if pickles.mentions(x, b"model_state", b"model_config")), None)


def read_nvidia(path: Path, lengths: Lengths) -> Foreign:
    """Read a checkpoint of NVIDIA's code. Its memory begins empty; same_length becomes a window of
    mem_len + 1 keys.

    Raises:
        TxlError: it is damaged, of another kind, or not a model that the paper describes.
    """
    held = pickles.load(path, NVIDIA_CLASSES)
    given, state = (held.get(x) if isinstance(held, dict) else None for x in ("model_config", "model_state"))
    if not isinstance(given, dict) or not isinstance(state, dict):
        raise TxlError(f"{path}: must hold model_config and model_state, got {type(held).__name__}")
    if not all(isinstance(name, str) and isinstance(x, Tensor) for name, x in state.items()):
        raise TxlError(f"{path}: model_state must hold tensors by name")
    try:
        config = _nvidia_config(given, path)
        segment = given["tgt_len"]
    except (KeyError, TypeError, ValueError) as error:
        raise TxlError(f"{path}: model_config: {type(error).__name__}: {error}") from error
    tensors = _renamed(state, given, config, path)
    words = held.get("vocab")
    return Foreign(config, tensors, True, segment, (lambda: vocabulary.of(words, path)) if words is not None else None)


def _nvidia_config(given: dict[str, Any], path: Path) -> ModelConfig:
    _check_kind(given["attn_type"], given["sample_softmax"], given["ext_len"], str(path))
    tied = [bool(x) for x in given["tie_projs"]]
    tied += [False] * (len(given["cutoffs"]) + 1 - len(tied))
    return ModelConfig(
        **{name: given[name] for name in _SAME_NAMES},
        vocab_size=given["n_token"],
        attn_dropout=given["dropatt"],
        window=window(given["same_length"], given["mem_len"] + 1, str(path)),
        clamp_len=given["clamp_len"] if given["clamp_len"] > 0 else None,
        pre_norm=bool(given["pre_lnorm"]),
        cutoffs=tuple(given["cutoffs"]),
        tie_weight=bool(given["tie_weight"]),
        tie_projs=ties(tied, str(path)) if given["tie_weight"] else "none",
    )


def _renamed(state: dict[str, Tensor], given: dict[str, Any], config: ModelConfig, path: Path) -> dict[str, Tensor]:
    """Rename tensors to the original code's names."""
    found: dict[str, Tensor] = {}
    for name, x in state.items():
        check_plain(x, f"{path}: {name!r}")
        kind, _, i = name.removeprefix("crit.").rpartition(".")
        if name.startswith("crit.shared_out_projs."):
            first = state.get(f"word_emb.emb_projs.{i}")
            if first is None or first.shape != x.shape or not torch.equal(x, first):
                raise TxlError(f"{path}: {name} should repeat word_emb.emb_projs.{i} and differs from it")
            continue
        if name.startswith("crit.") and kind in _RENAMED:
            name = f"crit.out_layers.{i}.{_RENAMED[kind]}"
        if name in found:
            raise TxlError(f"{path}: {name} is there under two names")
        found[name] = x
    if not config.tie_weight:  # NVIDIA's code shares projections even if tables are not shared; txl does not
        for bin_, tied in enumerate(given["tie_projs"]):
            first = state.get(f"word_emb.emb_projs.{0 if config.div_val == 1 else bin_}")
            if tied and first is not None:
                found[f"crit.out_projs.{bin_}"] = first
    return found
