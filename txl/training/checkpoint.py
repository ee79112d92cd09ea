"""Checkpoints: one safetensors file with JSON in its header, never unpickled, written whole.

A sharded run's are folders: `txl.training.sharded`. Here is told which of a run's is the last.
"""

import abc
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from txl.errors import TxlError
from txl.model import Network, make_network
from txl.model.config import Config, config_from_json
from txl.paths import AnyPath
from txl.text.vocabulary import Vocabulary, from_file

FORMAT = "txl-2"
VOCABULARY = "vocabulary"  # the bytes of its file, as a tensor: a header must stay small
WHOLE, HEADER = "last.safetensors", "checkpoint.json"  # a run's last; of a folder of shards, written last
_SHARDS = re.compile(r"last-(\d+)(?:\.(\d+))?")


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
        """Shape and dtype of each tensor, by name."""

    def under(self, prefix: str) -> list[str]:
        """Names of the tensors `prefix.*`, without the prefix."""
        return [name.removeprefix(prefix + ".") for name in self.sizes if name.startswith(prefix + ".")]

    def read(self, *names: str) -> list[Tensor]:
        """Tensors, on the CPU; errors as in `fill`."""
        found = {name: torch.empty(self.sizes[name][0], dtype=self.sizes[name][1], device="cpu") for name in names}
        self.fill(found)
        return list(found.values())

    @abc.abstractmethod
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copies tensors into those of the same names and shapes, on any device, whole or sharded;
        where any is sharded by all its processes.

        Raises:
            KeyError: a tensor is missing. RuntimeError: it is of another shape.
        """


@dataclass(frozen=True)
class Checkpoint(Saved):
    """A file and all its tensors, on the CPU."""

    tensors: dict[str, Tensor]

    @property
    def sizes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (x.shape, x.dtype) for name, x in self.tensors.items()}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, target in targets.items():
                given = self.tensors[name]
                if hasattr(target, "placements"):
                    given = _dealt_as(target, given)
                target.copy_(given)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors named `prefix.*`, without the prefix."""
        return {name.removeprefix(prefix + "."): x for name, x in self.tensors.items() if name.startswith(prefix + ".")}


def make_header(config: Config, vocabulary: Vocabulary, state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says beside its tensors, as JSON."""
    return {"format": FORMAT, "config": config.to_json(), "state": state, "vocabulary": vocabulary.settings()}


def vocabulary_tensor(vocabulary: Vocabulary) -> Tensor:
    """The bytes of a vocabulary's file, uint8."""
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


def save(
    path: AnyPath, model: Network, vocabulary: Vocabulary, state: dict[str, Any], extra: dict[str, Tensor]
) -> None:
    """Writes a checkpoint, or leaves the one at `path` as it was: temporary file, fsync, rename.

    The file gets the permissions of any newly written one, that is those the umask leaves.

    Args:
        state: JSON-able, kept as is.
        extra: further tensors, under full names.

    Raises:
        TxlError: it cannot be written, say because the disk is full; `path` is untouched.
    """
    path = Path(path)
    tensors = {f"model.{name}": p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    tensors |= {name: x.detach().cpu().contiguous() for name, x in extra.items()}
    tensors[VOCABULARY] = vocabulary_tensor(vocabulary)
    header = json.dumps(make_header(model.config, vocabulary, state))
    metadata = {"txl": header, "sha256": _digest(header, tensors)}
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        permissions = _new_file(temporary)
        save_file(tensors, temporary, metadata=metadata)
        temporary.chmod(permissions)  # save_file leaves a file that only its owner can read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        temporary = None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, SafetensorError) as error:
        kept = "; the checkpoint written before is untouched" if path.exists() else ""
        raise TxlError(f"{path}: the checkpoint cannot be written: {error}{kept}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the header and of names, types, shapes and values, in order of the names."""
    digest = hashlib.sha256(header.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        if x.numel():
            digest.update(x.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _dealt_as(target: Tensor, given: Tensor) -> Tensor:
    """A whole tensor sharded as another, by all its processes."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    return distribute_tensor(given.to(target.device), target.device_mesh, target.placements)


def _new_file(path: Path) -> int:
    """Makes an empty file anew; its permissions, by which the umask is known without setting it."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        return stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def load(path: AnyPath) -> Checkpoint:
    """Reads a checkpoint: a file, a folder of shards, or the best (else the last) one of a run.

    Raises:
        TxlError: it is missing, truncated, damaged, not safetensors (a pickle, say), or not one of
            ours.
    """
    path = Path(path)
    if path.is_dir() and not (path / HEADER).is_file():
        best = path / "best.safetensors"
        path = best if best.exists() else find_last(path) or path / WHOLE
    if path.is_dir():
        from txl.training.sharded import open_shards

        found = open_shards(path)
        tensors = dict(zip(found.sizes, found.read(*found.sizes), strict=True))
        return Checkpoint(path, found.config, found.vocabulary, found.state, found.digest, tensors)
    if not path.is_file():
        raise TxlError(f"{path}: no such checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise TxlError(
            f"{path}: not a whole safetensors file ({error}); it is truncated or of another format (pickled checkpoints "
            "are never loaded)"
        ) from error
    try:
        if metadata["sha256"] != _digest(metadata["txl"], tensors):
            raise TxlError(f"{path}: the checkpoint is damaged: its checksum is not that of its contents")
        config, vocabulary, state = read_header(path, json.loads(metadata["txl"]), tensors.pop(VOCABULARY))
        return Checkpoint(path, config, vocabulary, state, metadata["sha256"], tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise TxlError(f"{path}: a safetensors file, but not a txl checkpoint") from error


def load_parameters(model: Network, checkpoint: Checkpoint, given: dict[str, Tensor] | None = None) -> None:
    """Copies a checkpoint's parameters into a model of the same shapes.

    given: others in their place, by the same names.

    Raises:
        TxlError: a parameter is missing, unknown or of another shape, by name.
    """
    given, wanted = given or checkpoint.part("model"), dict(model.named_parameters())
    check_shapes(checkpoint.path, {name: x.shape for name, x in given.items()}, wanted)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(given[name])


def check_shapes(path: Path, given: Mapping[str, torch.Size], wanted: Mapping[str, Tensor]) -> None:
    """Raises TxlError: a parameter is missing, unknown or of another shape, by name."""
    for name in sorted(set(given) ^ set(wanted)):
        where = "is missing from" if name in wanted else "is unknown to the configuration of"
        raise TxlError(f"{path}: parameter {name} {where} the checkpoint")
    for name, parameter in wanted.items():
        if given[name] != parameter.shape:
            raise TxlError(
                f"{path}: {name} has shape {list(given[name])}, the configuration needs {list(parameter.shape)}"
            )


def restore(path: AnyPath, device: torch.device | str = "cpu") -> tuple[Network, Checkpoint]:
    """A model as a checkpoint describes it, in evaluation mode."""
    checkpoint = load(path)
    with torch.device("meta"):  # nothing is allocated for sizes that the file does not have
        sizes = dict(make_network(checkpoint.config).named_parameters())
    check_shapes(checkpoint.path, {name: x.shape for name, x in checkpoint.part("model").items()}, sizes)
    model = make_network(checkpoint.config)
    load_parameters(model, checkpoint)
    return model.to(device).eval(), checkpoint


def shards_folder(run: Path, step: int) -> Path:
    """Where a sharded run is to keep its checkpoint of a step: never a folder that is there, since
    one cannot be replaced at once."""
    again = [version for (of, version), _ in _shards(run) if of == step]
    return run / (f"last-{step}.{max(again) + 1}" if again else f"last-{step}")


def unfinished(folder: Path) -> Path:
    """Where such a folder is written before it is put in place."""
    return folder.with_name(f".{folder.name}.tmp")


def find_last(run: Path) -> Path | None:
    """The newest checkpoint of a run to go on from; None if there is none."""
    found: dict[tuple[int, float], Path] = dict(_shards(run))
    if (run / WHOLE).is_file():
        found[_step(run / WHOLE), math.inf] = run / WHOLE
    return found[max(found)] if found else None


def remove_older(kept: Path) -> None:
    """Removes the checkpoints to go on from that are not this one."""
    for _, folder in _shards(kept.parent):
        if folder != kept:
            gone = folder.with_name(f".{folder.name}.old.tmp")  # at once, or half of it could be found
            with suppress(OSError):
                folder.rename(gone)
                shutil.rmtree(gone)
    whole = kept.parent / WHOLE
    if whole != kept:
        whole.unlink(missing_ok=True)


def remove_unfinished(run: Path) -> None:
    """Removes what killed processes were writing; for the only one that writes there."""
    for path in run.glob(".*.safetensors.*.tmp"):
        with suppress(OSError):
            path.unlink()
    for path in run.glob(".last-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _shards(run: Path) -> list[tuple[tuple[int, int], Path]]:
    """Folders by step, and how often that step was written before."""
    named = [(_SHARDS.fullmatch(path.name), path) for path in run.glob("last-*")]
    return [((int(match[1]), int(match[2] or 0)), path) for match, path in named if match and path.is_dir()]


def _step(whole: Path) -> int:
    """Of a file; -1 if that cannot be told."""
    try:
        with safe_open(whole, framework="pt") as file:
            return int(json.loads((file.metadata() or {})["txl"])["state"]["step"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError):
        return -1
