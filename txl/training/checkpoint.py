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
from txl.model.networks import Config, Network, config_from_json, make_network
from txl.paths import AnyPath
from txl.text.vocabulary import Vocabulary, from_file

_FORMAT = "txl-2"
_VOCABULARY = "vocabulary"  # the bytes of its file, as a tensor: a header must stay small


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds.

    `tensors` are named `model.*`, and `optimizer.*`, `memory.*`, `average.*`, `rng.*` if it can be
    resumed. `digest`: SHA-256 of all of it.
    """

    path: Path
    config: Config
    vocabulary: Vocabulary
    state: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str

    @property
    def attn_len(self) -> int:
        """The longest attention of training; what evaluation takes when not told otherwise."""
        return int(self.state.get("attn_len", self.config.attn_len(1)))

    @property
    def segment(self) -> int:
        """Tokens of a segment of training."""
        return int(self.state.get("segment", max(self.attn_len - self.config.mem_len, 1)))

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
    tensors[_VOCABULARY] = torch.frombuffer(bytearray(vocabulary.to_file()), dtype=torch.uint8)
    contents = {"format": _FORMAT, "config": model.config.to_json(), "state": state}
    header = json.dumps(contents | {"vocabulary": vocabulary.settings()})
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


def remove_unfinished(folder: Path) -> None:
    """Removes what killed processes were writing; for the only one that writes there."""
    for path in folder.glob(".*.safetensors.*.tmp"):
        with suppress(OSError):
            path.unlink()


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the header and of names, types, shapes and values, in order of the names."""
    digest = hashlib.sha256(header.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        if x.numel():
            digest.update(x.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _new_file(path: Path) -> int:
    """Makes an empty file anew; its permissions, by which the umask is known without setting it."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        return stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def load(path: AnyPath) -> Checkpoint:
    """Reads a checkpoint: a file, or the best (else the last) one of a run folder.

    Raises:
        TxlError: it is missing, truncated, damaged, not safetensors (a pickle, say), or not one of
            ours.
    """
    path = Path(path)
    if path.is_dir():
        best = path / "best.safetensors"
        path = best if best.exists() else path / "last.safetensors"
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
        header = json.loads(metadata["txl"])
        if header["format"] != _FORMAT:
            raise TxlError(f"{path}: checkpoint format {header['format']!r} is not {_FORMAT!r} of this version")
        if metadata["sha256"] != _digest(metadata["txl"], tensors):
            raise TxlError(f"{path}: the checkpoint is damaged: its checksum is not that of its contents")
        written = tensors.pop(_VOCABULARY).numpy().tobytes()
        return Checkpoint(
            path,
            config_from_json(header["config"]),
            from_file(written, header["vocabulary"]),
            header["state"],
            tensors,
            metadata["sha256"],
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise TxlError(f"{path}: a safetensors file, but not a txl checkpoint") from error


def load_parameters(model: Network, checkpoint: Checkpoint, given: dict[str, Tensor] | None = None) -> None:
    """Copies a checkpoint's parameters into a model of the same shapes.

    given: others in their place, by the same names.

    Raises:
        TxlError: a parameter is missing, unknown or of another shape, by name.
    """
    given, wanted = given or checkpoint.part("model"), dict(model.named_parameters())
    _check_shapes(checkpoint, given, wanted)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(given[name])


def _check_shapes(checkpoint: Checkpoint, given: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raises TxlError: a parameter is missing, unknown or of another shape, by name."""
    for name in sorted(set(given) ^ set(wanted)):
        where = "is missing from" if name in wanted else "is unknown to the configuration of"
        raise TxlError(f"{checkpoint.path}: parameter {name} {where} the checkpoint")
    for name, parameter in wanted.items():
        if given[name].shape != parameter.shape:
            raise TxlError(
                f"{checkpoint.path}: {name} has shape {list(given[name].shape)}, the configuration needs "
                f"{list(parameter.shape)}"
            )


def restore(path: AnyPath, device: torch.device | str = "cpu") -> tuple[Network, Checkpoint]:
    """A model as a checkpoint describes it, in evaluation mode."""
    checkpoint = load(path)
    with torch.device("meta"):  # nothing is allocated for sizes that the file does not have
        sizes = dict(make_network(checkpoint.config).named_parameters())
    _check_shapes(checkpoint, checkpoint.part("model"), sizes)
    model = make_network(checkpoint.config)
    load_parameters(model, checkpoint)
    return model.to(device).eval(), checkpoint
