"""Sharded training (FSDP2): parameters, gradients and optimizer state that processes share out, and
checkpoints of it.

A checkpoint is a folder with a safetensors file a process, written in the background by
torch.distributed.checkpoint. Nothing in it is unpickled.
"""

import hashlib
import inspect
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from txl.distributed import World
from txl.errors import TxlError
from txl.model import Network, make_network
from txl.model.config import PLACES, Config
from txl.model.transformer import Trunk
from txl.paths import replace_text
from txl.text.vocabulary import Vocabulary
from txl.training.checkpoint import HEADER, VOCABULARY, Saved, make_header, read_header, remove_older, vocabulary_tensor
from txl.training.config import TrainConfig
from txl.training.update import SegmentTraining

NEEDS_SHARDS = (
    "needs a torch that keeps checkpoints in sharded safetensors (HuggingFaceStorageWriter with save_distributed), this "
    f"is {torch.__version__}"
)


class Sharded:
    """`Parallel` where each process holds a part of every parameter, of its gradient and of the
    optimizer's state.

    A layer's parameters are gathered for as long as it computes. Layers that share parameters
    (`untie_r` off), or have some outside forward (learned places), are gathered all at once.
    """

    def __init__(
        self, network: Network, average: nn.Module | None, world: World, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        """dtype: what gathered parameters are rounded to; None for their own. Gradients are summed
        in float32."""
        mesh = init_device_mesh(device.type, (world.size,))
        policy = (
            MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
        )
        self.module: nn.Module = SegmentTraining(network)
        _shard(self.module, mesh, policy)
        if average is not None:
            _shard(average, mesh, policy)

    def last_backward(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()  # a whole gradient a process would take the memory that sharding saves

    def clip(self, maximum: float) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), maximum)
        assert isinstance(norm, DTensor)
        return norm.full_tensor()

    def whole(self, network: Network) -> Network:
        with torch.device("meta"):
            copy = make_network(network.config)
        copy.to_empty(device=network.device)
        with torch.no_grad():
            for into, p in zip(copy.parameters(), network.parameters(), strict=True):
                into.copy_(p.full_tensor() if isinstance(p, DTensor) else p)
        return copy


def _shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    for trunk in [part for part in module.modules() if isinstance(part, Trunk)]:
        config = trunk.config
        if config.encoding not in PLACES and (config.encoding != "relative" or config.untie_r):
            for block in trunk.layers:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def check_shards(config: TrainConfig) -> None:
    """Raises TxlError where a run cannot be sharded."""
    if config.optimizer == "muon":
        raise TxlError("--shard is for optimizer 'adam': 'muon' needs whole matrices")
    if not torch_has_shards():
        raise TxlError(f"--shard {NEEDS_SHARDS}")


def torch_has_shards() -> bool:
    """Whether this torch writes and reads them."""
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    except ImportError:
        return False
    return "save_distributed" in inspect.signature(HuggingFaceStorageWriter.__init__).parameters


@dataclass(frozen=True)
class Shards(Saved):
    """A folder of shards; its tensors stay there until `fill`."""

    listed: dict[str, tuple[torch.Size, torch.dtype]]

    @property
    def sizes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return self.listed

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        _read(self.path, dict(targets))


def begin_save(
    folder: Path,
    config: Config,
    vocabulary: Vocabulary,
    state: dict[str, Any],
    tensors: dict[str, Tensor],
    group: dist.ProcessGroup | None,
) -> Future[Any]:
    """Begins to write a checkpoint, all processes together; what they hold may change at once.

    The folder appears when all of it is written, and not before.

    Args:
        tensors: of this process: sharded ones, those that all have alike, and its own.
        group: for the processes to talk in the background, by gloo.

    Returns:
        what to give to `end_save`, which must come before the next.
    """
    header = make_header(config, vocabulary, state)
    tensors = tensors | {VOCABULARY: vocabulary_tensor(vocabulary)}
    contents = {name: x.detach() for name, x in tensors.items()}
    with _quiet():
        # A response, not a future, comes only with a stager of one's own.
        return async_save(contents, storage_writer=_writer(folder, header), process_group=group)  # type: ignore[return-value]


def end_save(folder: Path, begun: Future[Any]) -> None:
    """Waits for what `begin_save` began.

    Raises:
        TxlError: it could not be written; the checkpoint before it is untouched.
    """
    try:
        begun.result()
    except (CheckpointException, OSError, SafetensorError) as error:
        why = str(error).strip().splitlines()[-1]
        raise TxlError(f"{folder}: the checkpoint cannot be written: {why}; the one before is untouched") from error


def _writer(folder: Path, header: dict[str, Any]) -> Any:
    """torch's writer of safetensors, made to appear whole or not at all: it writes beside the
    folder, and the first process puts that in place when all have written."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    unfinished = folder.with_name(f".{folder.name}.tmp")

    class Writer(HuggingFaceStorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            commit(unfinished, folder, header)
            remove_older(folder)

    return Writer(str(unfinished), save_distributed=True)


def commit(unfinished: Path, folder: Path, header: dict[str, Any]) -> None:
    """Makes a checkpoint of a folder that all processes have written to."""
    files = {path.name: file_digest(path) for path in sorted(unfinished.glob("*.safetensors"))}
    replace_text(unfinished / HEADER, json.dumps(header | {"files": files}, indent=1))
    for path in (unfinished / HEADER, unfinished):
        _sync(path)
    os.rename(unfinished, folder)
    _sync(folder.parent)


def open_shards(folder: Path, verify: range | None = None) -> Shards:
    """Reads what a folder holds, but not its tensors.

    verify: which of its files are compared with their checksums; None for all.

    Raises:
        TxlError: it is no checkpoint of ours, or damaged.
    """
    if not torch_has_shards():
        raise TxlError(f"{folder}: a checkpoint in shards {NEEDS_SHARDS}")
    try:
        text = (folder / HEADER).read_text(encoding="utf-8")
        header = json.loads(text)
        files = header["files"]
        found = {path.name for path in folder.glob("*.safetensors")}
        for name in sorted(found ^ set(files)):
            raise TxlError(
                f"{folder}: the checkpoint is damaged: {name} is {'missing' if name in files else 'not its own'}"
            )
        for n, name in enumerate(sorted(files)):
            if (verify is None or n in verify) and file_digest(folder / name) != files[name]:
                raise TxlError(f"{folder / name}: the checkpoint is damaged: its checksum is not that of its contents")
        sizes = _sizes(folder)
        shape, dtype = sizes.pop(VOCABULARY)
        written = {VOCABULARY: torch.empty(shape, dtype=dtype, device="cpu")}
        _read(folder, written)
        config, vocabulary, state = read_header(folder, header, written[VOCABULARY])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError, AssertionError) as error:
        raise TxlError(f"{folder}: not a whole checkpoint of ours ({type(error).__name__}: {error})") from error
    return Shards(folder, config, vocabulary, state, hashlib.sha256(text.encode()).hexdigest(), sizes)


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()


def _sizes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    listed: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in listed.items()}


def _read(folder: Path, targets: dict[str, Tensor]) -> None:
    """Fills tensors; by all processes where any is sharded, else by this one alone."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    sharded = any(hasattr(x, "placements") for x in targets.values())
    with _quiet(), torch.no_grad():
        given = {name: x.detach() for name, x in targets.items()}
        load(given, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not sharded)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's advice to those who work on torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
