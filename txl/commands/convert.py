"""`txl import`, `txl export`, `txl average`: make a checkpoint from others."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from txl.commands.options import Checkpoint, in_panel, say
from txl.errors import TxlError
from txl.importing.checkpoint import convert, export
from txl.importing.names import Lengths
from txl.model import make_network
from txl.paths import remove_leftovers
from txl.training import checkpoint as checkpoints
from txl.training.run import not_training

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
        in_panel(_TENSORFLOW, help="Largest distance told apart; default: no limit.", show_default=False, min=1),
    ] = None,
    same_length: Annotated[
        bool, in_panel(_TENSORFLOW, "--same-length", help="Each token sees mem-len + 1 keys.", show_default=False)
    ] = False,
) -> None:
    """Turn a checkpoint of other code into one of ours. Nothing in it is executed."""
    if out.suffix != ".safetensors":
        raise TxlError(f"{out}: the file to write must end in .safetensors")
    lengths = Lengths(mem_len, segment, clamp_len, same_length)
    with _new_file(out):
        read, model, _ = convert(source, out, vocabulary, lengths)
    c, count = model.config, sum(p.numel() for p in model.parameters())
    say(f"{out}: from {read}, {count / 1e6:.2f}M parameters, {c.n_layer} layers, {c.vocab_size:,} tokens")


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


def average_command(
    files: Annotated[list[Path], typer.Argument(help="Checkpoints or run folders of the same model, two or more.")],
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
) -> None:
    """Average the parameters of checkpoints, as the released ones may have been."""
    if len(files) < 2:
        raise TxlError(f"txl average takes two checkpoints or more, got {len(files)}")
    with _new_file(out):
        _average(files, out)


@contextmanager
def _new_file(out: Path) -> Iterator[None]:
    """Lock the folder of a new checkpoint while the block runs, if it is a run's folder, and remove
    leftovers of killed writers there.

    Raises:
        TxlError: the file exists already, or another process trains there.
    """
    with not_training(out.parent):
        if os.path.lexists(out):
            raise TxlError(f"{out}: exists already; choose another file")
        remove_leftovers(out.parent, ".safetensors")
        yield


def _average(files: list[Path], out: Path) -> None:
    loaded = [checkpoints.load(path) for path in files]
    first = loaded[0]
    for other in loaded[1:]:
        if other.config != first.config:
            raise TxlError(f"{other.path}: is of another model than {first.path}")
        if other.vocabulary != first.vocabulary:
            raise TxlError(f"{other.path}: has another vocabulary than {first.path}")
    parts = [each.part("model") for each in loaded]
    # The mean is computed in float64 and stored in the parameters' dtype.
    mean = {
        name: torch.stack([part[name].double() for part in parts]).mean(0).to(x.dtype) for name, x in parts[0].items()
    }
    model = make_network(first.config)
    checkpoints.load_parameters(model, first, mean)
    state = {"attn_len": first.attn_len, "segment": first.segment, "averaged": [str(x.path) for x in loaded]}
    checkpoints.save(out, model, first.vocabulary, state, {})
    say(f"{out}: the mean of {len(loaded)} checkpoints")
