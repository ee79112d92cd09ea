"""`txl train`: train a model from a recipe and options, or resume a run."""

import dataclasses
import inspect
import math
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
from txl.training.trainer import Trainer

Run = tuple[data.Corpus, Config, TrainConfig, checkpoints.Checkpoint | None]  # the last: where a new run begins


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
            help="Train so long: --steps follows the clock, warm-up is a thirtieth of them.", show_default=False
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
    """Train a model, or continue a run. Ctrl-C writes a checkpoint and exits with 130.

    Several devices: torchrun --nproc-per-node N -m txl train. The schedule of the learning rate
    ends with the last of --steps.
    """
    if minutes is not None and (options["steps"] is not None or resume or not 0 < minutes < math.inf):
        raise TxlError("--minutes must be > 0 and finite, and goes neither with --steps nor with --resume")
    for name, value in (("recipe", recipe), ("init", init)):
        if resume and value is not None:
            raise TxlError(f"--resume continues the run's own model and parameters; leave --{name} out")
    with processes(device) as (world, where):
        with world.together():
            if resume:
                corpus, model, config, begun = run_to_go_on(run, source, options)
            else:
                corpus, model, config, begun = new_run(run, source, recipe, init, options, world)
        if minutes is not None:  # a thirtieth of the updates, however many they become, or none
            config = dataclasses.replace(config, warmup=0 if config.warmup == 0 else None)
        trainer = Trainer(
            run, corpus, model, config, resume=resume, device=where, tensorboard=tensorboard, init=begun, world=world
        )  # fmt: skip
        say(header(trainer, minutes))
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
    model = config_from_json(base | _fields_of(ModelConfig, options))
    return corpus, model, TrainConfig(**(recipe.train | _fields_of(TrainConfig, options))), begun


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
