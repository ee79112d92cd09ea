"""What is measured of one model, kept in a file so that a measurement can go on."""

import hashlib
import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from txl.errors import TxlError
from txl.paths import replace_bytes
from txl.recl.losses import BATCH_TOKENS, Losses
from txl.recl.positions import LONGEST_CHAIN, Plan
from txl.text.vocabulary import Tokens, content

FORMAT = 1  # of the files, and of the order in which batches are measured


def fingerprint(checkpoint: str, tokens: Tokens, plan: Plan, **settings: Any) -> str:
    """SHA-256 of all that measured losses and their order depend on.

    checkpoint: the digest of what was loaded.
    """
    sizes = [plan.tokens, plan.samples, plan.step, plan.contexts, LONGEST_CHAIN, BATCH_TOKENS]
    values = {"format": FORMAT, "checkpoint": checkpoint, "tokens": content(tokens), "plan": sizes}
    return hashlib.sha256(json.dumps(values | settings, sort_keys=True).encode()).hexdigest()


def save(path: Path, losses: Losses, fingerprint: str) -> None:
    """Replaces the file whole.

    Raises:
        TxlError: it cannot be written.
    """
    file = io.BytesIO()
    np.savez(
        file, values=losses.values, batches=np.int64(losses.batches), tokens=np.int64(losses.tokens),
        fingerprint=np.array(fingerprint),
    )  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, file.getvalue())
    except OSError as error:
        raise TxlError(f"{path}: cannot be written: {error.strerror or error}") from error


def load(path: Path, fingerprint: str, shape: tuple[int, int]) -> Losses | None:
    """What was measured of the same model in the same way; None if nothing was.

    A file that is damaged or of other settings counts as nothing.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            if str(kept["fingerprint"]) != fingerprint or kept["values"].shape != shape:
                return None
            return Losses(kept["values"].astype(np.float64), int(kept["batches"]), int(kept["tokens"]))
    except (OSError, ValueError, KeyError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None


def file_name(model: str) -> str:
    """Of a model's losses: its name, and what tells names apart that only differ in other marks."""
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in model)[-60:]
    return f"{plain}-{hashlib.sha256(model.encode(errors='surrogateescape')).hexdigest()[:8]}"
