"""The `txl` command: prepare, train, eval, generate, demo."""

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from txl.commands import demo
from txl.commands.console import EvaluationProgress, TrainingProgress, stop_on_ctrl_c
from txl.commands.prepare import prepare
from txl.errors import TxlError
from txl.evaluation.engine import Engine
from txl.evaluation.evaluate import evaluate
from txl.evaluation.generate import Sampling
from txl.evaluation.generate import generate as generate_tokens
from txl.model.config import MODELS, ModelConfig
from txl.text import compressed
from txl.text import corpus as data
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig
from txl.training.trainer import Interrupted, Trainer, read_record, refuse_used_folder

app = typer.Typer(
    name="txl",
    help="Transformer-XL language models: prepare a text, train, evaluate, generate. Start with `txl demo`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Checkpoint = Annotated[Path, typer.Argument(help="A run folder (its best checkpoint is taken) or a .safetensors file.")]


def pick_device(name: str) -> torch.device:
    """Raises TxlError on a name torch does not know or a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TxlError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


app.command()(prepare)


@app.command()
def train(
    run: Annotated[Path, typer.Option(help="Folder of the run: log, checkpoints, corpus.")],
    source: Annotated[
        Path | None,
        typer.Option("--data", help="A prepared corpus, a text file or a folder. Default: the standard library."),
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"Sizes to start from: {', '.join(MODELS)}; default small.")] = None,
    n_layer: Annotated[int | None, typer.Option(help="Layers.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the hidden states.")] = None,
    n_head: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    d_head: Annotated[int | None, typer.Option(help="Width of a head.")] = None,
    d_inner: Annotated[int | None, typer.Option(help="Width of the feed-forward net.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout.")] = None,
    attn_dropout: Annotated[float | None, typer.Option(help="Dropout on attention weights.")] = None,
    mem_len: Annotated[int | None, typer.Option(help="Tokens of memory.")] = None,
    window: Annotated[int | None, typer.Option(help="Keys a token sees, itself included; default: all.")] = None,
    clamp_len: Annotated[int | None, typer.Option(help="Largest distance told apart; default: no limit.")] = None,
    pre_norm: Annotated[bool | None, typer.Option("--pre-norm/--post-norm", help="Where layer norms stand.")] = None,
    untie_r: Annotated[bool | None, typer.Option("--untie-r/--tie-r", help="Biases u, v per layer or shared.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates.")] = None,
    batch: Annotated[int | None, typer.Option(help="Parallel streams of text.")] = None,
    tgt_len: Annotated[int | None, typer.Option(help="Tokens of a segment.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Updates of linear warm-up.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's decay of matrices; 0 is Adam.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of the gradient.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Segments per update.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Updates between evaluations.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Updates between checkpoints.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Of initialisation and dropout.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto (bf16 on a GPU that has it), fp32 or bf16.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run, bit for bit; options as at its start.")
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log for TensorBoard.")] = False,
    device: Device = "auto",
) -> None:
    """Train a model, or continue a run. Ctrl-C writes a checkpoint and exits with 130."""
    given = {name: value for name, value in locals().items() if value is not None}
    if model not in (None, *MODELS):
        raise TxlError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
    if resume and model is not None:
        raise TxlError("--resume continues the model of the run; leave --model out")
    model_values: dict[str, Any] = dict(MODELS[model or "small"])
    train_values: dict[str, Any] = {}
    if resume:
        record = read_record(run)
        model_values, train_values = dict(record.model), dict(record.train)
        if source is not None and source.resolve() != record.corpus.resolve():
            raise TxlError(f"{run}: a run is resumed on its own text, {record.corpus}; leave --data out")
        corpus = data.load(record.corpus)
    else:
        refuse_used_folder(run)
        corpus = data.open_corpus(source, run / "corpus")
    model_values |= {k: v for k, v in given.items() if k in ModelConfig.__dataclass_fields__}
    train_values |= {k: v for k, v in given.items() if k in TrainConfig.__dataclass_fields__}
    model_values["vocab_size"] = len(corpus.vocabulary)
    config = TrainConfig(**train_values)
    trainer = Trainer(
        run,
        corpus,
        ModelConfig(**model_values),
        config,
        resume=resume,
        device=pick_device(device),
        tensorboard=tensorboard,
    )
    with TrainingProgress(console, trainer) as progress, stop_on_ctrl_c(trainer):
        trainer.run(progress.report)
    console.print(f"done: {trainer.last}", markup=False, soft_wrap=True)


def _attention_lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise TxlError(f"--attn-len takes whole numbers separated by commas, got {text!r}") from None
    if any(n < 1 for n in lengths):
        raise TxlError(f"--attn-len must be >= 1 (a token sees at least itself), got {text}")
    return lengths


@app.command("eval")
def evaluate_command(
    checkpoint: Checkpoint,
    attn_len: Annotated[
        str, typer.Option(help="Keys a token sees; several separated by commas. Default: as in training.")
    ] = "",
    source: Annotated[
        Path | None, typer.Option("--data", help="A prepared corpus, or a text file, scored whole. Default: the run's.")
    ] = None,
    split: Annotated[str, typer.Option(help="train, valid or test, of a corpus.")] = "test",
    segment: Annotated[int, typer.Option(help="Tokens a step; changes the speed, not the score.")] = 128,
    batch: Annotated[int, typer.Option(help="Parallel streams; each starts without memory.")] = 8,
    limit: Annotated[int | None, typer.Option(help="Score only the first so many tokens.")] = None,
    device: Device = "auto",
) -> None:
    """Bits per character, perplexity and speed at each attention length, each token scored once."""
    for name, value in (("segment", segment), ("batch", batch), ("limit", limit)):
        if value is not None and value < 1:
            raise TxlError(f"--{name} must be >= 1, got {value}")
    lengths = _attention_lengths(attn_len) if attn_len else None
    model, saved = checkpoints.restore(checkpoint, pick_device(device))
    source = source or read_record(saved.path.parent).corpus
    if source.exists() and not source.is_dir():  # a pipe, too
        tokens = saved.vocabulary.encode(compressed.read(source).data)
    else:
        corpus = data.load(source)
        if corpus.vocabulary != saved.vocabulary:
            raise TxlError(f"{source}: its vocabulary is not the one {saved.path} was trained with")
        tokens = corpus.split(split)
    table = Table("attention length", "tokens", "bpc", "ppl", "tokens/s")
    for column in table.columns:
        column.justify = "right"
    for n in lengths or [saved.attn_len]:
        with EvaluationProgress(console, f"attention length {n}", min(len(tokens), limit or len(tokens))) as progress:
            score = evaluate(
                model,
                tokens,
                saved.vocabulary.start,
                n,
                segment=segment,
                batch=batch,
                limit=limit,
                progress=progress.update,
            )
        table.add_row(str(n), f"{score.tokens:,}", f"{score.bpc:.4f}", f"{score.ppl:.4f}", f"{score.tokens_per_s:,.0f}")
    console.print(table)


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help="Text to continue; @FILE reads it from a file.")] = "\n",
    count: Annotated[int, typer.Option(help="Bytes to generate.")] = 500,
    attn_len: Annotated[int | None, typer.Option(help="Keys a token sees. Default: as in training.")] = None,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest byte; 1 samples as the model predicts.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that sum to p.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Repeatable output. Default: another text each time.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Continue a text. Memory and time a byte stay constant however long it gets."""
    if count < 1:
        raise TxlError(f"--count must be >= 1, got {count}")
    sampling = Sampling(temperature, top_k, top_p)
    model, saved = checkpoints.restore(checkpoint, pick_device(device))
    text = _prompt(prompt)
    tokens = data.as_tensor(saved.vocabulary.encode(text)).unsqueeze(0).to(model.output_bias.device)
    generator = torch.Generator(model.output_bias.device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    engine = Engine(model, 1, attn_len if attn_len is not None else saved.attn_len, 128)
    write = sys.stdout.buffer
    write.write(text)
    for token in generate_tokens(engine, tokens, count, sampling, generator):
        write.write(saved.vocabulary.decode(token.tolist()))
        write.flush()
    write.write(b"\n")
    write.flush()


def _prompt(prompt: str) -> bytes:
    if not prompt.startswith("@"):
        return os.fsencode(prompt)  # the bytes that were typed, UTF-8 or not
    return compressed.read(prompt[1:]).data


@app.command("demo")
def demo_command(
    run: Annotated[Path, typer.Option(help="Folder for the run; must not hold one yet.")] = Path("runs/demo"),
    source: Annotated[
        Path | None,
        typer.Option("--data", help="A text file or folder. Default: the Python standard library's sources."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for training; the rest takes about one more.")] = 4.0,
    device: Device = "auto",
) -> None:
    """In about five minutes: train a small model, see what memory is worth, its speed, a sample."""
    demo.run(run, source, minutes, pick_device(device), console)


_UsageError: Any = typer.BadParameter.__base__  # whichever click typer uses


def main() -> None:
    """Entry point: a user's error is one line on stderr and exit code 1; Ctrl-C is 130."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold any bytes
    try:
        app(standalone_mode=False)
    except _UsageError as error:
        error.show()
        sys.exit(error.exit_code)
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output is gone, as in `txl generate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
