"""`txl train`: train a model from a recipe and options, or resume a run; Ctrl-C with a checkpoint,
and the processes of torchrun."""

import dataclasses
import inspect
import math
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import typer

from txl import fields, pictures, recipes
from txl.commands.console import (
    NO_DATA,
    Device,
    console,
    in_panel,
    one_line,
    pick_device,
    reason,
    say,
    tell,
    training_progress,
)
from txl.distributed import World, joined, local_device, lost_peer, settle
from txl.errors import Interrupted, TxlError
from txl.model.config import Config, ModelConfig, RecurrentConfig, config_from_json, of_other_encodings
from txl.model.transformer import TransformerXL, count_parameters
from txl.text import corpus as data
from txl.text.datasets import PrepareOptions
from txl.training import checkpoint as checkpoints
from txl.training import run as runs
from txl.training.config import TrainConfig
from txl.training.trainer import INTERVALS, Trainer
from txl_kernels.backends import choose_unasked

Run = tuple[data.Corpus, Config, TrainConfig, checkpoints.Checkpoint | None]  # the last: where a new run begins
FINISHING = "finishing this update; Ctrl-C again ends at once\n"
_REPORT_S = 5  # seconds until SIGALRM ends the process
_CLEAR_LINE = "\r\x1b[2K"  # clears a progress bar, and the ^C that the terminal echoes


def train(
    run: Annotated[Path, typer.Option("--run", "-r", help="Folder of the run: log, checkpoints, corpus.")],
    source: Annotated[
        Path | None,
        typer.Option("--data", help="A prepared corpus, a text file or a folder. Default: the standard library."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help=f"Model and training to start from (`txl recipes`); default {recipes.DEFAULT}.")
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(
            help="A checkpoint or run to begin with: its parameters, sizes and vocabulary. Options that change no size may "
            "differ; training is the recipe's.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Train so long: --steps follows the clock. Unless they are given, --warmup is a thirtieth of them, "
            "--eval-every and --save-every a quarter.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run, bit for bit, with its options. --steps may be changed: the schedule is then that of "
            "the new number from here on.",
        ),
    ] = False,
    device: Device = "auto",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log for TensorBoard.")] = False,
    **options: Any,
) -> None:
    """Train a model, or continue a run. Ctrl-C and SIGTERM write a checkpoint and exit with 130.

    Several devices: torchrun --nproc-per-node N -m txl train. The schedule of the learning rate
    ends with the last of --steps. Options that are not given are the recipe's (`txl recipes NAME`);
    those of the default recipe are shown.
    """
    if minutes is not None and (options["steps"] is not None or resume or not 0 < minutes < math.inf):
        raise TxlError("--minutes must be > 0 and finite, and goes neither with --steps nor with --resume")
    for name, value in (("recipe", recipe), ("init", init)):
        if resume and value is not None:
            raise TxlError(f"--resume continues the run's own model and parameters; leave --{name} out")
    with processes(device) as (world, where):
        if resume:
            corpus, model, config, begun = run_to_go_on(run, source, options)
        else:
            if source is None:
                say(NO_DATA)
            corpus, model, config, begun = new_run(run, source, recipe, init, options, world)
        if minutes is not None and options["warmup"] is None and config.warmup:
            config = dataclasses.replace(config, warmup=None)  # a thirtieth of the updates, however many they become
        trainer = Trainer(
            run, corpus, model, config, resume=resume, device=where, tensorboard=tensorboard, init=begun, world=world
        )  # fmt: skip
        say(header(trainer, minutes))
        if trainer.step >= config.steps:
            say(f"all {config.steps:,} updates are done already; more take a larger --steps")
        again = ["--device", device] if device != "auto" else []
        again += ["--tensorboard"] if tensorboard else []
        follow = [name for name in INTERVALS if options[name] is None]
        run_training(trainer, again, None if minutes is None else 60 * minutes, follow)
        if world.first:
            not_drawn = draw_loss(trainer)
            if (found := diverged(trainer)) is not None:
                say(found)
            say(f"done: {trainer.last}{'' if not_drawn else ', loss.png'}")
            if not_drawn:
                say(f"loss.png was left out: {not_drawn}")


def _with_options(command: Any) -> Any:
    """Add an option to the command for each configuration field that has help; its value is None if
    it is not given, and the recipe's is taken. Help shows that of the default recipe."""
    signature = inspect.signature(command)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    recipe = recipes.load(recipes.DEFAULT)
    for config in (recipe.model_config(1), recipe.train_config()):
        for name, kind, about in fields.options(type(config)):
            value = getattr(config, name)
            known = value is not None and not isinstance(value, bool)  # of a flag its names say enough
            default = known and f"{recipe.name}: {'none' if value == () else value}"
            shown = in_panel(about["panel"], *about["names"], help=about["help"], show_default=default, **about["kind"])
            annotation = Annotated[kind | None, shown]  # type: ignore[valid-type]
            kept.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    command.__signature__ = signature.replace(parameters=kept)
    return command


train_command = _with_options(train)


def _fields_of(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options given on the command line that are fields of a configuration."""
    given = {name: x for name, x in options.items() if x is not None and name in config.__dataclass_fields__}
    if "cutoffs" in given:
        given["cutoffs"] = _cutoffs(given["cutoffs"])
    if given.get("eval_tokens") == 0:
        given["eval_tokens"] = None
    return given


def new_run(
    folder: Path, source: Path | None, recipe_name: str | None, init: Path | None, options: dict[str, Any], world: World
) -> Run:
    """Prepare a new run. Its folder is locked before anything is written to it.

    Raises:
        TxlError: the folder holds a run already, or the options contradict each other.
    """
    recipe = recipes.load(recipe_name or recipes.DEFAULT)
    begun = None if init is None else checkpoints.load(init)
    world.first_does(lambda: runs.begin(folder))
    rule, known = recipe.prepare_options(), None
    if begun is not None:
        if recipe_name is not None and recipe.network != getattr(begun.config, "network", None):
            raise TxlError(
                f"--recipe {recipe_name} is of another kind of network than {begun.path}, whose sizes --init takes; give a "
                "recipe of its kind, or none"
            )
        rule, known = PrepareOptions("words" if begun.vocabulary.unit == "words" else "auto"), begun.vocabulary
    # Only the first process prepares: two at once would write to one folder.
    corpus = data.load(world.first_does(lambda: data.open_corpus(source, folder / "corpus", rule, known).folder))
    base = recipe.model | {"vocab_size": len(corpus.vocabulary)} if begun is None else begun.config.to_json()
    chosen = _fields_of(ModelConfig, options)
    if begun is None and "encoding" in chosen:  # what the recipe sets for its own is left out
        base = {name: x for name, x in base.items() if name not in of_other_encodings(chosen["encoding"])}
    model = config_from_json(base | chosen)
    config = TrainConfig(**(recipe.train | _fields_of(TrainConfig, options)))
    if options["ema_decay"] is not None and config.average != "ema":
        raise TxlError(f"--ema-decay is for --average ema, not {config.average}; leave it out")
    if options["min_lr_ratio"] is not None and config.schedule == "constant":
        raise TxlError("--min-lr-ratio is for a schedule that falls, not --schedule constant; leave it out")
    return corpus, model, config, begun


def run_to_go_on(folder: Path, source: Path | None, options: dict[str, Any]) -> Run:
    """Prepare to resume an existing run.

    Raises:
        TxlError: the folder holds no run, or an option would change the run.
    """
    record = runs.read_record(folder)
    try:
        before = TrainConfig.from_json(record.train)
        config_from_json(record.model)
    except TxlError as error:
        raise TxlError(f"{folder / 'run.json'}: cannot be resumed: {error}") from error
    if source is not None and source.resolve() != record.corpus.resolve():
        raise TxlError(f"{folder}: a run is resumed on its own text, {record.corpus}; leave --data out")
    corpus = data.load(record.corpus)
    sizes = {"vocab_size": len(corpus.vocabulary)}
    model = config_from_json(record.model | _fields_of(ModelConfig, options) | sizes)
    asked = _fields_of(TrainConfig, options)
    if asked.get("precision") == "auto":  # that of the run
        del asked["precision"]
    return corpus, model, dataclasses.replace(before, **asked), None


def _cutoffs(text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TxlError(f"--cutoffs takes whole numbers separated by commas, or none, got {text!r}") from None


def run_training(
    trainer: Trainer, kept: list[str], seconds: float | None = None, follow: Collection[str] = INTERVALS
) -> None:
    """Train to the end, or until Ctrl-C, which ends the training after the current update with a
    checkpoint; then draw the loss and print how to resume.

    kept: options that must be repeated on resume. seconds, follow: as in `Trainer.run`.
    """
    try:
        with training_progress(trainer) as report, stop_on_ctrl_c(trainer):
            trainer.run(report, seconds, follow)
    except Interrupted:
        if trainer.world.first:
            size = str(trainer.world.size)
            command = ["txl"] if size == "1" else ["torchrun", "--nproc-per-node", size, "-m", "txl"]
            command += ["train", "-r", str(trainer.folder), "--resume", *kept]
            tell(f"interrupted: {trainer.step:,} of {trainer.config.steps:,} updates are in {trainer.last}")
            tell(f"go on with: {shlex.join(command)}")
            draw_loss(trainer)
        raise


def diverged(trainer: Trainer) -> str | None:
    """Return a warning if the last validation's loss is over twice that of guessing among all
    tokens alike, else None."""
    losses = [x["valid_loss"] for x in runs.read_log(trainer.folder / "log.jsonl") if "valid_loss" in x]
    guessed = math.log(len(trainer.corpus.vocabulary))
    if not losses or losses[-1] <= 2 * guessed:
        return None
    return (
        f"the run has diverged: its validation loss, {losses[-1]:.4g}, is over twice that of guessing, {guessed:.2f}; a "
        "smaller --lr or a longer --warmup may help"
    )


def draw_loss(trainer: Trainer) -> str | None:
    """Draw `loss.png` in the run's folder; return the reason if it cannot be drawn, else None."""
    reason = pictures.missing()
    if reason is not None:
        return reason
    unit = "bpc" if trainer.corpus.vocabulary.unit == "bytes" else "ppl"
    try:
        pictures.draw_loss(runs.read_log(trainer.folder / "log.jsonl"), trainer.folder / "loss.png", unit)
    except OSError as error:  # such as a full disk; the run itself is complete
        return str(error)
    return None


def header(trainer: Trainer, minutes: float | None = None) -> str:
    """Return the header: model, parameters, backend, device, dtype, and updates or time."""
    model, config, dtype = trainer.model, trainer.model.config, trainer.updater.dtype or torch.float32
    by = "torch"
    if isinstance(config, RecurrentConfig):
        kind = config.network.upper()
    else:
        kind = "Transformer-XL" if config.encoding == "relative" else f"Transformer with {config.encoding} positions"
        kind += "" if config.mem_len else ", without memory"
    if isinstance(model, TransformerXL) and not model.config.absolute:  # else torch's attention, or none
        width = getattr(model.layers[0].attention, "kernel_width", model.config.d_head)
        by = f"{choose_unasked(trainer.device, dtype, width)} backend"
    span = f"updates {trainer.step:,} to {trainer.config.steps:,}" if minutes is None else f"for {minutes:g} minutes"
    return (
        f"{kind}, {config.n_layer} layers x {config.d_model}, {count_parameters(model) / 1e6:.2f}M parameters; {by} on "
        f"{trainer.device}, {str(dtype).removeprefix('torch.')}; {span}"
    )


@contextmanager
def processes(device: str) -> Iterator[tuple[World, torch.device]]:
    """A context with the process group that torchrun started and this process's device.

    Only the first process prints. An error ends the process in which it is raised; torchrun, or the
    broken connection, then ends the others. The first process that fails reports its error.
    """
    where = pick_device(local_device(device))
    with joined(where) as world:
        console.quiet = console.quiet or not world.first
        if world.size > 1:  # torchrun sends SIGTERM when a process fails: time to report what this one saw of it
            signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_REPORT_S))
        try:
            yield world, where
        except Interrupted:
            settle()
            raise
        except KeyboardInterrupt:
            if not world.first:  # reported once
                sys.exit(130)
            raise
        except Exception as error:
            if world.size == 1:
                raise
            if world.is_first_to_fail():
                known = lost_peer(error) or reason(error)
                if known is None:
                    traceback.print_exc()
                else:
                    tell(one_line(f"rank {world.rank}: {known}"))
            sys.exit(1)


@contextmanager
def stop_on_ctrl_c(trainer: Trainer) -> Iterator[None]:
    """A context in which the first Ctrl-C lets the trainer finish its update and write a
    checkpoint.

    A second Ctrl-C ends the process at once. If Ctrl-C is ignored (`nohup`, a script's background
    job), it remains ignored. SIGTERM, which schedulers send and torchrun passes on, has the same
    effect. With several processes any of them may receive it.
    """
    previous = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    previous = {one: handler for one, handler in previous.items() if handler not in (signal.SIG_IGN, None)}

    def handler(number: int, frame: FrameType | None) -> None:
        trainer.request_stop()
        signal.signal(number, previous[signal.Signals(number)])
        # Not print: the signal may have interrupted a call of print.
        if trainer.world.first:
            with suppress(OSError):
                os.write(2, ((_CLEAR_LINE if os.isatty(2) else "") + FINISHING).encode())

    for one in previous:
        signal.signal(one, handler)
    try:
        yield
    finally:
        for one, former in previous.items():
            signal.signal(one, former)
