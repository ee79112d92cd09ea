"""A table's rows as published, or smaller with all that tells them apart kept."""

from dataclasses import dataclass
from typing import Any

from txl import recipes
from txl.errors import TxlError
from txl.sweeps.tables import Row, Table
from txl.text.datasets import PrepareOptions

Options = dict[str, Any]
FEWEST_BINNED = 1000  # words; with fewer, bins of the vocabulary save nothing


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of a table's first row, from which the others differ as their recipes do.

    Attributes:
        divide: the paper's lengths. divide_batch: its batch.
        width, inner: d_model and d_inner.
        eval_tokens: scored at each attention length.
        max_words: of a raw text's vocabulary.
    """

    n_layer: int
    width: int
    n_head: int
    inner: int
    divide: int
    divide_batch: int
    steps: int
    eval_tokens: int
    max_words: int


# Of "small", a row takes two to five minutes on two cores; of "tiny", about a second.
SCALES: dict[str, Scale | None] = {
    "tiny": Scale(
        n_layer=1, width=16, n_head=2, inner=32, divide=8, divide_batch=15, steps=8, eval_tokens=512, max_words=2000
    ),
    "small": Scale(
        n_layer=4, width=128, n_head=4, inner=512, divide=4, divide_batch=2, steps=1500, eval_tokens=16384,
        max_words=20000,
    ),
    "paper": None,
}  # fmt: skip


def find(name: str) -> Scale | None:
    """None for the paper's own.

    Raises:
        TxlError: there is no such scale.
    """
    if name not in SCALES:
        raise TxlError(f"--scale must be one of {', '.join(SCALES)}, got {name!r}")
    return SCALES[name]


def prepare_options(table: Table, scale: Scale | None) -> PrepareOptions:
    """How a raw text becomes the corpus: as the recipes' data set, or as words where scaled."""
    if scale is None:
        return recipes.load(table.rows[0].recipe).prepare_options()
    return PrepareOptions("words", max_words=scale.max_words)


def scaled(table: Table, row: Row, scale: Scale | None, vocab_size: int) -> tuple[Options, Options, Options]:
    """Model, training and evaluation of a row: fields of `ModelConfig` and `TrainConfig`, and
    `method`, `segment`, `clamp_len` as in a recipe."""
    recipe = recipes.load(row.recipe)
    published = int(recipe.data["vocab_size"])
    model = recipe.model | {"cutoffs": fitted(recipe.model["cutoffs"], published, vocab_size)}
    if not model["cutoffs"]:
        model.pop("div_val", None)
    train = recipe.train | dict(row.train)
    if scale is None:
        return model, train, dict(recipe.evaluate)
    return _model(model, table, scale), _training(train, scale), _evaluation(recipe.evaluate, scale)


def fitted(cutoffs: list[int], published: int, vocab_size: int) -> list[int]:
    """Bins of a vocabulary: as they are where they are within it, else in proportion to the
    published size; none for very few words."""
    if cutoffs[-1] < vocab_size:
        return cutoffs
    if vocab_size < FEWEST_BINNED:
        return []
    return [cutoff * vocab_size // published for cutoff in cutoffs]


def _model(model: Options, table: Table, scale: Scale) -> Options:
    first = recipes.load(table.rows[0].recipe).model
    width = _even(scale.width * model["d_model"] / first["d_model"])
    sizes = {
        "n_layer": scale.n_layer, "d_model": width, "n_head": scale.n_head, "d_head": width // scale.n_head,
        "d_inner": _even(scale.inner * model["d_inner"] / first["d_inner"]), "mem_len": model["mem_len"] // scale.divide,
        # As recipe "laptop" learns most in minutes.
        "dropout": 0.0, "pre_norm": True, "init_std": 0.06,
    }  # fmt: skip
    if "table_len" in model:
        sizes["table_len"] = model["table_len"] // scale.divide
    model.pop("div_val", None)  # bins of narrow models would have no width
    return model | sizes


def _training(train: Options, scale: Scale) -> Options:
    kept = {name: train[name] for name in ("loss", "clip") if name in train}
    every = -(-scale.steps // 4)
    return kept | {
        "steps": scale.steps, "batch": train["batch"] // scale.divide_batch, "tgt_len": train["tgt_len"] // scale.divide,
        "lr": 2.5e-3, "warmup": None, "eval_every": every, "save_every": every,
        "log_every": min(every, 10), "eval_tokens": scale.eval_tokens,
    }  # fmt: skip


def _evaluation(evaluate: Options, scale: Scale) -> Options:
    return {"clamp_len": evaluate["clamp_len"] // scale.divide} if "clamp_len" in evaluate else {}


def _even(x: float) -> int:
    return 2 * round(x / 2)
