"""Files of torch.save, in both its formats: tensors and data, never code."""

import io
import pickle
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch

from txl.errors import TxlError
from txl.importing import modules
from txl.importing.inert import Inert, Unpickler

_LOOKED_AT = 2**24  # bytes of a file's beginning, or of the pickle inside
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the older format begins with this number, pickled


def is_one(path: Path) -> bool:
    """Whether a file is one of torch.save by its looks."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_LEGACY)) == _LEGACY or zipfile.is_zipfile(path)


def mentions(path: Path, *texts: bytes) -> bool:
    """Whether its pickle holds all of these, by its looks."""
    if not is_one(path):
        return False
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            head = file.read(_LOOKED_AT)
    else:
        try:
            with zipfile.ZipFile(path) as archive:
                name = next((x for x in archive.namelist() if x.endswith("/data.pkl")), None)
                if name is None:
                    return False
                with archive.open(name) as pickled:
                    head = pickled.read(_LOOKED_AT)
        except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, ValueError):
            return False
    return all(text in head for text in texts)


def load(path: Path, classes: Iterable[str] = ()) -> Any:
    """What a file holds, on the CPU.

    Args:
        classes: full names of what may stand in it besides tensors and data; each comes out as an
            `Inert`, and nothing of it runs.

    Raises:
        TxlError: it is damaged, holds anything else, or more than its bytes say.
    """
    classes = tuple(classes)
    inert = [(type("Inert", (Inert,), {"kind": name, "dump_patches": False}), name) for name in classes]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(inert):  # type: ignore[arg-type]
            warnings.simplefilter("ignore")  # of a class's source, which is not looked at
            if not zipfile.is_zipfile(path):
                return modules.load(path, classes)
            _look_through(path)
            return torch.load(path, map_location="cpu", weights_only=True)
    except TxlError:
        raise
    except Exception as error:  # what a damaged pickle raises is anything
        raise TxlError(f"{path}: not a whole file of tensors and data ({_reason(error)})") from error


class _Look(Unpickler):
    """Goes through a pickle of torch's as of data, for what torch's reader has no bounds for."""

    def _persistent(self) -> None:
        self.stack[-1] = None  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = Unpickler.dispatch | {pickle.BINPERSID[0]: _persistent}


def _look_through(path: Path) -> None:
    """Raises: the archive claims more than its bytes, or its pickle is none of plain data."""
    _refuse_compressed(path)
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".pkl"):
                data = archive.read(name)
                _Look(io.BytesIO(data), len(data)).load()


def _refuse_compressed(path: Path) -> None:
    """torch.save stores what it writes as it is: a file that says otherwise could ask for any
    memory."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:
        raise TxlError(f"{path}: not a whole file of torch.save ({error})") from error
    if not stored or claimed > path.stat().st_size:
        raise TxlError(f"{path}: claims {claimed:,} bytes, has {path.stat().st_size:,}; torch.save compresses nothing")


def _reason(error: Exception) -> str:
    """In a line: of torch's advice, which is long, what was found."""
    text = str(error)
    found = next((line for line in text.splitlines() if "nsupported" in line), text if len(text) < 200 else "")
    return f"{type(error).__name__}: {' '.join(found.split())}" if found else type(error).__name__
