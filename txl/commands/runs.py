"""The run that `txl train` is asked for: a new one from a recipe and options, or one to go on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl import recipes
from txl.commands.options import say
from txl.distributed.world import World
from txl.errors import TxlError
from txl.model.networks import Config, config_from_json
from txl.text import corpus as data
from txl.text.datasets import PrepareOptions
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig
from txl.training.run_folder import read_record, refuse_used_folder


@dataclass(frozen=True)
class Run:
    """What a `Trainer` needs, and what is to be said of it."""

    corpus: data.Corpus
    model: Config
    train: TrainConfig
    init: checkpoints.Checkpoint | None = None
    steps_before: int | None = None  # of a run that goes on


@dataclass(frozen=True)
class Options:
    """Options of the command line: fields of the configurations that were given."""

    source: Path | None
    recipe: str | None
    init: Path | None
    model: dict[str, Any]
    train: dict[str, Any]


def new_run(folder: Path, given: Options, world: World) -> Run:
    """Raises TxlError where the folder is used, or the options do not go together."""
    recipe = recipes.load(given.recipe or recipes.DEFAULT)
    refuse_used_folder(folder)
    begun = None if given.init is None else checkpoints.load(given.init)
    if begun is None:
        # The first process may have to prepare it.
        corpus = world.in_order(lambda: data.open_corpus(given.source, folder / "corpus", recipe.prepare_options()))
        _tell_other_data(recipe, corpus)
        model = config_from_json(recipe.model_with(given.model) | {"vocab_size": len(corpus.vocabulary)})
    else:
        if given.recipe is not None and recipe.network != getattr(begun.config, "network", None):
            raise TxlError(
                f"--recipe {given.recipe} is of another kind of network than {begun.path}, whose sizes --init takes; give a "
                "recipe of its kind, or none"
            )
        rule = PrepareOptions("words" if begun.vocabulary.unit == "words" else "auto")
        known = begun.vocabulary
        corpus = world.in_order(lambda: data.open_corpus(given.source, folder / "corpus", rule, known))
        model = config_from_json(begun.config.to_json() | given.model)
    return Run(corpus, model, TrainConfig(**(recipe.train | given.train)), begun)


def run_to_go_on(folder: Path, given: Options) -> Run:
    """Raises TxlError where there is none, or an option would make it another."""
    if given.init is not None:
        raise TxlError("--resume continues the run with its own parameters; leave --init out")
    if given.recipe is not None:
        raise TxlError("--resume continues the model of the run; leave --recipe out")
    record = read_record(folder)
    if given.source is not None and given.source.resolve() != record.corpus.resolve():
        raise TxlError(f"{folder}: a run is resumed on its own text, {record.corpus}; leave --data out")
    corpus = data.load(record.corpus)
    model = config_from_json(record.model | given.model | {"vocab_size": len(corpus.vocabulary)})
    asked = dict(given.train)
    if asked.get("precision") == "auto":
        del asked["precision"]
        say(f"precision: {record.train['precision']}, as when the run began; only a new run measures")
    train = TrainConfig.from_json(record.train | asked)
    return Run(corpus, model, train, steps_before=record.train["steps"])


def _tell_other_data(recipe: recipes.Recipe, corpus: data.Corpus) -> None:
    """Says where a prepared corpus is not what the recipe's figures are of."""
    wanted = recipe.data.get("vocab_size")
    if wanted is not None and (corpus.rule != recipe.data["rule"] or len(corpus.vocabulary) != wanted):
        say(
            f"recipe {recipe.name} is for {recipe.data['rule']} with {wanted:,} symbols; this corpus is {corpus.rule} with "
            f"{len(corpus.vocabulary):,}, so its published figures do not apply"
        )
