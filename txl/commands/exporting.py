"""`txl export`: checkpoints for other code."""

from pathlib import Path
from typing import Annotated

import typer

from txl.commands.options import Checkpoint, say
from txl.errors import TxlError
from txl.importing.checkpoint import export


def export_command(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    form: Annotated[str, typer.Option("--format", help="huggingface: as transformers up to 4.x saves TransfoXL.")],
) -> None:
    """Turn one of our checkpoints into one that other code reads."""
    if form != "huggingface":
        raise TxlError(f"--format must be huggingface, got {form!r}")
    export(checkpoint, out)
    say(f"{out}: config.json, model.safetensors, vocab.txt")
