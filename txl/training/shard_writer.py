"""torch.distributed.checkpoint's writer of safetensors, made to appear whole or not at all."""

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from txl.training.last import remove_older, unfinished
from txl.training.shards import commit


class ShardWriter(HuggingFaceStorageWriter):
    """Writes beside the folder; the first process puts it in place when all have written."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        self.folder, self.header = folder, header
        super().__init__(str(unfinished(folder)), save_distributed=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Of the first process."""
        super().finish(metadata, results)
        commit(unfinished(self.folder), self.folder, self.header)
        remove_older(self.folder)
