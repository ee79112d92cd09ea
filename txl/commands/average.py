"""`txl average`: one checkpoint from several."""

from pathlib import Path
from typing import Annotated

import typer

from txl.commands.options import say
from txl.errors import TxlError
from txl.model import make_network
from txl.training import checkpoint as checkpoints
from txl.training.average import mean_of


def average_command(
    files: Annotated[list[Path], typer.Argument(help="Checkpoints or run folders of the same model, two or more.")],
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
) -> None:
    """Average the parameters of checkpoints, as the released ones may have been."""
    if len(files) < 2:
        raise TxlError(f"txl average takes two checkpoints or more, got {len(files)}")
    if out.exists():
        raise TxlError(f"{out}: exists already; choose another file")
    loaded = [checkpoints.load(path) for path in files]
    first = loaded[0]
    for other in loaded[1:]:
        if other.config != first.config:
            raise TxlError(f"{other.path}: is of another model than {first.path}")
        if other.vocabulary != first.vocabulary:
            raise TxlError(f"{other.path}: has another vocabulary than {first.path}")
    model = make_network(first.config)
    checkpoints.load_parameters(model, first, mean_of([x.part("model") for x in loaded]))
    state = {"attn_len": first.attn_len, "segment": first.segment, "averaged": [str(x.path) for x in loaded]}
    checkpoints.save(out, model, first.vocabulary, state, {})
    say(f"{out}: the mean of {len(loaded)} checkpoints")
