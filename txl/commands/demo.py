"""`txl demo`: trains a small model, measures what memory and caching are worth, and samples."""

import dataclasses
import math
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.markup import escape
from rich.table import Table

from txl import recipes
from txl.commands import options, plots
from txl.commands.console import MeasuringProgress
from txl.commands.header import header
from txl.commands.options import console
from txl.commands.prompt import prompt_of
from txl.commands.train import timed
from txl.commands.training import draw_loss, restated, run_training
from txl.errors import TxlError
from txl.evaluation.engine import Engine
from txl.evaluation.evaluate import evaluate
from txl.evaluation.generate import Sampling, generate
from txl.evaluation.score import Score
from txl.evaluation.speed import measure_speedup
from txl.model.config import ModelConfig
from txl.model.networks import as_transformer
from txl.model.transformer import TransformerXL
from txl.paths import AnyPath
from txl.text import corpus as data
from txl.training import checkpoint as checkpoints
from txl.training.run_folder import refuse_used_folder
from txl.training.trainer import Trainer

EVAL_TOKENS = 65536
SLIDING_TOKENS = 8192  # each costs a window
SPEED_LENGTHS = (800, 3800)  # the ends of the paper's Table 9
SAMPLE_BYTES = 400


def run(folder: AnyPath, source: AnyPath | None, minutes: float, device_name: str = "auto") -> None:
    """The demo, in a new run folder; `minutes` of training."""
    device = options.pick_device(device_name)
    if not 0 < minutes < math.inf:
        raise TxlError(f"--minutes must be > 0 and finite, got {minutes}")
    folder = Path(folder)
    refuse_used_folder(folder)
    began = time.perf_counter()
    corpus = data.open_corpus(source, folder / "corpus")
    console.print(
        f"[bold]Text[/]: {escape(corpus.source)}; {len(corpus.train):,} {corpus.vocabulary.unit} to train on",
        soft_wrap=True,
    )
    recipe = recipes.load(recipes.DEFAULT)
    config = recipe.model_config(len(corpus.vocabulary))
    assert isinstance(config, ModelConfig)
    training = dataclasses.replace(recipe.train_config(), eval_tokens=16384)
    trainer = Trainer(folder, corpus, config, timed(minutes, corpus, config, training, device), device=device)
    tgt_len = trainer.config.tgt_len
    console.print(f"[bold]Model[/]: {escape(header(trainer))}, about {minutes:g} minutes", soft_wrap=True)
    console.print(f"Segments of {tgt_len} tokens, a memory of {config.mem_len}", soft_wrap=True)
    run_training(trainer, restated(device_name))
    model = as_transformer(checkpoints.restore(trainer.best, device)[0], "txl demo")

    bare, scores = _attention_lengths(model, corpus, tgt_len)
    _speed(model, corpus)
    _sample(model, corpus, config.attn_len(tgt_len))
    drawn = _draw(trainer, bare, scores, config.attn_len(tgt_len))
    console.print(f"\n[bold]Done[/] in {(time.perf_counter() - began) / 60:.1f} minutes.")
    console.print(f"In {folder}: log.jsonl, best.safetensors; {drawn}", markup=False, soft_wrap=True)
    prompt = prompt_of(corpus)
    command = ["txl", "generate", str(folder), *(["--prompt", prompt] if prompt else [])]
    options.say(f"Continue with: {shlex.join(command)}")


def _attention_lengths(model: TransformerXL, corpus: data.Corpus, tgt_len: int) -> tuple[Score, list[Score]]:
    """Scores of the test split: without memory, then at attention lengths around training's.

    Without memory twice: forgetting at each segment, whose first tokens then see next to nothing,
    and with a window that slides by a sixteenth of itself, where no token does.
    """
    trained = model.config.attn_len(tgt_len)
    lengths = [trained // 16, trained // 8, trained // 4, trained // 2, trained, 2 * trained, 4 * trained]
    stride = max(tgt_len // 16, 1)
    with MeasuringProgress(console, "what memory is worth", len(lengths) + 3) as measuring:

        def score(what: str, attn_len: int, limit: int, **how: Any) -> Score:
            told = measuring.next(what, min(limit, len(corpus.test)))
            return evaluate(
                model, corpus.test, corpus.vocabulary.start, attn_len, limit=limit, progress=told, **how
            )  # fmt: skip

        bare = score("no memory", tgt_len, EVAL_TOKENS, segment=tgt_len, carry_memory=False)
        slid = score("a sliding window", tgt_len, SLIDING_TOKENS, method="sliding", segment=stride)
        same = score("the same length, cached", tgt_len, SLIDING_TOKENS)
        scores = [score(f"attention length {n}", n, EVAL_TOKENS) for n in lengths]
    table = Table(
        "attention length", "bpc", "gain over no memory", "tokens/s", title="What memory is worth (test split)"
    )
    for column in table.columns:
        column.justify = "right"
    table.add_row(f"no memory, segments of {tgt_len}", f"{bare.bpc:.3f}", "", f"{bare.tokens_per_s:,.0f}")
    for s in scores:
        name = f"{s.attn_len}" + (" (training)" if s.attn_len == trained else "")
        table.add_row(name, f"{s.bpc:.3f}", f"{bare.bpc - s.bpc:+.3f}", f"{s.tokens_per_s:,.0f}")
    console.print(table)
    options.say(
        f"On the first {SLIDING_TOKENS:,} tokens: a window of {tgt_len} that slides by {stride}, without memory, "
        f"{slid.bpc:.3f} bpc at {slid.tokens_per_s:,.0f} tokens/s; the same length from cached memory {same.bpc:.3f} at "
        f"{same.tokens_per_s:,.0f}. So part of the gain is that segments without memory begin blind."
    )
    return bare, scores


def _draw(trainer: Trainer, bare: Score, scores: list[Score], trained: int) -> str:
    """Draws both plots and names them, or says why it cannot; the run is worth as much without."""
    reason = draw_loss(trainer)
    if reason is None:
        try:
            plots.attention_length(scores, bare, trained, trainer.folder / "attention_length.png")
        except OSError as error:
            reason = str(error)
    return "loss.png, attention_length.png" if reason is None else f"the plots were left out: {reason}"


def _speed(model: TransformerXL, corpus: data.Corpus) -> None:
    table = Table("attention length", "sliding window", "cached", "speed-up", title="Evaluation, milliseconds a token")
    for column in table.columns:
        column.justify = "right"
    with MeasuringProgress(console, "the speed of evaluation", len(SPEED_LENGTHS)) as measuring:
        speeds = []
        for n in SPEED_LENGTHS:
            measuring.next(f"attention length {n}", 1)
            # A text that is too short is repeated.
            tokens = data.as_tensor(np.resize(corpus.train, n + 128)).unsqueeze(0)
            speeds.append((n, measure_speedup(model, tokens, n)))
    for n, s in speeds:
        table.add_row(str(n), f"{s.vanilla_s * 1e3:.2f}", f"{s.cached_s * 1e3:.4f}", f"{s.ratio:,.0f}x")
    console.print(table)
    console.print(
        "sliding window: a vanilla Transformer of the same sizes with torch's scaled_dot_product_attention, one prediction "
        "a forward pass (untrained: only its speed is used). cached: this model, segments of 128.",
        highlight=False,
    )


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
    minutes: Annotated[float, typer.Option(help="Time for training; the rest takes about one more.")] = 4.0,
    device: options.Device = "auto",
) -> None:
    """In about five minutes: train a small model, see what memory is worth, its speed, a sample."""
    run(folder, source, minutes, device)
