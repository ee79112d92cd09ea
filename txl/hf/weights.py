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


def folder_of(name: str, options: Mapping[str, Any], files: Sequence[str]) -> Path:
    """The folder of a checkpoint, its config.json and the first of the files downloaded first if it
    is the name of one on the Hub.

    Raises:
        OSError: one of them is not there.
    """
    if Path(name).is_dir():
        folder = Path(name, options.get("subfolder") or "")
        if not (folder / "config.json").is_file():
            raise OSError(f"{folder}: holds no config.json")
        return folder
    hub = {key: value for key, value in options.items() if key in OF_THE_HUB}
    cached_file(name, "config.json", **hub)
    for file in files:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **hub)
        if found is not None:
            return Path(found).parent
    raise OSError(f"{name}: holds none of {', '.join(files)}")


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
