"""`txl recl`, `txl attention`: measurements of trained models, as charts."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from txl.commands.console import Checkpoint, Device, console, evaluation_progress, in_panel, numbers, pick_device, say
from txl.commands.evaluate import split_of
from txl.errors import TxlError
from txl.evaluation.evaluate import perplexity
from txl.language_model import LanguageModel, load
from txl.paper import attention_maps, recl
from txl.paths import replace_text, results_folder
from txl.pictures import missing

_TEXT, _HOW = "Text", "How"
FIGURE_RATIO = 0.1  # fraction of positions in figure 3
TARGETS = 64  # number of targets in figure 6, from the middle of the text

Data = Annotated[Path | None, in_panel(_TEXT, "--data", help="A corpus, or a text file. Default: the (first) run's.")]
Split = Annotated[str, in_panel(_TEXT, help="train, valid or test, of a corpus.")]


def recl_command(
    runs: Annotated[
        list[Path], typer.Argument(help="The group: run folders (their best checkpoints) or .safetensors files.")
    ],
    source: Data = None,
    split: Split = "test",
    samples: Annotated[int, in_panel(_TEXT, help="Positions, the same for all models.")] = 2000,
    step: Annotated[int, in_panel(_HOW, help="Tokens of the first context, and of each step.")] = 100,
    contexts: Annotated[int, in_panel(_HOW, help="Contexts: step, 2 step, ..")] = 10,
    ratio: Annotated[
        str, in_panel(_HOW, help="Shares r of the positions, those hardest from a short context.")
    ] = "0.1,0.5,1",
    out: Annotated[Path | None, typer.Option(help="Folder for the result. Default: recl in the first run's.")] = None,
    device: Device = "auto",
) -> None:
    """Measure how far back models make use of a text: the paper's RECL, figures 3 and 4.

    Every prediction is made from exactly so many tokens and an empty state.
    """
    try:
        ratios = [float(part) for part in ratio.split(",")]
    except ValueError:
        ratios = []
    if not ratios or not all(0 < r <= 1 for r in ratios):
        raise TxlError(f"--ratio takes numbers in (0, 1] separated by commas, got {ratio!r}")
    where = pick_device(device)
    group = _group([load(path, where) for path in runs], runs)
    tokens = split_of(next(iter(group.values())), source, split)
    layout = recl.Layout(len(tokens), samples, step, contexts)
    limits = {name: recl.NetworkLosses(model).limit for name, model in group.items()}
    for name, limit in limits.items():
        if limit is not None and limit < step:
            raise TxlError(
                f"{name}: contexts begin at {step} tokens, beyond the {limit} that its absolute positions reach; "
                f"--step must be at most {limit}"
            )
        if limit is not None and limit < layout.longest:
            limits[name] = limit - limit % step
            say(f"{name}: its contexts end at {limits[name]} tokens, as its absolute positions reach {limit}")
    folder = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "recl"
    results_folder(folder, "--out")
    positions = len(layout.positions())
    if positions < samples:
        say(f"the text has {positions:,} positions {step} apart after a context of {layout.longest:,}; all are taken")
    losses, seconds = {}, {}
    for name, model in group.items():
        began = time.perf_counter()
        with evaluation_progress(name, positions) as progress:
            losses[name] = recl.measure(
                recl.NetworkLosses(model), tokens, layout, limit=limits[name], device=model.model.device,
                watch=progress,
            )  # fmt: skip
        seconds[name] = time.perf_counter() - began
    perplexities = {name: [perplexity(x) for x in values.mean(1)] for name, values in losses.items()}
    effective = {r: recl.effective_context(losses, layout.lengths, r, limits=limits) for r in ratios}
    found = {
        "models": {name: str(model.path) for name, model in group.items()}, "samples": samples, "step": step,
        "checkpoints": {name: model.digest for name, model in group.items()}, "seconds": seconds,
        "contexts": layout.lengths, "positions": positions, "limits": limits, "perplexity": perplexities,
        "effective": {r: {name: dataclasses.asdict(each) for name, each in by.items()} for r, by in effective.items()},
    }  # fmt: skip
    replace_text(folder / "recl.json", json.dumps(found, indent=2) + "\n")
    show_effective(effective, perplexities, f"RECL in tokens, {positions:,} positions, contexts to {layout.longest:,}")
    reason = missing()
    if reason is None:
        drawn = FIGURE_RATIO if FIGURE_RATIO in effective else min(effective)
        recl.draw_gains(effective[drawn], layout.lengths, drawn, folder / "figure-3.png")
        recl.draw_perplexity(perplexities, layout.lengths, folder / "figure-4.png")
    else:
        say(f"the figures were left out: {reason}")
    say(f"in {folder}: recl.json{'' if reason else ', figure-3.png, figure-4.png'}")


def _group(models: list[LanguageModel], paths: list[Path]) -> dict[str, LanguageModel]:
    """Return the models by the names of their folders or files, or by whole paths if names are not
    unique."""
    for model in models[1:]:
        if model.vocabulary != models[0].vocabulary:
            raise TxlError(f"{model.path}: its vocabulary is not that of {models[0].path}; a group needs one")
    files = [model.path.resolve() for model in models]
    if len(set(files)) < len(files):
        raise TxlError("a model is given twice: " + ", ".join(sorted({str(f) for f in files if files.count(f) > 1})))
    names = [path.resolve().name.removesuffix(".safetensors") for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return dict(zip(names, models, strict=True))


def show_effective(
    effective: dict[float, dict[str, recl.Effective]], perplexities: dict[str, list[float]], title: str
) -> None:
    table = Table("model", *[f"r = {r:g}" for r in effective], "ppl,\nshortest", "ppl,\nlongest", title=title)
    table.columns[0].overflow = "fold"  # no name is cut
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in perplexities.items():
        found = [group[name] for group in effective.values()]
        lengths = [(">= " if each.reached_end else "") + f"{each.length:,}" for each in found]
        table.add_row(Text(name), *lengths, f"{values[0]:.3f}", f"{values[-1]:.3f}")
    console.print(table)


def attention_command(
    checkpoint: Checkpoint,
    source: Data = None,
    split: Split = "valid",
    limit: Annotated[
        int, in_panel(_TEXT, help="Read only the first so many tokens; the paper read its whole validation set.")
    ] = 65536,
    window: Annotated[
        int | None, in_panel(_HOW, help="Keys a token sees, itself included. Default: as in training.")
    ] = None,
    clamp_len: Annotated[int | None, in_panel(_HOW, help="Largest distinct distance. Default: the model's.")] = None,
    heads: Annotated[
        str | None,
        in_panel(
            _HOW,
            help="Of figure 6, counted from 1 over all layers, as 8,78,158. Default: of the first, the middle and the last "
            "layer the one with the widest attention.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the pictures. Default: attention in the run's.")] = None,
    device: Device = "auto",
) -> None:
    """Show what the heads attend to: figures 5, 6 and 7.

    Of every token whose window is whole. Memory does not grow with the text.
    """
    reason = missing()
    if reason is not None:
        raise TxlError(reason)
    for name, value, minimum in (("window", window, 2), ("limit", limit, 1)):
        if value is not None and value < minimum:
            raise TxlError(f"--{name} must be >= {minimum}, got {value}")
    language_model = load(checkpoint, pick_device(device), clamp_len=clamp_len)
    model = attention_maps.check_attention(language_model.model)
    layers, n_head = model.config.n_layer, model.config.n_head
    chosen = [n - 1 for n in numbers("--heads", heads)] if heads is not None else None
    if chosen and not all(0 <= n < layers * n_head for n in chosen):
        raise TxlError(f"--heads must be from 1 to {layers * n_head}, got {heads}")
    window = max(language_model.attn_len, 2) if window is None else window
    tokens = split_of(language_model, source, split, limit)[:limit]
    if len(tokens) < window + TARGETS:
        raise TxlError(
            f"the text has {len(tokens):,} tokens; a window of {window:,} and {TARGETS} targets need "
            f"{window + TARGETS:,}: use a longer text, or a smaller --window"
        )
    first = (len(tokens) + window - TARGETS) // 2
    folder = out or language_model.path.parent / "attention"
    results_folder(folder, "--out")
    found = attention_maps.Attention(layers, n_head, window, first, TARGETS)
    with evaluation_progress("attention", len(tokens)) as progress:
        start = language_model.vocabulary.start
        for first_query, weights in attention_maps.read_weights(model, tokens, start, window):
            found.add(first_query, weights)
            progress(found.queries + window - 1)
    if chosen is None:
        chosen = [found.widest(layer) for layer in sorted({0, layers // 2, layers - 1})]
    attention_maps.draw_means(found, {"all": "Mean attention of every head"}, folder / "figure-5.png")
    attention_maps.draw_heads(found, chosen, folder / "figure-6.png")
    attention_maps.draw_means(found, attention_maps.TERMS, folder / "figure-7.png")
    say(
        f"{found.queries:,} tokens with windows of {window:,}; heads {', '.join(str(h + 1) for h in chosen)} in figure 6"
    )
    say(f"in {folder}: figure-5.png, figure-6.png, figure-7.png")
