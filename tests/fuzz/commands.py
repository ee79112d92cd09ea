"""`txl` in this process, on a small corpus and a small run; and what every command may do."""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from command_helpers import SMALL

from txl.commands import cli

TRAIN = (*SMALL, "--steps", "6", "--save-every", "2", "--eval-every", "3", "--seed", "5")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def txl(*arguments: object) -> Done:
    """The exit code and what reached the descriptors."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept, argv = [os.dup(1), os.dup(2)], sys.argv
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = 0
        try:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = ["txl", *map(str, arguments)]
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for n, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, n)
                os.close(descriptor)
            sys.argv = argv
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Done(code, *texts)


def well_behaved(done: Done) -> None:
    """Done, or refused: by one line, or by the parser with its usage."""
    assert done.returncode in (0, 1, 2), done
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    if done.returncode == 1:
        assert done.stderr.startswith("error: "), done
        assert len(done.stderr.strip().splitlines()) == 1, done
        assert len(done.stderr) < 1500, done
    if done.returncode == 2:
        assert "Usage" in done.stderr, done


def prepare(folder: Path) -> None:
    """A corpus and a run of six steps in a folder, and a text."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    lines = [f"{n:04d} follows the line that ended in {n * 7919 % 9973:04d};\n" for n in range(200)]
    (folder / "text.txt").write_text("".join(lines))
    for command in (
        ("prepare", folder / "corpus", "--data", folder / "text.txt"),
        ("train", "--run", folder / "run", "--data", folder / "corpus", *TRAIN),
    ):
        done = txl(*command)
        assert done.returncode == 0, done
