"""Files below a folder, and archives in memory."""

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path


def written(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files below a folder; bytes of a text that are not UTF-8 are surrogates in it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
    return folder


def zipped(*files: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return file.getvalue()


def tarred(*files: tuple[str, bytes], mode: str = "w", form: int = tarfile.GNU_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=form) as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()
