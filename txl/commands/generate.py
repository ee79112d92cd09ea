"""`txl generate`: a text goes on."""

import os
import sys
from typing import Annotated

import torch

from txl.commands.options import Checkpoint, Device, in_panel, pick_device
from txl.errors import TxlError
from txl.evaluation.engine import Engine
from txl.evaluation.evaluate import default_method
from txl.evaluation.generate import Sampling, generate
from txl.evaluation.reader import Reader
from txl.evaluation.window import WindowReader
from txl.model.transformer import TransformerXL
from txl.text import compressed
from txl.text import corpus as data
from txl.training import checkpoint as checkpoints

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
    model, saved = checkpoints.restore(checkpoint, pick_device(device))
    vocabulary = saved.vocabulary
    text = b"" if prompt is None else _prompt(prompt)
    known = torch.tensor([vocabulary.start]) if prompt is None else data.as_tensor(vocabulary.encode(text))
    tokens = known.unsqueeze(0).to(model.device)
    generator = torch.Generator(model.device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    if attn_len is not None and attn_len > 0:  # no token sees more than there is
        attn_len = min(attn_len, tokens.size(1) + count)
    reader = _reader(model, attn_len, saved)
    write = sys.stdout.buffer
    write.write(text)
    before = int(tokens[0, -1]) if tokens.size(1) else 0  # generate refuses an empty prompt
    for n, token in enumerate(generate(reader, tokens, count, sampling, generator)):
        drawn = int(token)
        shown = vocabulary.decode([before, drawn])[len(vocabulary.decode([before])) :]
        apart = vocabulary.unit == "words" and (not text or text[-1:].isspace())  # no space is wanted before it
        write.write(shown.lstrip(b" ") if n == 0 and apart else shown)
        write.flush()
        before = drawn
    write.write(b"\n")
    write.flush()


def _reader(model: TransformerXL, attn_len: int | None, saved: checkpoints.Checkpoint) -> Reader:
    """Cached; or a window, with absolute positions or without recurrence, by default as long as
    training's segments."""
    if default_method(model) == "cached":
        return Engine(model, 1, saved.attn_len if attn_len is None else attn_len, 128)
    return WindowReader(model, 1, saved.segment if attn_len is None else attn_len)


def _prompt(prompt: str) -> bytes:
    if not prompt.startswith("@"):
        return os.fsencode(prompt)  # the bytes that were typed, UTF-8 or not
    return compressed.read(prompt[1:]).data
