"""What every checkpoint is, in one file or in shards."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.model.config import Config, config_from_json
from txl.text.vocabulary import Vocabulary, from_file

FORMAT = "txl-2"
VOCABULARY = "vocabulary"  # the bytes of its file, as a tensor: a header must stay small


@dataclass(frozen=True)
class Saved(abc.ABC):
    """A checkpoint.

    Its tensors are named `model.*`, and `optimizer.*`, `memory.*`, `average.*`, `rng.*` if it can
    be resumed. `digest`: SHA-256 of all of it.
    """

    path: Path
    config: Config
    vocabulary: Vocabulary
    state: dict[str, Any]
    digest: str

    @property
    def attn_len(self) -> int:
        """The longest attention of training; what evaluation takes when not told otherwise."""
        return int(self.state.get("attn_len", self.config.attn_len(1)))

    @property
    def segment(self) -> int:
        """Tokens of a segment of training."""
        return int(self.state.get("segment", max(self.attn_len - self.config.mem_len, 1)))

    @property
    @abc.abstractmethod
    def sizes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Of each tensor, by name."""

    def under(self, prefix: str) -> list[str]:
        """Names of the tensors `prefix.*`, without the prefix."""
        return [name.removeprefix(prefix + ".") for name in self.sizes if name.startswith(prefix + ".")]

    def read(self, *names: str) -> list[Tensor]:
        """Tensors, on the CPU; errors as in `fill`."""
        found = {name: torch.empty(self.sizes[name][0], dtype=self.sizes[name][1]) for name in names}
        self.fill(found)
        return list(found.values())

    @abc.abstractmethod
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copies tensors into those of the same names and shapes, on any device, whole or sharded;
        where any is sharded by all its processes.

        Raises:
            KeyError: a tensor is missing. RuntimeError: it is of another shape.
        """


def make_header(config: Config, vocabulary: Vocabulary, state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says beside its tensors, as JSON."""
    return {"format": FORMAT, "config": config.to_json(), "state": state, "vocabulary": vocabulary.settings()}


def vocabulary_tensor(vocabulary: Vocabulary) -> Tensor:
    """The bytes of its file."""
    return torch.frombuffer(bytearray(vocabulary.to_file()), dtype=torch.uint8)


def read_header(path: Path, header: Any, written: Tensor) -> tuple[Config, Vocabulary, dict[str, Any]]:
    """Configuration, vocabulary and state.

    written: the vocabulary's tensor.

    Raises:
        TxlError: another version's. KeyError, TypeError, ValueError: not what `make_header` made.
    """
    if header["format"] != FORMAT:
        raise TxlError(f"{path}: checkpoint format {header['format']!r} is not {FORMAT!r} of this version")
    vocabulary = from_file(written.numpy().tobytes(), header["vocabulary"])
    return config_from_json(header["config"]), vocabulary, header["state"]
