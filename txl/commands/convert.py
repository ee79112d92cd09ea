"""`txl import` and `txl export`: checkpoints from and for other code."""

import os
from pathlib import Path
from typing import Annotated

import typer

from txl.commands.console import Checkpoint, in_panel, say
from txl.errors import TxlError
from txl.importing.checkpoint import convert, export
from txl.importing.names import Lengths

_TENSORFLOW = "What a TensorFlow checkpoint does not say"


def import_command(
    source: Annotated[
        Path,
        typer.Argument(
            help="Of transformers' TransfoXL the folder; of the original code model.pt, or TensorFlow's as safetensors; of "
            "NVIDIA's examples checkpoint_best.pt."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    vocabulary: Annotated[
        Path | None,
        typer.Option(help="Its words: vocab.pkl, vocab.bin, cache.pkl, or a text file; default: from beside it."),
    ] = None,
    mem_len: Annotated[
        int | None, in_panel(_TENSORFLOW, help="Tokens of memory; needed.", show_default=False, min=0)
    ] = None,
    segment: Annotated[
        int | None,
        in_panel(
            _TENSORFLOW, help="Tokens of training's segments (tgt_len); default: mem-len.", show_default=False, min=1
        ),
    ] = None,
    clamp_len: Annotated[
        int | None,
        in_panel(
            _TENSORFLOW,
            help="Largest distinct distance; default: no limit.",
            show_default=False,
            min=1,
        ),
    ] = None,
    same_length: Annotated[
        bool, in_panel(_TENSORFLOW, "--same-length", help="Each token sees mem-len + 1 keys.", show_default=False)
    ] = False,
) -> None:
    """Turn a checkpoint of other code into one of ours. Nothing in it is executed."""
    if out.suffix != ".safetensors":
        raise TxlError(f"{out}: the file to write must end in .safetensors")
    if os.path.lexists(out):
        raise TxlError(f"{out}: exists already; choose another file")
    lengths = Lengths(mem_len, segment, clamp_len, same_length)
    read, model, _ = convert(source, out, vocabulary, lengths)
    c, count = model.config, sum(p.numel() for p in model.parameters())
    say(f"{out}: from {read}, {count / 1e6:.2f}M parameters, {c.n_layer} layers, {c.vocab_size:,} tokens")


def export_command(checkpoint: Checkpoint, out: Annotated[Path, typer.Argument(help="The folder to write.")]) -> None:
    """Turn one of our checkpoints into a folder as transformers up to 4.x saves TransfoXL."""
    export(checkpoint, out)
    say(f"{out}: config.json, model.safetensors, vocab.txt")
