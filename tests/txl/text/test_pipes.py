"""Pipes and devices as text: read while somebody writes, refused instead of waited for."""

import os
import threading
import time
from pathlib import Path

import pytest

from txl.errors import TxlError
from txl.text import compressed, pipes
from txl.text import corpus as data


def written_slowly(path: Path, parts: list[bytes]) -> None:
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            file.flush()
            time.sleep(0.3)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    writer = threading.Thread(target=written_slowly, args=(tmp_path / "p", [b"one ", b"two ", b"three"]))
    writer.start()
    assert compressed.read(tmp_path / "p").data == b"one two three"
    writer.join()


def test_a_pipe_that_nobody_writes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "PATIENCE_S", 0.5)
    os.mkfifo(tmp_path / "p")
    with pytest.raises(TxlError, match=r"is a pipe, and nobody wrote to it for 0\.5 seconds"):
        compressed.read(tmp_path / "p")
    with pytest.raises(TxlError, match="is no regular file"):
        data.prepare(tmp_path / "p", tmp_path / "c")


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_devices(name: str, tmp_path: Path) -> None:
    if not os.path.exists(name):
        pytest.skip(f"{name} is not there")
    with pytest.raises(TxlError, match=r"is a device or a socket|cannot be read"):
        compressed.read(name)
    with pytest.raises(TxlError):
        data.prepare(name, tmp_path / "c")


def test_pipes_have_a_limit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    writer = threading.Thread(target=lambda: (tmp_path / "p").write_bytes(b"x" * 50))
    writer.start()
    with pytest.raises(TxlError, match="a pipe of more than 1e-08 GB"):
        pipes.read_all(tmp_path / "p", 10)
    writer.join()


def test_a_split_that_is_a_pipe_is_refused_at_once(corpus: data.Corpus, tmp_path: Path) -> None:
    for path in corpus.folder.iterdir():
        if path.name != "train.bin":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    os.mkfifo(tmp_path / "train.bin")
    with pytest.raises(TxlError, match="the prepared corpus is damaged"):
        data.load(tmp_path)
