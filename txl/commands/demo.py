"""`txl demo`: train a small model, measure the gain from memory, and sample."""

import dataclasses
import math
import shlex
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from txl import pictures, recipes
from txl.commands import options
from txl.commands.console import EvaluationProgress
from txl.commands.options import console
from txl.commands.training import draw_loss, header, run_training
from txl.errors import TxlError
from txl.evaluation.evaluate import Reading, Score
from txl.evaluation.generate import Sampling
from txl.language_model import LanguageModel, load
from txl.text import corpus as data
from txl.training import run as runs
from txl.training.trainer import Trainer

EVAL_TOKENS = 32768
SAMPLE_BYTES = 400


def demo_command(
    folder: Annotated[Path, typer.Option("--run", help="Folder for the run; must not hold one yet.")] = Path(
        "runs/demo"
    ),
    source: Annotated[
        Path | None,
        typer.Option("--data", help="A text file or folder. Default: the Python standard library's sources."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for training; the rest takes about one more.")] = 3.0,
    device: options.Device = "auto",
) -> None:
    """In about four minutes: train a small model, see what memory is worth, and a sample."""
    where = options.pick_device(device)
    if not 0 < minutes < math.inf:
        raise TxlError(f"--minutes must be > 0 and finite, got {minutes}")
    runs.begin(folder)
    began = time.perf_counter()
    corpus = data.open_corpus(source, folder / "corpus")
    options.say(f"Text: {corpus.source}; {len(corpus.train):,} {corpus.vocabulary.unit} to train on")
    recipe = recipes.load(recipes.DEFAULT)
    training = dataclasses.replace(recipe.train_config(), eval_tokens=16384)
    trainer = Trainer(folder, corpus, recipe.model_config(len(corpus.vocabulary)), training, device=where)
    options.say(f"Model: {header(trainer, minutes)}")
    run_training(trainer, ["--device", device] if device != "auto" else [], 60 * minutes)
    saved = load(trainer.best, where)
    levels, cached = _attention_lengths(saved, corpus, training.tgt_len)
    console.rule("A sample, after 256 bytes of the test split")
    shown = saved.generate(corpus.test[:256], SAMPLE_BYTES, Sampling(0.7), seed=1)
    console.print(shown, markup=False, highlight=False)
    console.rule()
    drawn = _draw(trainer, levels, cached, saved.attn_len)
    options.say(f"\nDone in {(time.perf_counter() - began) / 60:.1f} minutes.")
    options.say(f"In {folder}: log.jsonl, best.safetensors; {drawn}")
    options.say(f"Continue with: {shlex.join(['txl', 'generate', str(folder)])}")


def _attention_lengths(saved: LanguageModel, corpus: data.Corpus, tgt_len: int) -> tuple[dict[str, Score], list[Score]]:
    """Score the test split without memory in two ways, by name, then with a cache at several
    attention lengths.

    Without memory, the first tokens of a segment see almost no keys (context fragmentation, section
    1 of the paper). A window that slides by a sixteenth of its length avoids that without a longer
    context, so any gain of memory over it comes from the longer context.
    """
    trained, stride = saved.attn_len, max(tgt_len // 16, 1)
    lengths = [trained // 16, trained // 8, trained // 4, trained // 2, trained, 2 * trained, 4 * trained]
    options.say("Measuring what memory is worth, on the test split")

    def score(told: str, reading: Reading) -> Score:
        with EvaluationProgress(console, told, min(EVAL_TOKENS, len(corpus.test))) as progress:
            return saved.evaluate(corpus.test, reading, limit=EVAL_TOKENS, progress=progress.update)

    apart, window = f"no memory, segments of {tgt_len}", f"no memory, a window of {tgt_len} sliding by {stride}"
    levels = {
        apart: score("no memory", Reading(tgt_len, method="sliding", segment=tgt_len)),
        window: score("a sliding window", Reading(tgt_len, method="sliding", segment=stride)),
    }
    cached = [score(f"attention length {n}", Reading(n, method="cached")) for n in lengths]
    _show_lengths(levels, cached, trained)
    return levels, cached


def _show_lengths(levels: dict[str, Score], cached: list[Score], trained: int) -> None:
    bare, slid = levels.values()
    table = Table(
        "read", "attention length", "bpc", "gain over segments", "tokens/s", title="What memory is worth (test split)"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, s in [*levels.items(), *(("cached memory", score) for score in cached)]:
        length = f"{s.attn_len}" + (" (training)" if name == "cached memory" and s.attn_len == trained else "")
        gain = "" if s is bare else f"{bare.bpc - s.bpc:+.3f}"
        table.add_row(name, length, f"{s.bpc:.3f}", gain, f"{s.tokens_per_s:,.0f}")
    console.print(table)
    best = min(cached, key=lambda s: s.nats)
    options.say(
        f"On the first {bare.tokens:,} tokens, memory gains {bare.bpc - best.bpc:.3f} bpc over segments without it: "
        f"{bare.bpc - slid.bpc:.3f} because no token begins blind (context fragmentation), {slid.bpc - best.bpc:.3f} "
        "because it reaches further than a segment. The window pays for the first with its speed."
    )


def _draw(trainer: Trainer, levels: dict[str, Score], cached: list[Score], trained: int) -> str:
    """Draw both charts and return a line that names them, or the reason why there are none."""
    reason = draw_loss(trainer)
    if reason is None:
        lengths, lines = {s.attn_len: s.bpc for s in cached}, {name: s.bpc for name, s in levels.items()}
        try:
            pictures.draw_attention_lengths(lengths, lines, trained, trainer.folder / "attention_length.png", "bpc")
        except OSError as error:
            reason = str(error)
    return "loss.png, attention_length.png" if reason is None else f"the pictures were left out: {reason}"
