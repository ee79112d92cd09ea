"""Checkpoints: one safetensors file with JSON in its header. Never unpickled, written whole."""

import hashlib
import json
import os
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
from txl.paths import AnyPath
from txl.text.vocabulary import Vocabulary
from txl.training.last import WHOLE, find_last
from txl.training.saved import VOCABULARY, Saved, make_header, read_header, vocabulary_tensor
from txl.training.shards import HEADER, Shards, open_shards


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
    if path.is_dir():
        if (path / HEADER).is_file():
            return _whole(open_shards(path))
        best = path / "best.safetensors"
        path = best if best.exists() else find_last(path) or path / WHOLE
        if path.is_dir():
            return _whole(open_shards(path))
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


def _whole(shards: Shards) -> Checkpoint:
    return Checkpoint(
        shards.path, shards.config, shards.vocabulary, shards.state, shards.digest, shards.whole()
    )  # fmt: skip


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
