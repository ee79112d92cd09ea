"""`txl generate`: continue a text."""

import os
import sys
from itertools import chain
from typing import Annotated

from txl.commands.console import CheckpointOrRun, Device, Run, in_panel, one_of, pick_device
from txl.errors import TxlError
from txl.evaluation.evaluate import Reading, default_method
from txl.evaluation.generate import Sampling
from txl.language_model import load
from txl.text import files

_TEXT, _SAMPLING, _READING = "Text", "Sampling", "How it is read"


def generate_command(
    checkpoint: CheckpointOrRun = None,
    run: Run = None,
    prompt: Annotated[
        str | None,
        in_panel(
            _TEXT,
            help="Text to continue; @FILE reads it from a file, @@ begins a text with @. Default: the start of a text.",
        ),
    ] = None,
    count: Annotated[int, in_panel(_TEXT, help="Tokens to generate: bytes, or words.")] = 500,
    stop: Annotated[str | None, in_panel(_TEXT, help="End before this text, as in the tokens.")] = None,
    temperature: Annotated[
        float, in_panel(_SAMPLING, help="0 takes the likeliest token; 1 samples as the model predicts.")
    ] = 0.8,
    top_k: Annotated[int, in_panel(_SAMPLING, help="Draw from the k likeliest; 0: from all.")] = 0,
    top_p: Annotated[float, in_panel(_SAMPLING, help="Draw from the likeliest that sum to p.")] = 1.0,
    seed: Annotated[
        int | None,
        in_panel(_SAMPLING, min=0, max=2**63 - 1, help="Repeatable output. Default: another text each time."),
    ] = None,
    attn_len: Annotated[int | None, in_panel(_READING, help="Keys a token sees. Default: as in training.")] = None,
    clamp_len: Annotated[
        int | None, in_panel(_READING, help="Largest distinct distance. Default: as in training.")
    ] = None,
    zeros: Annotated[
        bool | None,
        in_panel(
            _READING,
            "--zeros/--empty",
            help="What precedes a text: zero states, attended, or nothing. Default: as in training.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Continue a text.

    With relative positions and recurrence memory and time a token are constant however long it
    gets; otherwise each token reads its window anew.
    """
    sampling, reading = Sampling(temperature, top_k, top_p), Reading(attn_len)
    saved = load(one_of(checkpoint, run), pick_device(device), clamp_len=clamp_len, zeros=zeros)
    if zeros and default_method(saved.model) != "cached":
        raise TxlError("--zeros is for a Transformer with recurrence and relative positions, which this is not")
    text = None if prompt is None else _prompt(prompt)
    pieces = saved.stream(text, count, sampling, reading, seed=seed, stop=stop)
    write = sys.stdout.buffer
    for piece in chain([text or b""], pieces, [b"\n"]):
        write.write(piece)
        write.flush()


def _prompt(prompt: str) -> bytes:
    if prompt.startswith("@") and not prompt.startswith("@@"):
        return files.read(prompt[1:])
    return os.fsencode(prompt.removeprefix("@"))  # the bytes as typed, UTF-8 or not
