"""What processes that read a text together must have in common."""

from collections.abc import Mapping

import torch

from txl.distributed.same import code_digest
from txl.distributed.world import World
from txl.text.vocabulary import Tokens, content


def agree_on_reading(
    world: World, checkpoints: Mapping[str, str], tokens: Tokens, options: Mapping[str, object]
) -> None:
    """Compares code, models, the text and how it is read, of all processes.

    checkpoints: digests of what was loaded, by name; "" for the only one.

    Raises:
        SharedError: they differ, in what is named.
    """
    if world.size == 1:
        return
    facts = {"torch": torch.__version__, "the code of txl": code_digest(), "the text": content(tokens)[:16]}
    facts |= {f"the checkpoint {name}".rstrip(): digest[:16] for name, digest in checkpoints.items()}
    world.agree(facts | {name: repr(value) for name, value in options.items()})
