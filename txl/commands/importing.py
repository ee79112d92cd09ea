"""`txl import`: checkpoints of other code."""

from pathlib import Path
from typing import Annotated

import typer

from txl.commands.options import say
from txl.errors import TxlError
from txl.importing.checkpoint import convert


def import_command(
    source: Annotated[Path, typer.Argument(help="A folder with config.json, as transformers saves TransfoXL.")],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    vocabulary: Annotated[
        Path | None, typer.Option(help="Its words: vocab.pkl, vocab.bin, or a text file; default: from the folder.")
    ] = None,
) -> None:
    """Turn a checkpoint of Hugging Face's TransfoXL into one of ours. Nothing in it is executed."""
    if out.exists():
        raise TxlError(f"{out}: exists already; choose another file")
    if out.suffix != ".safetensors":
        raise TxlError(f"{out}: the file to write must end in .safetensors")
    model = convert(source, out, vocabulary)
    count = sum(p.numel() for p in model.parameters())
    say(f"{out}: {count / 1e6:.2f}M parameters, {model.config.n_layer} layers, {model.config.vocab_size:,} tokens")
