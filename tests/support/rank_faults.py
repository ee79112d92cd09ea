"""What ranks do in the tests of errors: each says which one it got."""

import os
from pathlib import Path
from typing import Any

from training_helpers import trainer

from txl import distributed
from txl.distributed import World
from txl.text import corpus as data


def start_each(
    world: World, folder: Path, corpora: list[Path], cases: dict[str, list[dict[str, Any]]]
) -> dict[str, str]:
    """Of each case, with options a rank: why the trainer refused it. All raise, none waits."""
    found = {}
    for name, options in cases.items():
        own = dict(options[world.rank])
        corpus = data.load(corpora[own.pop("corpus", 0)])
        code = distributed.code_digest
        if own.pop("other_code", False):
            distributed.code_digest = lambda: "another"
        try:
            trainer(folder / name, corpus, world=world, **own)
            found[name] = "nothing was refused"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        finally:
            distributed.code_digest = code
    return found


def agree(world: World) -> dict[str, Any]:
    """How a world deals rows, sums, gathers, and passes errors on."""
    told: dict[str, Any] = {"rows": [world.rows(n) for n in (0, 1, 5, 8)], "gathered": world.gather(world.rank * 10)}
    told["first"] = world.first_does(lambda: os.getpid()) == world.gather(os.getpid())[0]
    for name, culprit in (("rank 0", 0), ("rank 1", 1)):
        try:
            with world.together(), world.together():
                if world.rank == culprit:
                    raise OSError("no such disk")
            told[name] = "nothing"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    try:  # one is still before a question that the other has left with an error
        with world.together():
            if world.rank == 1:
                raise OSError("too early")
            world.gather("a question")
    except Exception as error:
        told["early"] = str(error)
    return told
