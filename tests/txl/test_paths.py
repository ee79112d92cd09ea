"""Atomic replacement of files, leftovers of killed writers, locks, reads of regular files only."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from txl import paths
from txl.errors import TxlError

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
from txl import paths
with paths.{what}(Path(sys.argv[1])) as made:
    (made / "inside").touch() if isinstance(made, Path) else made.write(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""
HOLD = """
import sys, time
from pathlib import Path
from txl import paths
paths.results_folder(Path(sys.argv[1]), "--out")
print("held", flush=True)
time.sleep(60)
"""


def killed(what: str, path: Path) -> None:
    command = [sys.executable, "-c", KILLED.format(what=what), path]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("what", ["replaced", "new_folder"])
def test_a_killed_writers_temporary_file_is_replaced(what: str, tmp_path: Path) -> None:
    killed(what, tmp_path / "a")
    (left,) = tmp_path.iterdir()
    write = getattr(paths, what)
    with write(tmp_path / "b"):
        pass
    assert left.exists()
    with write(tmp_path / "a"):
        assert left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert not (tmp_path / "a" / "inside").exists()
    assert what == "new_folder" or not (tmp_path / "a").read_bytes()


@pytest.mark.parametrize("what", ["replaced", "new_folder"])
def test_one_writer_of_a_file(what: str, tmp_path: Path) -> None:
    write = getattr(paths, what)
    with write(tmp_path / "a"):
        with (
            pytest.raises(OSError, match=rf"Another process writes to .a.txl.tmp: '{tmp_path}/a'"),
            write(tmp_path / "a"),
        ):
            pass
        with write(tmp_path / "b"):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("what", ["replaced", "new_folder"])
def test_temporary_file_that_is_a_link_is_kept(what: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / ".a.txl.tmp").symlink_to(tmp_path / "notes")
    with pytest.raises(OSError, match=rf"'{tmp_path}/a'"), getattr(paths, what)(tmp_path / "a"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.txl.tmp", "notes"]


@pytest.mark.slow
def test_folder_of_results_is_locked(tmp_path: Path) -> None:
    held = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE)
    assert held.stdout is not None
    assert held.stdout.readline() == b"held\n"
    with pytest.raises(TxlError, match=rf"^{tmp_path}: another process writes its results there$"):
        paths.results_folder(tmp_path, "--out")
    held.kill()
    held.communicate()
    for _ in range(2):  # a process may lock a folder twice
        paths.results_folder(tmp_path, "--out")
    os.close(paths.locks.pop(str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.json"
    paths.replace_text(path, "before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        paths.replace_text(path, "after")
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_error_of_a_missing_folder_names_the_file(tmp_path: Path) -> None:
    for write in (paths.replace_text, paths.append_text):
        with pytest.raises(FileNotFoundError, match=rf"'{tmp_path}/none/a.json'"):
            write(tmp_path / "none" / "a.json", "text")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        paths.replace_text(tmp_path / "a", "text")
        (tmp_path / "b").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_names_of_any_length(tmp_path: Path) -> None:
    for name in ("ä" * 127, "a" * 255):
        paths.replace_text(tmp_path / name, "text")
    assert len([*tmp_path.iterdir()]) == 2


def test_links_are_not_followed(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("kept")
    link.symlink_to(victim)
    for act in (lambda: paths.append_text(link, "more"), lambda: paths.lock_file(link)):
        with pytest.raises(OSError, match=r"symbolic link|Too many levels"):
            act()
    paths.replace_text(link, "new")
    assert victim.read_text() == "kept"
    assert not link.is_symlink()


@pytest.mark.parametrize("name", ["pipe", "folder", "/dev/zero"])
def test_only_regular_files_are_read_and_appended_to(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for act in (paths.read_bytes, lambda path: paths.append_text(path, "line")):
        with pytest.raises(
            OSError, match=rf"(Not a regular file|Is a directory|No such device or address): '.*{name}'"
        ):
            act(tmp_path / name)


def test_files_are_replaced_in_a_new_folder(tmp_path: Path) -> None:
    with paths.new_folder(tmp_path / "a") as made:
        paths.replace_text(made / "inside", "text")
    assert (tmp_path / "a" / "inside").read_text() == "text"


def test_new_folder_replaces_only_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with paths.new_folder(tmp_path / "a") as made:
        (made / "inside").touch()
    with pytest.raises(OSError, match=rf"It exists already; .*: '{tmp_path}/a'"), paths.new_folder(tmp_path / "a"):
        pass
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["inside"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
