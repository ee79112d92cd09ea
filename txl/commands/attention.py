"""`txl attention`: what a model's heads attend to, as the paper's figures and as a page."""

import io
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from txl.attention import figures
from txl.attention.averages import Averages
from txl.attention.moment import Moment
from txl.attention.page import write_page
from txl.attention.reading import check_attention, read_terms
from txl.commands.console import EvaluationProgress
from txl.commands.evaluate import split_of
from txl.commands.options import Checkpoint, Device, console, in_panel, numbers, pick_device, say
from txl.errors import TxlError
from txl.language_model import load
from txl.model.transformer import TransformerXL
from txl.paths import make_folder, replace_bytes, replace_text
from txl.pictures import missing

_TEXT, _PICTURES = "Text", "Pictures"
LONGEST_PAGE = 64 << 20  # weights of a page


def attention_command(
    checkpoint: Checkpoint,
    source: Annotated[
        Path | None, in_panel(_TEXT, "--data", help="A prepared corpus, or a text file. Default: the run's.")
    ] = None,
    split: Annotated[str, in_panel(_TEXT, help="train, valid or test, of a corpus.")] = "valid",
    limit: Annotated[
        int, in_panel(_TEXT, help="Read only the first so many tokens; the paper read its whole validation set.")
    ] = 65536,
    window: Annotated[
        int | None,
        in_panel(_PICTURES, help="Keys a token sees, itself included. Default: as in training.", show_default=False),
    ] = None,
    clamp_len: Annotated[
        int | None, in_panel(_PICTURES, help="Largest distance told apart. Default: the model's.", show_default=False)
    ] = None,
    heads: Annotated[
        str | None,
        in_panel(
            _PICTURES,
            help="Of figure 6, counted from 1 over all layers, as 8,78,158. Default: of the first, the middle and the last "
            "layer the one with the widest attention.",
            show_default=False,
        ),
    ] = None,
    at: Annotated[
        int | None,
        in_panel(
            _PICTURES, help="First target of figure 6 and of the page. Default: in the middle.", show_default=False
        ),
    ] = None,
    targets: Annotated[int, in_panel(_PICTURES, help="Targets of figure 6 and of the page.")] = 64,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the pictures. Default: attention in the run's.", show_default=False)
    ] = None,
    device: Device = "auto",
) -> None:
    """What the heads attend to: figures 5, 6 and 7, and a page to look around in.

    Of every token whose window is whole. Memory does not grow with the text.
    """
    reason = missing()
    if reason is not None:
        raise TxlError(reason)
    for name, value, least in (("window", window, 2), ("targets", targets, 1), ("limit", limit, 1)):
        if value is not None and value < least:
            raise TxlError(f"--{name} must be >= {least}, got {value}")
    language_model = load(checkpoint, pick_device(device))
    model = check_attention(language_model.model)
    window = max(language_model.attn_len, 2) if window is None else window
    chosen = None if heads is None else _heads(heads, model)
    tokens = split_of(language_model, source, split)[:limit]
    if len(tokens) < window + targets:
        raise TxlError(
            f"the text has {len(tokens):,} tokens; a window of {window:,} and {targets:,} targets need "
            f"{window + targets:,}: use a longer text, or smaller --window or --targets"
        )
    first = (len(tokens) + window - targets) // 2 if at is None else at
    if not window <= first <= len(tokens) - targets:
        raise TxlError(f"--at must be from {window} to {len(tokens) - targets}, got {first}")
    sizes = model.config.n_layer, model.config.n_head, window
    if sizes[0] * sizes[1] * targets * window > LONGEST_PAGE:
        fits = LONGEST_PAGE // (sizes[0] * sizes[1] * window)
        raise TxlError(f"--targets {targets} of {sizes[0] * sizes[1]} heads make too large a page; at most {fits}")
    folder = out or language_model.path.parent / "attention"
    make_folder(folder, "--out")
    averages, moment = Averages(*sizes), Moment(*sizes, first, targets)
    with EvaluationProgress(console, "attention", len(tokens)) as progress:
        for layers in read_terms(model, tokens, language_model.vocabulary.start, window, clamp_len):
            averages.add(layers)
            moment.add(layers)
            progress.update(layers[0].first + layers[0].terms.content.size(1))
    if chosen is None:
        chosen = [averages.widest(layer) for layer in sorted({0, sizes[0] // 2, sizes[0] - 1})]
    figures.draw_average(averages, folder / "figure-5.png")
    figures.draw_heads(moment, chosen, folder / "figure-6.png")
    figures.draw_terms(averages, folder / "figure-7.png")
    text = f"of {source}" if source is not None and source.is_file() else f"of the {split} split"
    about = {
        "title": f"Attention of {language_model.path.parent.name or language_model.path.name}",
        "text": f"{language_model.path}: {sizes[0]} layers of {sizes[1]} heads, a window of {window:,}; targets {first:,} "
        f"to {first + targets - 1:,} {text}",
    }  # fmt: skip
    write_page(folder / "attention.html", moment, tokens, language_model.vocabulary, about)
    settings = {"checkpoint": language_model.digest, "window": window, "clamp_len": clamp_len, "tokens": len(tokens)}
    settings |= {"heads_of_figure_6": [head + 1 for head in chosen], "first_target": first, "targets": targets}
    replace_text(folder / "attention.json", json.dumps(settings, indent=2) + "\n")
    drawn: dict[str, Any] = {name: x.numpy() for name, x in figures.data(averages, moment, chosen).items()}
    file = io.BytesIO()
    np.savez_compressed(file, **drawn)
    replace_bytes(folder / "attention.npz", file.getvalue())
    say(
        f"{averages.queries:,} tokens with windows of {window:,}; heads {', '.join(str(h + 1) for h in chosen)} in figure 6"
    )
    say(f"in {folder}: figure-5.png, figure-6.png, figure-7.png, their numbers in attention.npz; attention.html")


def _heads(text: str, model: TransformerXL) -> list[int]:
    """From 0, of numbers from 1."""
    count = model.config.n_layer * model.config.n_head
    chosen = numbers("--heads", text)
    if any(not 1 <= n <= count for n in chosen):
        raise TxlError(f"--heads must be from 1 to {count}, got {text}")
    return [n - 1 for n in chosen]
