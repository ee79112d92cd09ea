"""`txl recipes`: list the paper's models with their preparation, training and evaluation."""

from typing import Annotated

import torch
import typer
from rich.table import Table

from txl import recipes
from txl.commands.console import console, say
from txl.model import make_network
from txl.model.transformer import count_parameters
from txl.training.config import TrainConfig

_DEFAULT_VOCABULARY = 204  # vocabulary size for a recipe without a data set


def parameters(recipe: recipes.Recipe) -> int:
    """Count the parameters of a recipe's model with its data set's vocabulary, without allocating
    it."""
    config = recipe.model_config(None if recipe.data else _DEFAULT_VOCABULARY)
    with torch.device("meta"):
        return count_parameters(make_network(config))


def recipes_command(
    name: Annotated[str | None, typer.Argument(help="Show this one in full, with its commands.")] = None,
) -> None:
    """List the paper's models: parameters, tokens an update, updates, what the paper reports."""
    if name is not None:
        _show(recipes.load(name))
        return
    table = Table("recipe", "size", "tokens", "updates", "reported", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for each in recipes.names():
        recipe = recipes.load(each)
        train = recipe.train_config()
        size = f"{parameters(recipe) / 1e6:.2f}M"
        reported = recipe.paper.split(",")[0].split(" at ")[0].replace("perplexity", "ppl")
        table.add_row(each, size, f"{train.batch * train.scored:,}", f"{train.steps:,}", reported)
    console.print(table)
    say("size: parameters; tokens: of an update; reported: in the paper")
    say("txl recipes NAME shows one; txl train --recipe NAME trains it")


def _show(recipe: recipes.Recipe) -> None:
    train: TrainConfig = recipe.train_config()
    say(f"{recipe.name}: {recipe.title}")
    for text in (recipe.paper, f"source: {recipe.source}", recipe.notes):
        if text:
            say(text)
    counted = f"{parameters(recipe) / 1e6:.2f}M parameters"
    vocabulary = recipe.data.get("vocab_size", _DEFAULT_VOCABULARY)
    say(f"{counted} with a vocabulary of {vocabulary:,}; {train.batch * train.scored:,} tokens an update")
    for part in ("model", "train"):
        values = getattr(recipe, part)
        say(f"{part}: " + ", ".join(f"{k}={v}" for k, v in values.items()))
    if recipe.data:
        newline = f" --newline {recipe.data['newline']}" if "newline" in recipe.data else ""
        say(f"txl prepare CORPUS --data FILES --as {recipe.data['rule']}{newline}")
    say(f"txl train --run RUN --data CORPUS --recipe {recipe.name}")
    options = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in recipe.evaluate.items())
    say(f"txl eval RUN {options}".rstrip())
