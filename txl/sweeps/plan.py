"""What is done for a row with a corpus: its model, its training, how it is read."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from txl import recipes
from txl.errors import TxlError
from txl.evaluation.evaluate import Method
from txl.model.config import PLACES, ModelConfig
from txl.sweeps import scales
from txl.sweeps.scales import Options
from txl.sweeps.tables import Row, Table
from txl.text.corpus import Corpus
from txl.text.streams import training_streams
from txl.training.config import TrainConfig

WINDOWS = 64  # side by side; the score does not depend on it


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a row is scored; see `txl.evaluation.evaluate`.

    Attributes:
        stride: tokens a step; None for an eighth of the attention length.
        limit: tokens scored; None for the whole split.
        init: training's attention length. step, longest, also: see `next_length`.
    """

    split: str
    method: Method
    stride: int | None
    batch: int
    clamp_len: int | None
    limit: int | None
    init: int
    step: int
    longest: int | None
    also: tuple[int, ...]

    def segment(self, attn_len: int) -> int:
        return max(attn_len // 8, 1) if self.stride is None else self.stride


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A row at a scale, for a vocabulary. model and train: as `ModelConfig` and `TrainConfig` take
    them."""

    row: Row
    model: Options
    train: Options
    reading: Reading

    @property
    def name(self) -> str:
        return self.row.name

    def model_config(self) -> ModelConfig:
        return ModelConfig(**self.model)

    def train_config(self) -> TrainConfig:
        return TrainConfig(**self.train)

    def to_json(self) -> dict[str, Any]:
        """As a ledger keeps it."""
        reading = dataclasses.asdict(self.reading)
        parts = {"recipe": self.row.recipe, "model": self.model, "train": self.train, "reading": reading}
        values: dict[str, Any] = json.loads(json.dumps(parts))
        return values


def make_plan(table: Table, row: Row, settings: dict[str, Any], vocab_size: int) -> Plan:
    """A row of a table.

    settings: of the ledger: `scale`, `steps` (None for the scale's), `eval_tokens` (None for the
    scale's, 0 for the whole split).

    Raises:
        TxlError: model or training cannot be made for this vocabulary.
    """
    scale = scales.find(settings["scale"])
    try:
        model, train, evaluate = scales.scaled(table, row, scale, vocab_size)
        model["vocab_size"] = vocab_size
        if settings["steps"] is not None:
            train["steps"] = settings["steps"]
            if scale is not None:
                train["eval_every"] = train["save_every"] = -(-train["steps"] // 4)
        config, training = ModelConfig(**model), TrainConfig(**train)
    except TxlError as error:
        raise TxlError(f"row {row.name}: {error}") from error
    segment = training.scored + training.context
    init = config.attn_len(segment)
    longest = (config.table_len if config.encoding in PLACES else segment) if config.absolute else None
    method: Method = evaluate.get("method", "cached" if config.mem_len else "sliding")
    stride = evaluate.get("segment", 128 if method == "cached" else None)
    limit = settings["eval_tokens"]
    if limit is None:
        limit = None if scale is None else scale.eval_tokens
    reading = Reading(
        split=table.split, method=method, stride=stride, batch=WINDOWS if method == "sliding" else 8,
        clamp_len=evaluate.get("clamp_len"), limit=limit or None, init=init,
        step=table.step // (1 if scale is None else scale.divide),
        longest=longest, also=tuple(n * init // published_init(row) for n in row.lengths),
    )  # fmt: skip
    return Plan(row=row, model=model, train=train, reading=reading)


def check_corpus(plan: Plan, corpus: Corpus) -> None:
    """Raises TxlError: the corpus is too short to train a row or to score it."""
    training = plan.train_config()
    try:
        training_streams(corpus, training.batch, training.scored, training.context, training.seed)
    except TxlError as error:
        raise TxlError(f"--data: row {plan.name}: {error}") from error
    if not len(corpus.split(plan.reading.split)):
        raise TxlError(f"--data: {corpus.folder}: its {plan.reading.split} split is empty, and rows are scored on it")


def published_init(row: Row) -> int:
    """Training's attention length at the sizes of the paper."""
    recipe = recipes.load(row.recipe)
    tgt_len = int((recipe.train | dict(row.train))["tgt_len"])
    return int(recipe.model["mem_len"]) + tgt_len
