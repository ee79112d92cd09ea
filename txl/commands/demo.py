"""`txl demo`: train a small model, measure the gain from memory, and sample."""

import dataclasses
import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from txl import recipes
from txl.commands.console import Device, console, evaluation_progress, pick_device, say, without_bar
from txl.commands.train import draw_loss, header, run_training
from txl.errors import TxlError
from txl.evaluation.evaluate import Reading, Score, make_reader, resolve
from txl.evaluation.generate import Sampling
from txl.evaluation.readers import Reader
from txl.language_model import LanguageModel, load
from txl.pictures import draw_lengths
from txl.text import corpus as data
from txl.text.vocabulary import Tokens
from txl.training import run as runs
from txl.training.trainer import Trainer

EVAL_TOKENS = 32768
SAMPLE_BYTES = 400
ROUNDS = 5  # of the measurement of time
DISTURBED = 1.5  # a reading whose slowest round takes so many times its fastest gets no time


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


@torch.inference_mode()
def times(saved: LanguageModel, text: Tokens, readings: Sequence[Reading]) -> list[float | None]:
    """Return the seconds that a token takes by each reading, in one stream that has filled its
    memory: the fastest of ROUNDS rounds, in each of which all readings do one step.

    None for a reading whose rounds differ by more than DISTURBED, because of other work.
    """
    steps: list[tuple[Reader, Tensor]] = []
    found: list[list[float]] = []
    for reading in readings:
        reader = make_reader(saved.model, 1, resolved := resolve(reading, saved.model))
        enough = text[: resolved.attn_len + resolved.segment + 1]
        tokens = data.as_tensor(enough).to(saved.model.device).unsqueeze(0)
        reader.feed(tokens[:, :-1])
        steps.append((reader, tokens[:, -resolved.segment - 1 :]))
        found.append([])
    with evaluation_progress("time of a token", ROUNDS + 1) as progress:
        for done in range(ROUNDS + 1):
            for (reader, tokens), taken in zip(steps, found, strict=True):
                began = time.perf_counter()
                float(reader.nll(tokens[:, :-1], tokens[:, 1:]).sum())  # waits for the device
                taken.append((time.perf_counter() - began) / (tokens.size(1) - 1))
            progress(done + 1)
    rounds = [taken[1:] for taken in found]  # first calls are slow
    return [min(taken) if max(taken) <= DISTURBED * min(taken) else None for taken in rounds]


def show_lengths(saved: LanguageModel, corpus: data.Corpus, tgt_len: int) -> list[Score]:
    """Show the loss of the test split without memory, read in two ways, then with a cache at
    several attention lengths; return the scores of the latter.

    Without memory, the first tokens of a segment see almost no keys (context fragmentation, section
    1 of the paper). A window that slides by a sixteenth of its length avoids that without a longer
    context, so any gain of memory over it comes from the longer context. The last sentence compares
    the longest cache with a window of its length for each token, as the vanilla model of the
    paper's Table 9 is evaluated.
    """
    trained, stride = saved.attn_len, max(tgt_len // 16, 1)
    lengths = [trained // 16, trained // 8, trained // 4, trained // 2, trained, 2 * trained, 4 * trained]
    readings = [
        (f"no memory, segments of {tgt_len}", Reading(tgt_len, method="sliding", segment=tgt_len)),
        (f"no memory, window moved by {stride}", Reading(tgt_len, method="sliding", segment=stride)),
        *(("cached memory" + " (training)" * (n == trained), Reading(n, method="cached")) for n in lengths),
    ]
    say("Measuring what memory is worth, on the test split")
    columns = "read", "attention\nlength", "bpc", "gain over\nsegments", "time of\na token"
    table = Table(*columns, title="What memory is worth (test split)")
    for column in table.columns[1:]:
        column.justify = "right"
    scores: list[Score] = []
    for name, reading in readings:
        with evaluation_progress(f"{name}, {reading.attn_len}", min(EVAL_TOKENS, len(corpus.test))) as progress:
            scores.append(saved.evaluate(corpus.test, reading, limit=EVAL_TOKENS, progress=progress))
        if without_bar():
            say(f"{name}, attention length {scores[-1].attn_len}: {scores[-1].bpc:.3f} bpc")
    vanilla = Reading(lengths[-1], method="sliding", segment=1)
    first, *others, per_window = times(saved, corpus.test, [reading for _, reading in readings] + [vanilla])
    for n, ((name, _), s, taken) in enumerate(zip(readings, scores, [first, *others], strict=True)):
        gain = f"{scores[0].bpc - s.bpc:+.3f}" if n else ""
        ratio = "rounds differ" if first is None or taken is None else f"{taken / first:.2f}x"
        table.add_row(name, str(s.attn_len), f"{s.bpc:.3f}", gain, ratio)
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
    at = f"at attention length {lengths[-1]:,}"
    if per_window is None or others[-1] is None:
        lines.append(f"How much faster cached memory is {at} is left out: other work disturbed the measurement.")
    else:
        ratio = f"{per_window / others[-1]:,.0f} times as fast as the paper's vanilla evaluation"
        lines.append(f"Cached memory is {ratio} {at}, measured here.")
    say(" ".join(lines))
    return cached


def _gains(before: Score, after: Score) -> str:
    change = round(before.bpc - after.bpc, 3)
    return f"{'gains' if change >= 0 else 'loses'} {abs(change):.3f} bpc"
