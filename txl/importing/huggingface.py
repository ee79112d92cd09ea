"""Hugging Face's TransfoXL: a folder with config.json and weights, as transformers up to 4.x saved
it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl.errors import TxlError
from txl.importing import torch_files, vocabulary
from txl.importing.foreign import Foreign, Lengths
from txl.importing.huggingface_config import MODEL_TYPE, from_theirs
from txl.model.config import ModelConfig

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
SEGMENT = 128  # of training; the configuration does not say


def find(source: Path) -> Path | None:
    """The folder, or None if it is none by its looks."""
    return source if (source / "config.json").is_file() else None


def read(source: Path, lengths: Lengths) -> Foreign:
    """A folder's configuration and tensors; raises as `config` and `tensors` do."""
    return Foreign(config(source), tensors(source), False, SEGMENT, vocabulary.beside(source))


def config(source: Path) -> ModelConfig:
    """The model's configuration, as `from_theirs`.

    Raises:
        TxlError: config.json is missing, damaged, of another model, or asks for what the paper's
            model is not.
    """
    path = source / "config.json"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TxlError(f"{path}: cannot be read: {error}") from error
    if not isinstance(given, dict) or given.get("model_type") != MODEL_TYPE:
        kind = given.get("model_type") if isinstance(given, dict) else type(given).__name__
        raise TxlError(f"{path}: model_type must be {MODEL_TYPE!r}, got {kind!r}")
    return from_theirs(given, str(path))


def tensors(source: Path, names: Sequence[str] = WEIGHTS) -> dict[str, Tensor]:
    """Its tensors by the names of the original code; of several files, if an index says so.

    names: of the files that are looked for, the first that is there.

    Raises:
        TxlError: there are none, or a file is damaged or holds more than tensors.
    """
    for name in names:
        if (source / name).is_file():
            return unprefixed(tensors_of(source / name))
        index = source / f"{name}.index.json"
        if index.is_file():
            return unprefixed({key: x for part in _parts(index) for key, x in tensors_of(part).items()})
    raise TxlError(f"{source}: holds no weights ({' or '.join(names)})")


def _parts(index: Path) -> list[Path]:
    """The files of an index, all of them beside it."""
    try:
        found = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TxlError(f"{index}: cannot be read: {type(error).__name__}: {error}") from error
    for name in found:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise TxlError(f"{index}: {name!r} is no name of a file beside it")
    return [index.parent / name for name in found]


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Of one file, safetensors or torch.save's, by name."""
    if path.suffix == ".safetensors":
        try:
            found: Any = load_file(path)
        except (SafetensorError, OSError) as error:
            raise TxlError(f"{path}: cannot be read: {error}") from error
    else:
        found = torch_files.load(path)
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise TxlError(f"{path}: must hold tensors by name, got {type(found).__name__}")
    return {str(name): x for name, x in found.items()}


def unprefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the original's names."""
    found = {str(name).removeprefix("transformer."): x for name, x in tensors.items()}
    if len(found) < len(tensors):
        raise TxlError("tensors are there with and without the prefix 'transformer.'")
    return found


def prefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From the original's names to Hugging Face's."""
    return {name if name.startswith("crit.") else f"transformer.{name}": x for name, x in tensors.items()}
