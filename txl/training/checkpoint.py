"""Checkpoints: safetensors files with JSON in the header; they are never unpickled and are replaced
atomically."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from txl.errors import TxlError
from txl.fields import COUNT, check_ranges, from_values
from txl.model import Network, as_transformer, make_network
from txl.model.config import Config, config_from_json
from txl.paths import AnyPath, replaced, utf8_path
from txl.text.vocabulary import Vocabulary, from_file
from txl.training.config import TrainConfig

FORMAT = "txl-4"
VOCABULARY = "vocabulary"  # content of the vocabulary's file, stored as a tensor because a header must stay small
BEST, LAST = "best.safetensors", "last.safetensors"  # of a run: the lowest validation loss, and the one to resume from
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a run in a checkpoint; checkpoints of other origin hold only some of the fields.

    Attributes:
        step: number of updates done. best_loss, losses: validation losses in nats, the lowest and
            all.
        train: the `TrainConfig`. corpus: fingerprint of the corpus.
        attn_len, segment: as in `Checkpoint`. ranks: number of processes.
        averaging: whether averaging of the weights has begun.
        unvalidated: whether the validation of this step is still to be done.
    """

    step: int = 0
    best_loss: float = math.inf
    train: dict[str, Any] = field(default_factory=dict)
    corpus: str = ""
    attn_len: int = 1
    segment: int = 1
    ranks: int = 1
    losses: tuple[float, ...] = ()
    averaging: bool = False
    unvalidated: bool = False

    def __post_init__(self) -> None:
        if math.isnan(self.best_loss):
            raise TxlError("best_loss must be a number, got nan")
        check_ranges(self, step=(0, COUNT[1]), attn_len=COUNT, segment=COUNT, ranks=COUNT)
        if self.train:
            TrainConfig.from_json(self.train)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with all its tensors on the CPU.

    Tensors are named `model.*` and, if the run can be resumed, `optimizer.*`, `memory.*`,
    `average.*` and `rng.*`. `digest` is the SHA-256 of header and tensors.
    """

    path: Path
    config: Config
    vocabulary: Vocabulary
    state: dict[str, Any]
    digest: str
    tensors: dict[str, Tensor]

    @property
    def attn_len(self) -> int:
        """The longest attention length in training, which is the default in evaluation."""
        return int(self.state.get("attn_len", self.config.attn_len(1)))

    @property
    def segment(self) -> int:
        """Number of tokens of a training segment."""
        return int(self.state.get("segment", max(self.attn_len - self.config.mem_len, 1)))

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors named `prefix.*`, with the prefix removed."""
        return {name.removeprefix(prefix + "."): x for name, x in self.tensors.items() if name.startswith(prefix + ".")}


def _read_header(path: Path, header: Any, written: Tensor) -> tuple[Config, Vocabulary, dict[str, Any]]:
    """Return configuration, vocabulary and state, with the types of all values checked.

    written: the tensor with the vocabulary's file.

    Raises:
        TxlError: the checkpoint is of another version, or damaged; the message names the field.
    """
    found = header.get("format") if isinstance(header, dict) else None
    if found != FORMAT:
        raise TxlError(f"{path}: checkpoint format {found!r} is not {FORMAT!r} of this version")
    try:
        for name in ("config", "state", "vocabulary"):
            if not isinstance(header.get(name), dict):
                raise TxlError(f"{name} must be an object, got {header.get(name)!r:.40}")
        from_values(State, header["state"])
        if written.dtype != torch.uint8:
            raise TxlError(f"{VOCABULARY} must be a tensor of uint8, got {written.dtype}")
        vocabulary = from_file(written.numpy().tobytes(), header["vocabulary"])
        config = config_from_json(header["config"])
        if config.vocab_size != len(vocabulary):
            raise TxlError(f"vocab_size is {config.vocab_size:,}, but the vocabulary has {len(vocabulary):,} symbols")
    except TxlError as error:
        raise TxlError(f"{path}: the checkpoint is damaged: {error}") from error
    return config, vocabulary, header["state"]


def save(
    path: AnyPath, model: Network, vocabulary: Vocabulary, state: dict[str, Any], extra: dict[str, Tensor]
) -> None:
    """Write a checkpoint, or on an error keep the file at `path`. Equal contents give equal bytes.

    Args:
        state: values that JSON can represent, stored unchanged.
        extra: further tensors by their full names.

    Raises:
        TxlError: it cannot be written, for example because the disk is full; `path` is unchanged.
    """
    path = Path(path)
    tensors = {f"model.{name}": p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    tensors |= {name: x.detach().cpu().contiguous() for name, x in extra.items()}
    tensors[VOCABULARY] = torch.frombuffer(bytearray(vocabulary.to_file()), dtype=torch.uint8)
    header = json.dumps(
        {"format": FORMAT, "config": model.config.to_json(), "state": state, "vocabulary": vocabulary.settings()}
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            write_tensors(file, tensors, {"sha256": _digest(header, tensors), "txl": header})
    except OSError as error:
        kept = "; the checkpoint written before is untouched" if path.exists() else ""
        raise TxlError(f"{path}: the checkpoint cannot be written: {error.strerror or error}{kept}") from error


def write_tensors(file: IO[bytes], tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write CPU tensors as a safetensors file.

    The library's `save_file` is not used: it writes to a file that remains if the process is
    killed, and orders metadata differently in each process.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    ordered, at = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])), 0
    for name, x in ordered:
        end = at + x.numel() * x.element_size()
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, x in ordered:
        file.write(_content(x))


def _content(x: Tensor) -> Any:
    """Return the bytes of a tensor, without a copy if it is contiguous."""
    return x.contiguous().flatten().view(torch.uint8).numpy().data if x.numel() else b""


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of the header and of names, dtypes, shapes and values, in order of
    names."""
    digest = hashlib.sha256(header.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(_content(x))
    return digest.hexdigest()


def load(path: AnyPath) -> Checkpoint:
    """Read a checkpoint file, or the best (if none, the last) checkpoint of a run's folder.

    Raises:
        TxlError: it is missing, truncated, damaged, not safetensors (such as a pickle), or was not
            written by txl.
    """
    path = Path(path)
    if path.is_dir():
        path = path / (BEST if (path / BEST).exists() else LAST)
    if not path.is_file():
        raise TxlError(f"{path}: no such checkpoint")
    try:
        with utf8_path(path) as name, safe_open(name, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise TxlError(
            f"{path}: not a whole safetensors file ({error}); it is truncated or of another format (pickled checkpoints "
            "are never loaded)"
        ) from error
    if not {"txl", "sha256"} <= set(metadata) or VOCABULARY not in tensors:
        raise TxlError(f"{path}: a safetensors file, but not a txl checkpoint")
    if metadata["sha256"] != _digest(metadata["txl"], tensors):
        raise TxlError(f"{path}: the checkpoint is damaged: its checksum is not that of its contents")
    try:
        header = json.loads(metadata["txl"])
    except (ValueError, RecursionError) as error:
        raise TxlError(f"{path}: the checkpoint is damaged: its header is no JSON") from error
    config, vocabulary, state = _read_header(path, header, tensors.pop(VOCABULARY))
    return Checkpoint(path, config, vocabulary, state, metadata["sha256"], tensors)


def load_parameters(model: Network, checkpoint: Checkpoint, given: dict[str, Tensor] | None = None) -> None:
    """Copy a checkpoint's parameters into a model of the same shapes.

    given: parameters to take instead of the checkpoint's, by the same names.

    Raises:
        TxlError: a parameter is missing, unknown or of another shape; the message names it.
    """
    given, wanted = checkpoint.part("model") if given is None else given, dict(model.named_parameters())
    check_shapes(checkpoint.path, {name: x.shape for name, x in given.items()}, wanted)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(given[name])


def check_shapes(path: Path, given: Mapping[str, torch.Size], wanted: Mapping[str, Tensor]) -> None:
    """Raise TxlError, with its name, for a parameter that is missing, unknown or of another
    shape."""
    for name in sorted(set(given) ^ set(wanted)):
        where = "is missing from" if name in wanted else "is unknown to the configuration of"
        raise TxlError(f"{path}: parameter {name} {where} the checkpoint")
    for name, parameter in wanted.items():
        if given[name] != parameter.shape:
            raise TxlError(
                f"{path}: {name} has shape {list(given[name])}, the configuration needs {list(parameter.shape)}"
            )


def restore(path: AnyPath, device: torch.device | str = "cpu", **changes: Any) -> tuple[Network, Checkpoint]:
    """Make the model that a checkpoint describes, in evaluation mode, and return both.

    changes: fields of its `ModelConfig` to replace; parameters must not depend on them.
    """
    checkpoint = load(path)
    with torch.device("meta"):  # a damaged header could name sizes that do not fit into memory
        sizes = make_network(checkpoint.config)
    shapes = {name: x.shape for name, x in checkpoint.part("model").items()}
    check_shapes(checkpoint.path, shapes, dict(sizes.named_parameters()))
    for name in changes:
        as_transformer(sizes, "zeros" if name == "initial_memory" else name)
    model = make_network(replace(checkpoint.config, **changes))
    load_parameters(model, checkpoint)
    return model.to(device).eval(), checkpoint
