"""The paper's models as named files, and how they are read."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from txl.errors import TxlError
from txl.model.config import Config, config_from_json
from txl.text.datasets import PrepareOptions
from txl.training.config import TrainConfig

_FOLDER = Path(__file__).parent
DEFAULT = "laptop"
_MERGED = ("data", "model", "train", "evaluate")
_NULLABLE = ("warmup", "eval_tokens")  # options of which null is a value


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model of the paper: its sizes, how it is trained and evaluated, and where that is from.

    Attributes:
        paper: what the paper reports of it; "" where it is not the paper's.
        source: of the sizes and options.
        parameters: millions, with the data set's own vocabulary; None where no source counts them.
        data: what to prepare: rule, options, `vocab_size` as published.
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
        """ "lstm" or "qrnn"; None for a Transformer."""
        return self.model.get("network")

    def model_config(self, vocab_size: int | None = None) -> Config:
        """The model's configuration; vocab_size: None for the published one.

        Raises:
            TxlError: the recipe is of no data set and none is given.
        """
        vocab_size = self.data.get("vocab_size") if vocab_size is None else vocab_size
        if vocab_size is None:
            raise TxlError(f"recipe {self.name} belongs to no data set: vocab_size must be given")
        return config_from_json({"vocab_size": vocab_size} | self.model)

    def model_with(self, given: dict[str, Any]) -> dict[str, Any]:
        """`model` with options given instead; those of its own that only fit what was replaced are
        left out."""
        values = dict(self.model)
        if given.get("encoding", values.get("encoding", "relative")) != values.get("encoding", "relative"):
            for name in ("table_len", "untie_r", "clamp_len"):
                values.pop(name, None)
        if given.get("tie_weight") is False:
            values.pop("tie_projs", None)
        if given.get("cutoffs") == ():
            values.pop("div_val", None)
        return values | given

    def prepare_options(self) -> PrepareOptions:
        """The options that make this recipe's corpus of a raw text."""
        if not self.data:
            return PrepareOptions()
        return PrepareOptions(self.data["rule"], newline=self.data.get("newline", "keep"))

    def train_config(self) -> TrainConfig:
        return TrainConfig(**self.train)


def names() -> list[str]:
    """All recipes, the default first."""
    found = sorted(path.stem for path in _FOLDER.glob("*.json"))
    return [DEFAULT, *(name for name in found if name != DEFAULT)]


def load(name: str) -> Recipe:
    """A recipe; what it does not say is its base's.

    Raises:
        TxlError: there is none of that name.
    """
    if name not in names():
        raise TxlError(f"recipe must be one of {', '.join(names())}, got {name!r}")
    return Recipe(name=name, **_values(name))


def _values(name: str) -> dict[str, Any]:
    own: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    if "base" not in own:
        return own
    base = _values(own.pop("base"))
    merged = {part: base.get(part, {}) | own.get(part, {}) for part in _MERGED}
    return own | {part: _without_nulls(values) for part, values in merged.items()}


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """null takes away what the base says."""
    return {k: v for k, v in values.items() if v is not None or k in _NULLABLE}
