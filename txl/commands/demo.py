"""`txl demo`: train a small model, measure the gain from memory, and sample."""

import dataclasses
import math
import shlex
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from txl import recipes
from txl.commands.console import Device, console, evaluation_progress, pick_device, say
from txl.commands.train import draw_loss, header, run_training
from txl.errors import TxlError
from txl.evaluation.evaluate import Method, Reading, Score, make_reader, resolve
from txl.evaluation.generate import Sampling
from txl.language_model import LanguageModel, load
from txl.pictures import draw_lengths
from txl.text import corpus as data
from txl.text.vocabulary import Tokens
from txl.training import run as runs
from txl.training.trainer import Trainer

EVAL_TOKENS = 32768
SAMPLE_BYTES = 400
SPEED_SECONDS = 6.0  # for each measurement of speed


def demo_command(
    folder: Annotated[Path, typer.Option("--run", help="Folder for the run; must not hold one yet.")] = Path(
        "runs/demo"
    ),
    source: Annotated[
        Path | None,
        typer.Option("--data", help="A text file or folder. Default: the Python standard library's sources."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for training; the rest takes about one and a half more.")] = 3.0,
    device: Device = "auto",
) -> None:
    """In about four minutes: train a small model, see what memory is worth, and a sample."""
    where = pick_device(device)
    if not 0 < minutes < math.inf:
        raise TxlError(f"--minutes must be > 0 and finite, got {minutes}")
    runs.begin(folder)
    began = time.perf_counter()
    corpus = data.open_corpus(source, folder / "corpus")
    say(f"Text: {corpus.source}; {len(corpus.train):,} {corpus.vocabulary.unit} to train on")
    recipe = recipes.load(recipes.DEFAULT)
    training = dataclasses.replace(recipe.train_config(), eval_tokens=16384)
    trainer = Trainer(folder, corpus, recipe.model_config(len(corpus.vocabulary)), training, device=where)
    say(f"Model: {header(trainer, minutes)}")
    run_training(trainer, ["--device", device] if device != "auto" else [], 60 * minutes)
    saved = load(trainer.best, where)
    cached = show_lengths(saved, corpus, training.tgt_len)
    console.rule("A sample, after 256 bytes of the test split")
    shown = saved.generate(corpus.test[:256], SAMPLE_BYTES, Sampling(0.7), seed=1)
    console.print(shown, markup=False, highlight=False)
    console.rule()
    not_drawn = draw_loss(trainer)
    say(f"\nDone in {(time.perf_counter() - began) / 60:.1f} minutes.")
    drawn = ""
    if not_drawn is None:
        draw_lengths([(s.attn_len, s.bpc) for s in cached], folder / "memory.png")
        drawn = ", loss.png, memory.png"
    say(f"In {folder}: log.jsonl, best.safetensors{drawn}")
    if not_drawn:
        say(f"loss.png and memory.png were left out: {not_drawn}")
    say(f"Continue with: {shlex.join(['txl', 'generate', str(folder)])}")
    attn_len = cached[-1].attn_len
    ratio = speed(saved, corpus.test, "cached", attn_len) / speed(saved, corpus.test, "sliding", attn_len)
    say(
        f"Cached memory is {ratio:,.0f} times as fast as the paper's vanilla evaluation at attention length {attn_len:,}, "
        "measured here."
    )


@torch.inference_mode()
def speed(saved: LanguageModel, text: Tokens, method: Method, attn_len: int) -> float:
    """Return the tokens a second that are scored in one stream, each of which sees attn_len keys:
    the median of the steps within SPEED_SECONDS.

    method: "cached"; or "sliding", which computes the window of each token anew, as the vanilla
    model of the paper's Table 9 is evaluated.
    """
    reading = resolve(Reading(attn_len, method), saved.model)
    reader = make_reader(saved.model, 1, reading)
    tokens = data.as_tensor(text[: attn_len + 1]).to(saved.model.device).unsqueeze(0)
    reader.feed(tokens[:, :-1])
    segment = tokens[:, -reading.segment - 1 :]
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < SPEED_SECONDS:
        since = time.perf_counter()
        float(reader.nll(segment[:, :-1], segment[:, 1:]).sum())  # waits for the device
        times.append(time.perf_counter() - since)
    return (segment.size(1) - 1) / statistics.median(times)


def show_lengths(saved: LanguageModel, corpus: data.Corpus, tgt_len: int) -> list[Score]:
    """Show the loss of the test split without memory, read in two ways, then with a cache at
    several attention lengths; return the scores of the latter.

    Without memory, the first tokens of a segment see almost no keys (context fragmentation, section
    1 of the paper). A window that slides by a sixteenth of its length avoids that without a longer
    context, so any gain of memory over it comes from the longer context.
    """
    trained, stride = saved.attn_len, max(tgt_len // 16, 1)
    lengths = [trained // 16, trained // 8, trained // 4, trained // 2, trained, 2 * trained, 4 * trained]
    readings = [
        (f"no memory, segments of {tgt_len}", Reading(tgt_len, method="sliding", segment=tgt_len)),
        (f"no memory, window moved by {stride}", Reading(tgt_len, method="sliding", segment=stride)),
        *(("cached memory" + " (training)" * (n == trained), Reading(n, method="cached")) for n in lengths),
    ]
    say("Measuring what memory is worth, on the test split")
    columns = "read", "attention\nlength", "bpc", "gain over\nsegments"
    table = Table(*columns, title="What memory is worth (test split)")
    for column in table.columns[1:]:
        column.justify = "right"
    scores: list[Score] = []
    for name, reading in readings:
        with evaluation_progress(f"{name}, {reading.attn_len}", min(EVAL_TOKENS, len(corpus.test))) as progress:
            s = saved.evaluate(corpus.test, reading, limit=EVAL_TOKENS, progress=progress)
        gain = f"{scores[0].bpc - s.bpc:+.3f}" if scores else ""
        table.add_row(name, str(s.attn_len), f"{s.bpc:.3f}", gain)
        scores.append(s)
    console.print(table)
    bare, slid, *cached = scores
    best = min(cached, key=lambda s: s.nats)
    lines = [
        f"On the first {bare.tokens:,} tokens, memory {_gains(bare, best)} over segments without it, at its best attention "
        f"length, {best.attn_len:,}.",
        f"The window, in which no token begins blind (context fragmentation), {_gains(bare, slid)} and pays with its speed.",
    ]
    if best.attn_len > tgt_len:
        lines.append(f"Memory, which reaches further than a segment, {_gains(slid, best)} over the window.")
    say(" ".join(lines))
    return cached


def _gains(before: Score, after: Score) -> str:
    change = round(before.bpc - after.bpc, 3)
    return f"{'gains' if change >= 0 else 'loses'} {abs(change):.3f} bpc"
