"""Files replaced whole, by names that nobody can plant; what killed writers leave; locks;
reads that do not wait."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from txl import paths

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
from txl import paths
with paths.{what}(Path(sys.argv[1])) as made:
    (made / "inside").touch() if isinstance(made, Path) else made.write(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(what: str, path: Path) -> None:
    command = [sys.executable, "-c", KILLED.format(what=what), path]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("what", ["replaced", "new_folder"])
def test_what_a_killed_writer_leaves_goes_and_what_is_being_written_stays(what: str, tmp_path: Path) -> None:
    killed(what, tmp_path / "a.json")
    (left,) = tmp_path.iterdir()
    paths.remove_leftovers(tmp_path, ".txt")
    with getattr(paths, what)(tmp_path / "b.json"):
        (own,) = set(tmp_path.iterdir()) - {left}
        paths.remove_leftovers(tmp_path)
        assert [*tmp_path.iterdir()] == [own]
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]


def test_what_earlier_versions_left_goes(tmp_path: Path) -> None:
    for name in (".run.json.12ab34cd.tmp", ".last.safetensors.7.tmp", ".other", "a.1.tmp"):
        (tmp_path / name).touch()
    (tmp_path / ".b.12.tmp").symlink_to(tmp_path / "a.1.tmp")
    paths.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".other", "a.1.tmp"}


def test_a_full_disk_leaves_the_file_before_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.json"
    paths.replace_text(path, "before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        paths.replace_text(path, "after")
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


def test_a_missing_folder_is_named_by_the_file(tmp_path: Path) -> None:
    for write in (paths.replace_text, paths.append_text):
        with pytest.raises(FileNotFoundError, match=rf"'{tmp_path}/none/a.json'"):
            write(tmp_path / "none" / "a.json", "text")


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
def test_only_regular_files_are_read_and_added_to(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for act in (paths.read_bytes, lambda path: paths.append_text(path, "line")):
        with pytest.raises(
            OSError, match=rf"(Not a regular file|Is a directory|No such device or address): '.*{name}'"
        ):
            act(tmp_path / name)


def test_a_new_folder_takes_the_place_of_nothing_but_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with paths.new_folder(tmp_path / "a") as made:
        (made / "inside").touch()
    with pytest.raises(OSError, match=rf"It exists already; .*: '{tmp_path}/a'"), paths.new_folder(tmp_path / "a"):
        pass
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["inside"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_lock_is_one_holder_s_until_it_is_closed(tmp_path: Path) -> None:
    first = paths.lock_file(tmp_path / ".lock")
    assert first is not None
    assert paths.lock_file(tmp_path / ".lock") is None
    os.close(first)
    again = paths.lock_file(tmp_path / ".lock")
    assert again is not None
    os.close(again)
