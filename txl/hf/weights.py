"""Weights as Hugging Face's TransfoXL always named them, to and from these models' own names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from txl.errors import TxlError
from txl.importing import huggingface
from txl.importing.names import original, translate
from txl.model.config import ModelConfig

OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")


def file_of(name: str, file: str, options: Mapping[str, Any]) -> Path | None:
    """A file of a folder, or of a name on the Hub, downloaded first; None if it is not there."""
    if Path(name).is_dir():
        path = Path(name, options.get("subfolder") or "", file)
        return path if path.is_file() else None
    hub = {key: value for key, value in options.items() if key in OF_THE_HUB}
    found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **hub)
    return None if found is None else Path(found)


def folder_of(name: str, options: Mapping[str, Any], files: Sequence[str]) -> Path:
    """The folder of a checkpoint, with its config.json and the first of the files there is.

    Raises:
        OSError: it holds no config.json.
    """
    config = file_of(name, "config.json", options)
    if config is None:
        raise OSError(f"{name}: holds no config.json")
    next((file for file in files if file_of(name, file, options) is not None), None)  # for the download
    return config.parent


def files(use_safetensors: bool | None, variant: str | None) -> tuple[str, ...]:
    """Names of the files of weights to look for; raises ValueError: variant is given."""
    if variant is not None:
        raise ValueError(f"variant must be None: such files were never written for TransfoXL; got {variant!r}")
    safe, pickled = huggingface.WEIGHTS
    return huggingface.WEIGHTS if use_safetensors is None else (safe,) if use_safetensors else (pickled,)


def are_theirs(state: Mapping[str, Any]) -> bool:
    """Whether tensors have Hugging Face's names."""
    return any("word_emb." in name for name in state)


def to_ours(given: Mapping[str, Tensor], model: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """The model's state_dict from Hugging Face's.

    Raises:
        TxlError: a tensor is missing, unknown, of another shape, or repeats another and differs.
    """
    softmax, shapes = False, {}
    names: dict[str, list[str]] = {}  # of the model's state, by those of `txl`: tied biases are there in each layer
    for full, p in model.state_dict().items():
        name = _short(full)
        softmax |= name.startswith("softmax.")
        if not config.untie_r and "attention." in name and name.endswith("_bias"):
            name = f"blocks.0.attention.{name.rpartition('.')[2]}"
        names.setdefault(name, []).append(full)
        shapes[name] = p.shape
    found = translate(huggingface.unprefixed(given), config, shapes, False, "the weights", softmax)
    return {full: found[name] for name, all_names in names.items() for full in all_names}


def to_theirs(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face's names and tensors, none twice; with the prefix where there is a softmax."""
    short = {_short(name): x for name, x in state.items()}
    softmax = any(name.startswith("softmax.") for name in short)
    found = original(short, config, softmax)
    found = huggingface.prefixed(found) if softmax else found
    return {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in found.items()}


def _short(name: str) -> str:
    name = name.removeprefix("transformer.").removeprefix("trunk.")
    return "softmax." + name.removeprefix("crit.") if name.startswith("crit.") else name


def read(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Raises OSError as transformers does: there are none, or they are damaged."""
    try:
        return huggingface.tensors(folder, names)
    except TxlError as error:
        raise OSError(str(error)) from error
