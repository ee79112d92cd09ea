"""What processes must have in common before they begin."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

import txl
import txl_kernels
from txl.distributed.world import World
from txl.text.corpus import Corpus


def agree_on(world: World, corpus: Corpus, model: dict[str, Any], train: dict[str, Any], shard: bool) -> None:
    """Compares code, corpus and configurations of all processes.

    Raises:
        SharedError: they differ, in what is named.
    """
    if world.size == 1:
        return
    facts = {"torch": torch.__version__, "the code of txl": code_digest(), "the corpus": corpus.fingerprint[:16]}
    facts |= {f"the model's {name}": json.dumps(value) for name, value in model.items()}
    facts |= {f"training's {name}": json.dumps(value) for name, value in train.items()}
    world.agree(facts | {"--shard": str(shard)})


@cache
def code_digest() -> str:
    """Of every source file of both packages, whatever their version says."""
    digest = hashlib.sha256()
    for package in (txl, txl_kernels):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
