"""Hugging Face's TransfoXL: a folder with config.json and weights, as transformers up to 4.x saved
it."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl.errors import TxlError
from txl.importing import torch_files, vocabulary
from txl.importing.foreign import Foreign, Lengths, ties, window
from txl.model.config import ModelConfig

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
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


def find(source: Path) -> Path | None:
    """The folder, or None if it is none by its looks."""
    return source if (source / "config.json").is_file() else None


def read(source: Path, lengths: Lengths) -> Foreign:
    """A folder's configuration and tensors; raises as `config` and `tensors` do."""
    return Foreign(config(source), tensors(source), False, SEGMENT, vocabulary.beside(source))


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
    tie_projs = ties([bool(x) for x in tied], str(path))
    tie_weight = bool(given.get("tie_word_embeddings", True))
    clamp_len = given.get("clamp_len", -1)
    return ModelConfig(
        **fields,
        attn_dropout=given.get("dropatt", 0.0),
        window=window(given.get("same_length"), given["mem_len"], str(path)),
        clamp_len=clamp_len if clamp_len > 0 else None,
        pre_norm=bool(given.get("pre_lnorm", False)),
        norm_eps=given.get("layer_norm_epsilon", 1e-5),
        initial_memory="zeros",
        cutoffs=cutoffs,
        d_embed=given.get("d_embed", given["d_model"]),
        tie_weight=tie_weight,
        tie_projs=tie_projs if tie_weight else "none",
    )


def tensors(source: Path) -> dict[str, Tensor]:
    """Its tensors by the names of the original code.

    Raises:
        TxlError: there are none, or the file is damaged or holds more than tensors.
    """
    path = next((source / name for name in WEIGHTS if (source / name).is_file()), None)
    if path is None:
        raise TxlError(f"{source}: holds no weights ({' or '.join(WEIGHTS)})")
    if path.suffix == ".safetensors":
        try:
            found: Any = load_file(path)
        except (SafetensorError, OSError) as error:
            raise TxlError(f"{path}: cannot be read: {error}") from error
    else:
        found = torch_files.load(path)
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise TxlError(f"{path}: must hold tensors by name, got {type(found).__name__}")
    return {str(name).removeprefix("transformer."): x for name, x in found.items()}
