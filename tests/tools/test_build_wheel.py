"""The wheel for every Python, without building it: .ci/check_wheel does."""

from pathlib import Path

import build_wheel
import pytest


def test_python_that_is_not_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter must be of the version that its name says, and have headers."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    found = build_wheel.find_python(build_wheel.OWN)
    assert found is None or found.is_file()
    folder = tmp_path / "versions" / "3.14.1" / "bin"
    folder.mkdir(parents=True)
    for said, is_found in (("3 13 {}", False), ("3 14 /nonexistent", False), ("3 14 {}", True)):
        (tmp_path / "Python.h").touch()
        (folder / "python").write_text(f"#!/bin/sh\necho {said.format(tmp_path)}\n")
        (folder / "python").chmod(0o755)
        assert build_wheel.find_python("3.14") == (folder / "python" if is_found else None)


@pytest.mark.parametrize(
    ("tags", "size", "why"),
    [
        ("manylinux_2_27_x86_64", 8_000_000, None),
        ("manylinux_2_31_x86_64.manylinux_2_28_x86_64", 1, None),
        ("manylinux_2_34_x86_64", 1, "it needs glibc 2.34, where 2.28 is accepted"),
        ("manylinux_2_27_x86_64", 8_000_001, "it has 8000001 bytes, where 8000000 are accepted"),
    ],
)
def test_wheel_that_cannot_be_published(tags: str, size: int, why: str | None, tmp_path: Path) -> None:
    file = tmp_path / f"txl_kernels-0.1.0-py3-none-{tags}.whl"
    file.touch()
    with file.open("r+b") as opened:
        opened.truncate(size)
    assert build_wheel.why_not_published(file) == why
