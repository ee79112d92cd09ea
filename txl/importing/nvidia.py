"""NVIDIA's checkpoints: a state_dict, its model's options and the vocabulary."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.importing import torch_files, vocabulary
from txl.importing.foreign import Foreign, Lengths, check_kind, ties, window
from txl.importing.names import check_plain
from txl.model.config import ModelConfig

FILES = ("checkpoint_best.pt", "checkpoint_last.pt")
CLASSES = ("argparse.Namespace", *vocabulary.CLASSES)
_SAME_NAMES = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "dropout", "mem_len", "div_val", "d_embed")
_RENAMED = {"out_layers_weights": "weight", "out_layers_biases": "bias"}  # crit.X.i is crit.out_layers.i.Y


def find(source: Path) -> Path | None:
    """The file at `source`, or the best in that folder; None if there is none by its looks."""
    paths = [source / name for name in FILES] if source.is_dir() else [source]
    return next((x for x in paths if torch_files.mentions(x, b"model_state", b"model_config")), None)


def read(path: Path, lengths: Lengths) -> Foreign:
    """Its memory begins empty; same_length is a window of mem_len + 1 keys.

    Raises:
        TxlError: it is damaged, of another kind, or a model that the paper does not describe.
    """
    held = torch_files.load(path, CLASSES)
    given, state = (held.get(x) if isinstance(held, dict) else None for x in ("model_config", "model_state"))
    if not isinstance(given, dict) or not isinstance(state, dict):
        raise TxlError(f"{path}: must hold model_config and model_state, got {type(held).__name__}")
    if not all(isinstance(name, str) and isinstance(x, Tensor) for name, x in state.items()):
        raise TxlError(f"{path}: model_state must hold tensors by name")
    try:
        config = _config(given, path)
        segment = given["tgt_len"]
    except (KeyError, TypeError, ValueError) as error:
        raise TxlError(f"{path}: model_config: {type(error).__name__}: {error}") from error
    tensors = _renamed(state, given, config, path)
    words = held.get("vocab")
    return Foreign(config, tensors, True, segment, (lambda: vocabulary.of(words, path)) if words is not None else None)


def _config(given: dict[str, Any], path: Path) -> ModelConfig:
    check_kind(given["attn_type"], given["sample_softmax"], given["ext_len"], str(path))
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
    """By the original's names."""
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
    if not config.tie_weight:  # projections are shared there without the tables, here not
        for bin_, tied in enumerate(given["tie_projs"]):
            first = state.get(f"word_emb.emb_projs.{0 if config.div_val == 1 else bin_}")
            if tied and first is not None:
                found[f"crit.out_projs.{bin_}"] = first
    return found
