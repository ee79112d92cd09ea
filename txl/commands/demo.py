"""`txl demo`: train a small model, measure the gain from memory, and sample."""

import dataclasses
import math
import shlex
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from txl import pictures, recipes
from txl.commands import options
from txl.commands.console import EvaluationProgress
from txl.commands.options import console
from txl.commands.training import draw_loss, header, run_training
from txl.errors import TxlError
from txl.evaluation.evaluate import Reading, Score, evaluate
from txl.evaluation.generate import Sampling, generate
from txl.evaluation.readers import Engine
from txl.model import as_transformer
from txl.model.config import ModelConfig
from txl.model.transformer import TransformerXL
from txl.paths import AnyPath
from txl.precision import resolved
from txl.text import corpus as data
from txl.training import checkpoint as checkpoints
from txl.training import run as runs
from txl.training.trainer import Trainer

EVAL_TOKENS = 32768
SAMPLE_BYTES = 400


def run(folder: AnyPath, source: AnyPath | None, minutes: float, device_name: str = "auto") -> None:
    """Run the demo in a new run folder; minutes: time for training."""
    device = options.pick_device(device_name)
    if not 0 < minutes < math.inf:
        raise TxlError(f"--minutes must be > 0 and finite, got {minutes}")
    folder = Path(folder)
    runs.begin(folder)
    began = time.perf_counter()
    corpus = data.open_corpus(source, folder / "corpus")
    console.print(
        f"[bold]Text[/]: {escape(corpus.source)}; {len(corpus.train):,} {corpus.vocabulary.unit} to train on",
        soft_wrap=True,
    )
    recipe = recipes.load(recipes.DEFAULT)
    config = recipe.model_config(len(corpus.vocabulary))
    assert isinstance(config, ModelConfig)
    training = dataclasses.replace(recipe.train_config(), eval_tokens=16384, precision=resolved("auto", device))
    trainer = Trainer(folder, corpus, config, training, device=device)
    tgt_len = trainer.config.tgt_len
    console.print(f"[bold]Model[/]: {escape(header(trainer, minutes))}", soft_wrap=True)
    console.print(f"Segments of {tgt_len} tokens, a memory of {config.mem_len}", soft_wrap=True)
    run_training(trainer, ["--device", device_name] if device_name != "auto" else [], 60 * minutes)
    network, _ = checkpoints.restore(trainer.best, device)
    model = as_transformer(network, "txl demo")

    levels, cached = _attention_lengths(model, corpus, tgt_len)
    _sample(model, corpus, config.attn_len(tgt_len))
    drawn = _draw(trainer, levels, cached, config.attn_len(tgt_len))
    console.print(f"\n[bold]Done[/] in {(time.perf_counter() - began) / 60:.1f} minutes.")
    console.print(f"In {folder}: log.jsonl, best.safetensors; {drawn}", markup=False, soft_wrap=True)
    options.say(f"Continue with: {shlex.join(['txl', 'generate', str(folder)])}")


def _attention_lengths(model: TransformerXL, corpus: data.Corpus, tgt_len: int) -> tuple[dict[str, Score], list[Score]]:
    """Score the test split without memory in two ways, by name, then with a cache at several
    attention lengths.

    Without memory, the first tokens of a segment see almost no keys (context fragmentation, section
    1 of the paper). A window that slides by a sixteenth of its length avoids that without a longer
    context, so any gain of memory over it comes from the longer context.
    """
    trained = model.config.attn_len(tgt_len)
    lengths = [trained // 16, trained // 8, trained // 4, trained // 2, trained, 2 * trained, 4 * trained]
    stride = max(tgt_len // 16, 1)
    console.print("Measuring what memory is worth, on the test split")

    def score(told: str, reading: Reading, carry_memory: bool = True) -> Score:
        with EvaluationProgress(console, told, min(EVAL_TOKENS, len(corpus.test))) as progress:
            return evaluate(
                model, corpus.test, corpus.vocabulary.start, reading, limit=EVAL_TOKENS, carry_memory=carry_memory,
                progress=progress.update,
            )  # fmt: skip

    apart, window = f"no memory, segments of {tgt_len}", f"no memory, a window of {tgt_len} sliding by {stride}"
    levels = {
        apart: score("no memory", Reading(tgt_len, segment=tgt_len), carry_memory=False),
        window: score("a sliding window", Reading(tgt_len, method="sliding", segment=stride)),
    }
    cached = [score(f"attention length {n}", Reading(n)) for n in lengths]
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


def _sample(model: TransformerXL, corpus: data.Corpus, attn_len: int) -> None:
    engine = Engine(model, 1, attn_len, 128)
    generator = torch.Generator(model.device).manual_seed(1)
    tokens = data.as_tensor(corpus.test[:256]).unsqueeze(0).to(model.device)
    drawn = [int(t) for t in generate(engine, tokens, SAMPLE_BYTES, Sampling(0.7), generator)]
    console.rule("A sample, after 256 bytes of the test split")
    console.print(corpus.vocabulary.decode(drawn).decode("utf-8", "replace"), markup=False, highlight=False)
    console.rule()


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
    run(folder, source, minutes, device)
