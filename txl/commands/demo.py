"""`txl demo`: trains a small model, measures what memory and caching are worth, and samples."""

import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from txl.commands import plots
from txl.commands.console import TrainingProgress, stop_on_ctrl_c
from txl.errors import TxlError
from txl.evaluation.engine import Engine
from txl.evaluation.evaluate import Score, evaluate
from txl.evaluation.generate import Sampling, generate
from txl.evaluation.speed import measure_speedup
from txl.model.config import MODELS, ModelConfig
from txl.model.transformer import TransformerXL, count_parameters
from txl.paths import AnyPath
from txl.text import corpus as data
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer, refuse_used_folder

# Chosen by trial on 2 cores: in a few minutes more tokens beat more parameters; of rates from 1e-3
# to 4.5e-3 this learned most.
LEARNING_RATE = 2.5e-3
BATCH, TGT_LEN = 8, 128
TRIAL_UPDATES = 16
EVAL_TOKENS = 65536
SPEED_LENGTHS = (800, 3800)  # the ends of the paper's Table 9
SAMPLE_BYTES = 400


def run(folder: AnyPath, source: AnyPath | None, minutes: float, device: torch.device, console: Console) -> None:
    """The demo, in a new run folder; `minutes` of training."""
    if not minutes > 0:
        raise TxlError(f"--minutes must be > 0, got {minutes}")
    folder = Path(folder)
    refuse_used_folder(folder)
    began = time.perf_counter()
    corpus = data.open_corpus(source, folder / "corpus")
    console.print(f"[bold]Text[/]: {escape(corpus.source)}; {len(corpus.train):,} bytes to train on")
    config = ModelConfig(vocab_size=len(corpus.vocabulary), **MODELS["demo"])
    trainer = _trainer_for(minutes, folder, corpus, config, device)
    size = count_parameters(trainer.model)
    console.print(
        f"[bold]Model[/]: {config.n_layer} layers, {size / 1e6:.1f}M parameters, segments of {TGT_LEN}, memory of "
        f"{config.mem_len}; {trainer.config.steps} updates on {device.type}, about {minutes:g} minutes"
    )
    with TrainingProgress(console, trainer) as progress, stop_on_ctrl_c(trainer):
        trainer.run(progress.report)
    model, _ = checkpoints.restore(trainer.best, device)

    bare, scores = _attention_lengths(model, corpus, console)
    _speed(model, corpus, console)
    _sample(model, corpus, console)
    drawn = _draw(folder, bare, scores, config.attn_len(TGT_LEN))
    console.print(f"\n[bold]Done[/] in {(time.perf_counter() - began) / 60:.1f} minutes.")
    console.print(f"In {folder}: log.jsonl, best.safetensors; {drawn}", markup=False, soft_wrap=True)
    console.print(f"Continue with: txl generate {folder} --prompt 'def main('", markup=False, soft_wrap=True)


def _trainer_for(
    minutes: float, folder: Path, corpus: data.Corpus, config: ModelConfig, device: torch.device
) -> Trainer:
    """A trainer whose updates fill the time, judged by a few of them on a model thrown away."""

    def make(steps: int) -> Trainer:
        every = -(-steps // 4)
        return Trainer(
            folder, corpus, config,
            TrainConfig(
                steps=steps, batch=BATCH, tgt_len=TGT_LEN, lr=LEARNING_RATE, warmup=max(steps // 30, 1), clip=0.25,
                eval_every=every, save_every=every, eval_tokens=16384,
            ),
            device=device,
        )  # fmt: skip

    trial = make(TRIAL_UPDATES)
    trial.advance(4)
    began = time.perf_counter()
    trial.advance(TRIAL_UPDATES)
    seconds = (time.perf_counter() - began) / TRIAL_UPDATES
    return make(max(int(minutes * 60 / seconds), 1))


def _attention_lengths(model: TransformerXL, corpus: data.Corpus, console: Console) -> tuple[Score, list[Score]]:
    """Scores of the test split: without memory, then at attention lengths around training's."""
    trained = model.config.attn_len(TGT_LEN)
    lengths = [trained // 16, trained // 8, trained // 4, trained // 2, trained, 2 * trained, 4 * trained]
    start = corpus.vocabulary.start
    bare = evaluate(model, corpus.test, start, TGT_LEN, segment=TGT_LEN, limit=EVAL_TOKENS, carry_memory=False)
    scores = [evaluate(model, corpus.test, start, n, limit=EVAL_TOKENS) for n in lengths]
    table = Table(
        "attention length", "bpc", "gain over no memory", "tokens/s", title="What memory is worth (test split)"
    )
    for column in table.columns:
        column.justify = "right"
    table.add_row(f"no memory, segments of {TGT_LEN}", f"{bare.bpc:.3f}", "", f"{bare.tokens_per_s:,.0f}")
    for s in scores:
        name = f"{s.attn_len}" + (" (training)" if s.attn_len == trained else "")
        table.add_row(name, f"{s.bpc:.3f}", f"{bare.bpc - s.bpc:+.3f}", f"{s.tokens_per_s:,.0f}")
    console.print(table)
    return bare, scores


def _draw(folder: Path, bare: Score, scores: list[Score], trained: int) -> str:
    """Draws both plots and names them, or says why it cannot; the run is worth as much without."""
    reason = plots.missing()
    if reason is not None:
        return f"the plots were left out: {reason}"
    plots.loss_curve(folder / "log.jsonl", folder / "loss.png")
    plots.attention_length(scores, bare, trained, folder / "attention_length.png")
    return "loss.png, attention_length.png"


def _speed(model: TransformerXL, corpus: data.Corpus, console: Console) -> None:
    table = Table("attention length", "sliding window", "cached", "speed-up", title="Evaluation, milliseconds a token")
    for column in table.columns:
        column.justify = "right"
    for n in SPEED_LENGTHS:
        # A text that is too short is repeated.
        tokens = data.as_tensor(np.resize(corpus.train, n + 128)).unsqueeze(0)
        s = measure_speedup(model, tokens, n)
        table.add_row(str(n), f"{s.vanilla_s * 1e3:.2f}", f"{s.cached_s * 1e3:.4f}", f"{s.ratio:,.0f}x")
    console.print(table)
    console.print(
        "sliding window: a vanilla Transformer of the same sizes with torch's scaled_dot_product_attention, one prediction "
        "a forward pass (untrained: only its speed is used). cached: this model, segments of 128.",
        highlight=False,
    )


def _sample(model: TransformerXL, corpus: data.Corpus, console: Console) -> None:
    prompt = corpus.test[:256]
    engine = Engine(model, 1, model.config.attn_len(TGT_LEN), 128)
    generator = torch.Generator(model.output_bias.device).manual_seed(1)
    tokens = data.as_tensor(prompt).unsqueeze(0).to(model.output_bias.device)
    drawn = [int(t) for t in generate(engine, tokens, SAMPLE_BYTES, Sampling(0.7), generator)]
    console.rule("A sample, after 256 bytes of the test split")
    console.print(corpus.vocabulary.decode(drawn).decode("utf-8", "replace"), markup=False, highlight=False)
    console.rule()
