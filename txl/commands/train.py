"""`txl train`: train a model from a recipe and options, or resume a run."""

import dataclasses
import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from txl import fields, recipes
from txl.commands.options import Device, in_panel, say
from txl.commands.training import draw_loss, header, processes, run_training
from txl.distributed import World
from txl.errors import TxlError
from txl.model.config import Config, ModelConfig, config_from_json
from txl.text import corpus as data
from txl.text.datasets import PrepareOptions
from txl.training import checkpoint as checkpoints
from txl.training import run as runs
from txl.training.config import TrainConfig
from txl.training.timing import timed, with_precision
from txl.training.trainer import Trainer


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
        float | None, typer.Option(help="Train so long: --steps follows the clock.", show_default=False)
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
    """Train a model, or continue a run. Ctrl-C writes a checkpoint and exits with 130.

    Several devices: torchrun --nproc-per-node N -m txl train. The schedule of the learning rate
    ends with the last of --steps.
    """
    given = _given(source, recipe, init, options)
    if minutes is not None and (options["steps"] is not None or resume or not 0 < minutes < math.inf):
        raise TxlError("--minutes must be > 0 and finite, and goes neither with --steps nor with --resume")
    with processes(device) as (world, where):
        with world.together():
            asked = run_to_go_on(run, given, world) if resume else new_run(run, given, world)
        config = asked.train
        if not resume:
            config = with_precision(config, where, world)
        if minutes is not None:
            config = timed(minutes, asked.corpus, asked.model, config, where, world)
        trainer = Trainer(
            run, asked.corpus, asked.model, config, resume=resume, device=where, tensorboard=tensorboard, init=asked.init,
            world=world,
        )  # fmt: skip
        _tell_schedule(trainer, asked.steps_before)
        say(header(trainer))
        again = ["--device", device] if device != "auto" else []
        again += ["--tensorboard"] if tensorboard else []
        run_training(trainer, again, None if minutes is None else 60 * minutes)
        if world.first:
            not_drawn = draw_loss(trainer)
            say(f"done: {trainer.last}{'' if not_drawn else ', loss.png'}")
            if not_drawn:
                say(f"loss.png was left out: {not_drawn}")


def _with_options(command: Any) -> Any:
    """Add an option to the command for each configuration field that has help; its value is None if
    it is not given."""
    signature = inspect.signature(command)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for config in (ModelConfig, TrainConfig):
        for name, kind, about in fields.options(config):
            shown = in_panel(about["panel"], *about["names"], help=about["help"], show_default=False, **about["kind"])
            annotation = Annotated[kind | None, shown]  # type: ignore[valid-type]
            kept.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    command.__signature__ = signature.replace(parameters=kept)
    return command


train_command = _with_options(train)


@dataclass(frozen=True)
class Given:
    """The options given on the command line: fields of the configurations."""

    source: Path | None
    recipe: str | None
    init: Path | None
    model: dict[str, Any]
    train: dict[str, Any]


def _given(source: Path | None, recipe: str | None, init: Path | None, options: dict[str, Any]) -> Given:
    named = {name: value for name, value in options.items() if value is not None}
    if "cutoffs" in named:
        named["cutoffs"] = _cutoffs(named["cutoffs"])
    if named.get("eval_tokens") == 0:
        named["eval_tokens"] = None
    model, training = (
        {name: x for name, x in named.items() if name in config.__dataclass_fields__}
        for config in (ModelConfig, TrainConfig)
    )
    return Given(source, recipe, init, model, training)


@dataclass(frozen=True)
class Run:
    """The arguments of a `Trainer`; steps_before: the number of steps before resuming, None for a
    new run."""

    corpus: data.Corpus
    model: Config
    train: TrainConfig
    init: checkpoints.Checkpoint | None = None
    steps_before: int | None = None


def new_run(folder: Path, given: Given, world: World) -> Run:
    """Prepare a new run. Its folder is locked before anything is written to it.

    Raises:
        TxlError: the folder holds a run already, or the options contradict each other.
    """
    recipe = recipes.load(given.recipe or recipes.DEFAULT)
    begun = None if given.init is None else checkpoints.load(given.init)
    world.first_does(lambda: runs.begin(folder))
    rule, known = recipe.prepare_options(), None
    if begun is not None:
        if given.recipe is not None and recipe.network != getattr(begun.config, "network", None):
            raise TxlError(
                f"--recipe {given.recipe} is of another kind of network than {begun.path}, whose sizes --init takes; give a "
                "recipe of its kind, or none"
            )
        rule, known = PrepareOptions("words" if begun.vocabulary.unit == "words" else "auto"), begun.vocabulary
    # Only the first process prepares: two at once would write to one folder.
    corpus = data.load(world.first_does(lambda: data.open_corpus(given.source, folder / "corpus", rule, known).folder))
    if begun is None:
        _tell_other_data(recipe, corpus)
        model = config_from_json(recipe.model_with(given.model) | {"vocab_size": len(corpus.vocabulary)})
    else:
        model = config_from_json(begun.config.to_json() | given.model)
    return Run(corpus, model, TrainConfig(**(recipe.train | given.train)), begun)


def run_to_go_on(folder: Path, given: Given, world: World) -> Run:
    """Lock the folder of an existing run and prepare to resume it.

    Raises:
        TxlError: the folder holds no run, or an option would change the run.
    """
    if given.init is not None:
        raise TxlError("--resume continues the run with its own parameters; leave --init out")
    if given.recipe is not None:
        raise TxlError("--resume continues the model of the run; leave --recipe out")
    record = runs.go_on(folder) if world.first else runs.read_record(folder)
    try:
        before = TrainConfig.from_json(record.train)
        config_from_json(record.model)
    except TxlError as error:
        raise TxlError(f"{folder / 'run.json'}: cannot be resumed: {error}") from error
    if given.source is not None and given.source.resolve() != record.corpus.resolve():
        raise TxlError(f"{folder}: a run is resumed on its own text, {record.corpus}; leave --data out")
    corpus = data.load(record.corpus)
    model = config_from_json(record.model | given.model | {"vocab_size": len(corpus.vocabulary)})
    asked = dict(given.train)
    if asked.get("precision") == "auto":
        del asked["precision"]
        say(f"precision: {before.precision}, as when the run began")
    return Run(corpus, model, dataclasses.replace(before, **asked), steps_before=before.steps)


def _tell_other_data(recipe: recipes.Recipe, corpus: data.Corpus) -> None:
    """Report if the corpus is not the one that the recipe's published figures are for."""
    wanted = recipe.data.get("vocab_size")
    if wanted is not None and (corpus.rule != recipe.data["rule"] or len(corpus.vocabulary) != wanted):
        say(
            f"recipe {recipe.name} is for {recipe.data['rule']} with {wanted:,} symbols; this corpus is {corpus.rule} with "
            f"{len(corpus.vocabulary):,}, so its published figures do not apply"
        )


def _tell_schedule(trainer: Trainer, before: int | None) -> None:
    """Report a learning-rate schedule that may surprise: changed by another number of steps, or
    with a warm-up that never ends. before: the run's previous number of steps."""
    config = trainer.config
    if before is not None and config.steps != before:
        say(
            f"steps: {config.steps}, was {before}; from update {trainer.step + 1} on the learning rate follows the schedule "
            f"of {config.steps} updates, so the run differs from one that had them from the start"
        )
    if config.warmup_updates >= config.steps:
        then = " after the first update" if config.schedule == "cosine-released" else ""
        say(
            f"warm-up takes {config.warmup_updates:,} updates and the run has {config.steps:,}: its learning rate never "
            f"reaches --lr{then}; --warmup sets another"
        )


def _cutoffs(text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TxlError(f"--cutoffs takes whole numbers separated by commas, or none, got {text!r}") from None
