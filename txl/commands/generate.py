"""`txl generate`: a text goes on."""

import os
import sys
from typing import Annotated

from txl.commands.options import Checkpoint, Device, in_panel, pick_device
from txl.errors import TxlError
from txl.evaluation.generate import Sampling
from txl.language_model import load
from txl.text import compressed

_TEXT, _SAMPLING = "Text", "Sampling"


def generate_command(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str | None, in_panel(_TEXT, help="Text to continue; @FILE reads it from a file. Default: the start of a text.")
    ] = None,
    count: Annotated[int, in_panel(_TEXT, help="Tokens to generate: bytes, or words.")] = 500,
    attn_len: Annotated[int | None, in_panel(_TEXT, help="Keys a token sees. Default: as in training.")] = None,
    temperature: Annotated[
        float, in_panel(_SAMPLING, help="0 takes the likeliest token; 1 samples as the model predicts.")
    ] = 0.8,
    top_k: Annotated[int, in_panel(_SAMPLING, help="Draw from the k likeliest; 0: from all.")] = 0,
    top_p: Annotated[float, in_panel(_SAMPLING, help="Draw from the likeliest that sum to p.")] = 1.0,
    seed: Annotated[
        int | None,
        in_panel(_SAMPLING, min=0, max=2**63 - 1, help="Repeatable output. Default: another text each time."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Continue a text.

    With relative positions and recurrence memory and time a token are constant however long it
    gets; otherwise each token reads its window anew.
    """
    if count < 1:
        raise TxlError(f"--count must be >= 1, got {count}")
    sampling = Sampling(temperature, top_k, top_p)
    language_model = load(checkpoint, pick_device(device))
    text = None if prompt is None else _prompt(prompt)
    write = sys.stdout.buffer
    write.write(text or b"")
    for piece in language_model.stream(text, count, sampling, attn_len=attn_len, seed=seed):
        write.write(piece)
        write.flush()
    write.write(b"\n")
    write.flush()


def _prompt(prompt: str) -> bytes:
    if not prompt.startswith("@"):
        return os.fsencode(prompt)  # the bytes that were typed, UTF-8 or not
    return compressed.read(prompt[1:]).data
