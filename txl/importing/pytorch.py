"""Checkpoints of the original PyTorch code (model.pt, a pickled module) and of NVIDIA's code
derived from it (state_dict, model options and vocabulary)."""

from typing import Any

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.importing.names import Foreign, number, ties
from txl.importing.pickles import Inert
from txl.model.config import ModelConfig

MODEL = "MemTransformerLM"
_SAME_NAMES = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "dropout", "mem_len", "div_val", "d_embed")
_RENAMED = {"out_layers_weights": "weight", "out_layers_biases": "bias"}  # crit.X.i is crit.out_layers.i.Y
_LONGEST_NAME = 100


def read(model: Any) -> Foreign:
    """Read a checkpoint from the unpickled object. Its memory begins empty; same_length becomes a
    window of mem_len keys.

    Raises:
        TxlError, or others: it is of another kind, or not a model that the paper describes.
    """
    if not isinstance(model, Inert) or model.kind.rpartition(".")[2] != MODEL:
        raise TxlError(f"must hold a {MODEL}, got {getattr(model, 'kind', type(model).__name__)!r:.100}")
    tensors: dict[str, Tensor] = {}
    _collect(model, "", tensors, set())
    return Foreign(_config(model, tensors), _in_order(tensors), model.state["tgt_len"], None)


def _check_kind(attn_type: int, sample_softmax: int, ext_len: int) -> None:
    """Raise TxlError for options of the released code that select a model that is not supported."""
    if attn_type != 0 or sample_softmax > 0 or ext_len != 0:
        got = ", ".join(str(number(x)) for x in (attn_type, sample_softmax, ext_len))
        raise TxlError(f"only attn_type 0, no sample_softmax and ext_len 0 are imported, got {got}")


def _model_config(**fields: Any) -> ModelConfig:
    """Make the configuration, whose own checks print what they refuse."""
    for name, x in fields.items():
        for value in x if type(x) is tuple else (x,):
            if value is not None and type(value) not in (bool, int, float, str):
                raise TxlError(f"{name} must be a number, got {type(value).__name__}")
    return ModelConfig(**fields)


def _collect(module: Any, prefix: str, found: dict[str, Tensor], seen: set[int]) -> None:
    """Collect parameters and buffers by their full names, which are cut where they are far longer
    than any of the model; raise if a module occurs twice."""
    if id(module) in seen or len(prefix) > _LONGEST_NAME:
        raise ValueError("modules without end")
    seen.add(id(module))
    for name, x in [*module.state["_parameters"].items(), *module.state["_buffers"].items()]:
        if isinstance(x, Tensor):
            found[f"{prefix}{name:.{_LONGEST_NAME}}"] = x
    for name, child in module.state["_modules"].items():
        if child is not None:
            _collect(child, f"{prefix}{name:.{_LONGEST_NAME}}.", found, seen)


def _in_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the clusters in the order of the bins; both codes store them in
    reverse."""
    for name in tensors.keys() & {"crit.cluster_weight", "crit.cluster_bias"}:
        tensors[name] = tensors[name].flip(0)
    return tensors


def _config(model: Inert, tensors: dict[str, Tensor]) -> ModelConfig:
    m = model.state
    _check_kind(m["attn_type"], m.get("sample_softmax", -1), m["ext_len"])
    word_emb, layer = m["_modules"]["word_emb"].state, m["_modules"]["layers"].state["_modules"]["0"].state["_modules"]
    attention, feed_forward = layer["dec_attn"].state, layer["pos_ff"].state
    tables = len(word_emb["_modules"]["emb_layers"].state["_modules"])
    tie_weight = all(
        _same(tensors, f"crit.out_layers.{i}.weight", f"word_emb.emb_layers.{i}.weight") for i in range(tables)
    )
    bins = range(len(word_emb["cutoffs"]))
    one = word_emb["div_val"] == 1
    tied = [_same(tensors, f"crit.out_projs.{i}", f"word_emb.emb_projs.{0 if one else i}") for i in bins]
    return _model_config(
        vocab_size=m["n_token"],
        n_layer=m["n_layer"],
        d_model=m["d_model"],
        n_head=m["n_head"],
        d_head=m["d_head"],
        d_inner=feed_forward["d_inner"],
        dropout=attention["dropout"],
        attn_dropout=attention["_modules"]["dropatt"].state["p"],
        mem_len=m["mem_len"],
        window=m["mem_len"] if m["same_length"] else None,
        clamp_len=m["clamp_len"] if m["clamp_len"] > 0 else None,
        pre_norm=bool(attention["pre_lnorm"]),
        norm_eps=attention["_modules"]["layer_norm"].state["eps"],
        cutoffs=tuple(word_emb["cutoffs"][:-1]),
        div_val=word_emb["div_val"],
        d_embed=word_emb["d_embed"],
        tie_weight=tie_weight,
        tie_projs=ties(tied) if tie_weight else "none",
    )


def _same(tensors: dict[str, Tensor], a: str, b: str) -> bool:
    """Whether two names are the same parameter."""
    return a in tensors and b in tensors and tensors[a].data_ptr() == tensors[b].data_ptr()


def read_nvidia(held: dict[str, Any]) -> Foreign:
    """Read a checkpoint of NVIDIA's code from the unpickled dictionary. Its memory begins empty;
    same_length becomes a window of mem_len + 1 keys.

    Raises:
        TxlError, or others: it is of another kind, or not a model that the paper describes.
    """
    given, state = held.get("model_config"), held.get("model_state")
    if not isinstance(given, dict) or not isinstance(state, dict):
        raise TxlError("must hold model_config and model_state")
    if not all(isinstance(name, str) and isinstance(x, Tensor) for name, x in state.items()):
        raise TxlError("model_state must hold tensors by name")
    config = _nvidia_config(given)
    return Foreign(config, _in_order(_renamed(state, given, config)), given["tgt_len"], held.get("vocab"))


def _nvidia_config(given: dict[str, Any]) -> ModelConfig:
    _check_kind(given["attn_type"], given["sample_softmax"], given["ext_len"])
    tied = [bool(x) for x in given["tie_projs"]]
    tied += [False] * (len(given["cutoffs"]) + 1 - len(tied))
    return _model_config(
        **{name: given[name] for name in _SAME_NAMES},
        vocab_size=given["n_token"],
        attn_dropout=given["dropatt"],
        window=given["mem_len"] + 1 if given["same_length"] else None,
        clamp_len=given["clamp_len"] if given["clamp_len"] > 0 else None,
        pre_norm=bool(given["pre_lnorm"]),
        cutoffs=tuple(given["cutoffs"]),
        tie_weight=bool(given["tie_weight"]),
        tie_projs=ties(tied) if given["tie_weight"] else "none",
    )


def _renamed(state: dict[str, Tensor], given: dict[str, Any], config: ModelConfig) -> dict[str, Tensor]:
    """Rename tensors to the original code's names."""
    found: dict[str, Tensor] = {}
    bins = [str(i) for i in range(len(config.cutoffs) + 1)]
    for name, x in state.items():
        kind, _, i = name.removeprefix("crit.").rpartition(".")
        if name.startswith("crit.shared_out_projs.") and i in bins:
            first = state.get(f"word_emb.emb_projs.{i}")
            if first is None or first.shape != x.shape or not torch.equal(x, first):
                raise TxlError(f"{name} should repeat word_emb.emb_projs.{i} and differs from it")
            continue
        if name.startswith("crit.") and kind in _RENAMED:
            name = f"crit.out_layers.{i}.{_RENAMED[kind]}"
        if name in found:
            raise TxlError(f"{name!r:.100} is there under two names")
        found[name] = x
    if not config.tie_weight:  # NVIDIA's code shares projections even if tables are not shared; txl does not
        for bin_, tied in enumerate(given["tie_projs"]):
            first = state.get(f"word_emb.emb_projs.{0 if config.div_val == 1 else bin_}")
            if tied and first is not None:
                found[f"crit.out_projs.{bin_}"] = first
    return found
