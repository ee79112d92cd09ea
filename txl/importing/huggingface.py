"""Hugging Face's TransfoXL: a folder with config.json and weights, as transformers up to 4.x saved
it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl.errors import TxlError
from txl.model.config import ModelConfig

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
VOCABULARIES = ("vocab.pkl", "vocab.bin", "vocab.txt")
SEGMENT = 128  # of training; the configuration does not say
_SAME_NAMES = (
    "vocab_size",
    "n_layer",
    "d_model",
    "n_head",
    "d_head",
    "d_inner",
    "dropout",
    "mem_len",
    "div_val",
    "untie_r",
)


def is_one(source: Path) -> bool:
    """Whether a folder is one by its looks."""
    return (source / "config.json").is_file()


def config(source: Path) -> ModelConfig:
    """The model's configuration.

    Its memory begins with zeros, as its code has it, and same_length is a window of mem_len keys.

    Raises:
        TxlError: config.json is missing, damaged, of another model, or asks for what the paper's
            model is not.
    """
    path = source / "config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TxlError(f"{path}: cannot be read: {error}") from error
    if not isinstance(given, dict) or given.get("model_type") != "transfo-xl":
        kind = given.get("model_type") if isinstance(given, dict) else type(given).__name__
        raise TxlError(f"{path}: model_type must be 'transfo-xl', got {kind!r}")
    if given.get("attn_type", 0) != 0:
        raise TxlError(f"{path}: attn_type {given['attn_type']!r} is none that Hugging Face's code ever computed")
    try:
        return _translated(given, path)
    except (KeyError, TypeError, ValueError) as error:
        raise TxlError(f"{path}: {type(error).__name__}: {error}") from error


def _translated(given: dict[str, Any], path: Path) -> ModelConfig:
    fields = {name: given[name] for name in _SAME_NAMES}
    cutoffs = tuple(given.get("cutoffs", ()))
    tied = given.get("tie_projs")
    if tied is None:
        tied = [False] + [bool(given.get("proj_share_all_but_first", True))] * len(cutoffs)
    kinds = {"none": [False] * len(tied), "all": [True] * len(tied), "tail": [False] + [True] * (len(tied) - 1)}
    kind = next((name for name, values in kinds.items() if values == tied), None)
    if kind is None:
        raise TxlError(f"{path}: tie_projs must be none, all, or all but the first, got {tied}")
    tie_weight = bool(given.get("tie_word_embeddings", True))
    window = None
    if given.get("same_length"):
        if not given["mem_len"]:
            raise TxlError(f"{path}: same_length needs a memory, got mem_len 0")
        window = given["mem_len"]
    clamp_len = given.get("clamp_len", -1)
    return ModelConfig(
        **fields,
        attn_dropout=given.get("dropatt", 0.0),
        window=window,
        clamp_len=clamp_len if clamp_len > 0 else None,
        pre_norm=bool(given.get("pre_lnorm", False)),
        norm_eps=given.get("layer_norm_epsilon", 1e-5),
        initial_memory="zeros",
        cutoffs=cutoffs,
        d_embed=given.get("d_embed", given["d_model"]),
        tie_weight=tie_weight,
        tie_projs=kind if tie_weight else "none",  # type: ignore[arg-type]
    )


def tensors(source: Path) -> dict[str, Tensor]:
    """Its tensors by the names of the original code.

    Raises:
        TxlError: there are none, or the file is damaged or holds more than tensors.
    """
    path = next((source / name for name in WEIGHTS if (source / name).is_file()), None)
    if path is None:
        raise TxlError(f"{source}: holds no weights ({' or '.join(WEIGHTS)})")
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError) as error:
        raise TxlError(f"{path}: cannot be read: {error}") from error
    except Exception as error:  # what a damaged pickle raises is anything
        raise TxlError(f"{path}: not a whole file of tensors and nothing else ({type(error).__name__})") from error
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise TxlError(f"{path}: must hold tensors by name, got {type(found).__name__}")
    return {str(name).removeprefix("transformer."): x for name, x in found.items()}


def vocabulary_file(source: Path) -> Path | None:
    """Of its tokenizer."""
    return next((source / name for name in VOCABULARIES if (source / name).is_file()), None)
