"""Recipes: the paper's models as named files, with their data, training and evaluation."""

import json
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from txl.errors import TxlError
from txl.model.config import Config, config_from_json
from txl.text.datasets import PrepareOptions
from txl.training.config import TrainConfig

_FOLDER = Path(__file__).parent
DEFAULT = "laptop"
_MERGED = ("data", "model", "train", "evaluate")
_NULLABLE = ("warmup", "eval_tokens")  # options for which null is a value


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model of the paper: its sizes, how it is trained and evaluated, and the source of these.

    Attributes:
        paper: the result reported in the paper; "" if the model is not from the paper.
        source: where sizes and options are taken from.
        parameters: number in millions, with the data set's vocabulary; None if no source gives it.
        data: how to prepare the corpus: rule, options, and the published `vocab_size`.
        model, train: fields of `ModelConfig` (or `RecurrentConfig`) and `TrainConfig`.
        evaluate: method, attn_len, segment and clamp_len of the published evaluation.
    """

    name: str
    title: str
    source: str
    paper: str = ""
    notes: str = ""
    parameters: float | None = None
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    evaluate: dict[str, Any] = field(default_factory=dict)

    @property
    def network(self) -> str | None:
        """The kind of a recurrent network, lstm or qrnn; None for a Transformer."""
        return self.model.get("network")

    def model_config(self, vocab_size: int | None = None) -> Config:
        """Make the model's configuration; vocab_size: None for the published one.

        Raises:
            TxlError: the recipe belongs to no data set and no vocab_size is given.
        """
        vocab_size = self.data.get("vocab_size") if vocab_size is None else vocab_size
        if vocab_size is None:
            raise TxlError(f"recipe {self.name} belongs to no data set: vocab_size must be given")
        return config_from_json({"vocab_size": vocab_size} | self.model)

    def prepare_options(self) -> PrepareOptions:
        """Return the options that prepare this recipe's corpus from its source."""
        if not self.data:
            return PrepareOptions()
        return PrepareOptions(self.data["rule"], newline=self.data.get("newline", "keep"))

    def train_config(self) -> TrainConfig:
        return TrainConfig(**self.train)


def names() -> list[str]:
    """Return the names of all recipes, the default first."""
    found = sorted(path.stem for path in _FOLDER.glob("*.json"))
    return [DEFAULT, *(name for name in found if name != DEFAULT)]


def load(name: str) -> Recipe:
    """Read a recipe; what it does not define is taken from its base.

    Raises:
        TxlError: there is no recipe of that name.
    """
    if name not in names():
        nearest = "".join(f"; the nearest is {x}" for x in get_close_matches(name, names(), 1, 0))
        raise TxlError(f"recipe must be one of those that `txl recipes` lists, got {name!r}{nearest}")
    return Recipe(name=name, **_values(name))


def _values(name: str) -> dict[str, Any]:
    own: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    if "base" not in own:
        return own
    base = _values(own.pop("base"))
    merged = {part: base.get(part, {}) | own.get(part, {}) for part in _MERGED}
    # By null a recipe discards its base's value of an option.
    kept = {n: {k: v for k, v in x.items() if v is not None or k in _NULLABLE} for n, x in merged.items()}
    return own | kept
