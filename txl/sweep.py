"""The paper's ablations, Tables 6, 7 and 10: each row a run, scored at many attention lengths."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from txl import recipes
from txl.errors import TxlError
from txl.evaluation.evaluate import Method, Reading, Score, init_and_best
from txl.model.config import PLACES, ModelConfig
from txl.paths import read_text, replace_text
from txl.text.corpus import Corpus
from txl.text.datasets import PrepareOptions
from txl.text.streams import training_streams
from txl.training.config import TrainConfig

_DATA: dict[str, Any] = json.loads(Path(__file__).with_name("tables.json").read_text(encoding="utf-8"))
SCALES: dict[str, dict[str, int] | None] = _DATA["scales"] | {"paper": None}
"""Sizes of a table's first row, from which the others differ as their recipes do; the paper's
lengths and batch are divided. "small" takes minutes a row on two cores, "tiny" a second."""

FEWEST_BINNED = 1000  # words; with fewer, bins of the vocabulary save nothing
NO_REPRODUCTION = "models, lengths and text are not the paper's: its figures are not reproduced here"


@dataclass(frozen=True, kw_only=True)
class Row:
    """System of a table.

    Attributes:
        recipe: its model and training; train: options that are not the recipe's.
        init, best, length: the reported perplexity at training's attention length, at the best
            length or the only one, and the shortest length of the best; None where there is none.
        lengths: attention lengths scored whatever the search finds, at the sizes of the paper.
        at: further reported perplexities, by attention length.
    """

    name: str
    recipe: str
    best: float
    init: float | None = None
    length: int | None = None
    train: dict[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = ()
    at: dict[str, float] = field(default_factory=dict)

    @property
    def published_init(self) -> int:
        """Training's attention length at the sizes of the paper."""
        recipe = recipes.load(self.recipe)
        return int(recipe.model["mem_len"]) + int((recipe.train | self.train)["tgt_len"])


@dataclass(frozen=True, kw_only=True)
class Table:
    """Ablation of the paper; step: between the attention lengths tried, at the paper's sizes."""

    name: str
    title: str
    notes: str
    split: str
    step: int
    rows: tuple[Row, ...]

    def chosen(self, name: str | None) -> tuple[Row, ...]:
        """The row of a name, all for None; TxlError: there is none."""
        found = tuple(row for row in self.rows if name in (None, row.name))
        if not found:
            raise TxlError(f"--row must be one of {', '.join(row.name for row in self.rows)}, got {name!r}")
        return found


TABLES = {
    name: Table(name=name, **(values | {"rows": tuple(Row(**row) for row in values["rows"])}))
    for name, values in _DATA["tables"].items()
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Row at a scale, for a vocabulary.

    Attributes:
        model, train: fields of `ModelConfig` and `TrainConfig`.
        method, stride, clamp_len: of `Reading`; stride None: segments of an eighth of a length.
        limit: tokens scored of `split`; None for all.
        init: training's attention length. step, longest, also: see `next_length`.
    """

    row: Row
    model: dict[str, Any]
    train: dict[str, Any]
    split: str
    method: Method
    stride: int | None
    clamp_len: int | None
    limit: int | None
    init: int
    step: int
    longest: int | None
    also: list[int]

    @property
    def model_config(self) -> ModelConfig:
        return ModelConfig(**self.model)

    def reading(self, attn_len: int) -> Reading:
        segment = max(attn_len // 8, 1) if self.stride is None else self.stride
        return Reading(attn_len, self.clamp_len, method=self.method, segment=segment)

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


def make_job(
    table: Table, row: Row, scale: str, vocab_size: int, steps: int | None = None, eval_tokens: int | None = None
) -> Job:
    """A row's job; steps, eval_tokens: None for the scale's; 0 tokens: the whole split.

    Raises:
        TxlError: model or training cannot be made for this vocabulary.
    """
    recipe, sizes = recipes.load(row.recipe), SCALES[scale]
    cutoffs = fitted(recipe.model["cutoffs"], int(recipe.data["vocab_size"]), vocab_size)
    model = recipe.model | {"cutoffs": cutoffs, "vocab_size": vocab_size}
    train, how = recipe.train | row.train, dict(recipe.evaluate)
    if not cutoffs:
        model.pop("div_val", None)
    if sizes is not None:
        model, train = _scaled(model, train, recipes.load(table.rows[0].recipe).model, sizes)
        how = {"clamp_len": how["clamp_len"] // sizes["divide"]} if "clamp_len" in how else {}
    if steps is not None:
        train["steps"] = steps
        if sizes is not None:
            train["eval_every"] = train["save_every"] = -(-steps // 4)
    try:
        config, training = ModelConfig(**model), TrainConfig(**train)
    except TxlError as error:
        raise TxlError(f"row {row.name}: {error}") from error
    segment = training.scored + training.context
    init = config.attn_len(segment)
    longest = (config.table_len if config.encoding in PLACES else segment) if config.absolute else None
    method: Method = how.get("method", "cached" if config.mem_len else "sliding")
    default_limit = None if sizes is None else sizes["eval_tokens"]
    return Job(
        row=row, model=model, train=train, split=table.split, method=method,
        stride=how.get("segment", 128 if method == "cached" else None), clamp_len=how.get("clamp_len"),
        limit=(default_limit if eval_tokens is None else eval_tokens) or None, init=init,
        step=table.step // (1 if sizes is None else sizes["divide"]), longest=longest,
        also=[n * init // row.published_init for n in row.lengths],
    )  # fmt: skip


def _scaled(
    model: dict[str, Any], train: dict[str, Any], first: dict[str, Any], sizes: dict[str, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and training at smaller sizes, with all that tells a table's rows apart; first: the
    model of its first row."""

    def even(x: float) -> int:
        return 2 * round(x / 2)

    width, divide = even(sizes["width"] * model["d_model"] / first["d_model"]), sizes["divide"]
    smaller = {
        "n_layer": sizes["n_layer"], "d_model": width, "n_head": sizes["n_head"], "d_head": width // sizes["n_head"],
        "d_inner": even(sizes["inner"] * model["d_inner"] / first["d_inner"]), "mem_len": model["mem_len"] // divide,
        # As recipe "laptop" learns most in minutes.
        "dropout": 0.0, "pre_norm": True, "init_std": 0.06,
    }  # fmt: skip
    if "table_len" in model:
        smaller["table_len"] = model["table_len"] // divide
    every = -(-sizes["steps"] // 4)
    kept = {name: train[name] for name in ("loss", "clip") if name in train}
    # Bins of narrow models would have no width.
    return {name: x for name, x in model.items() if name != "div_val"} | smaller, kept | {
        "steps": sizes["steps"], "batch": train["batch"] // sizes["divide_batch"], "tgt_len": train["tgt_len"] // divide,
        "lr": 2.5e-3, "warmup": None, "eval_every": every, "save_every": every, "log_every": min(every, 10),
        "eval_tokens": sizes["eval_tokens"],
    }  # fmt: skip


def fitted(cutoffs: list[int], published: int, vocab_size: int) -> list[int]:
    """Bins of a vocabulary: as they are where they are within it, else in proportion to the
    published size; none for very few words."""
    if cutoffs[-1] < vocab_size:
        return cutoffs
    return [] if vocab_size < FEWEST_BINNED else [cutoff * vocab_size // published for cutoff in cutoffs]


def prepare_options(table: Table, scale: str) -> PrepareOptions:
    """How a raw text becomes the corpus: as the recipes' data set, or as words where scaled."""
    sizes = SCALES[scale]
    if sizes is None:
        return recipes.load(table.rows[0].recipe).prepare_options()
    return PrepareOptions("words", max_words=sizes["max_words"])


def check_corpus(job: Job, corpus: Corpus) -> None:
    """Raises TxlError: the corpus is too short to train a row or to score it."""
    training = TrainConfig(**job.train)
    try:
        training_streams(corpus, training.batch, training.scored, training.context, training.seed, training.streams)
    except TxlError as error:
        raise TxlError(f"--data: row {job.row.name}: {error}") from error
    if not len(corpus.split(job.split)):
        raise TxlError(f"--data: {corpus.folder}: its {job.split} split is empty, and rows are scored on it")


def next_length(
    ppl: Mapping[int, float], init: int, step: int, *, longest: int | None = None, also: Sequence[int] = (),
    gain: float = 1e-3,
) -> int | None:  # fmt: skip
    """The attention length to score next, a pure function of the perplexities known: so a search
    resumes. None where it is done.

    From training's length upward until a step gains less than `gain`, relatively; then the lengths
    that are wanted in any case; then from training's length downward as long as the perplexity is
    within `gain` of the best so far. What is reported: `init_and_best`.

    Args:
        ppl: perplexities by attention length.
        init: training's length. step: between lengths.
        longest: never to be exceeded; None for no limit.
        also: lengths above `init` to score in any case.
    """

    def allowed(n: int) -> bool:
        return longest is None or n <= longest

    if init not in ppl:
        return init
    n = init
    while allowed(n + step):
        if n + step not in ppl:
            return n + step
        if not ppl[n] - ppl[n + step] >= gain * ppl[n]:  # nan gains nothing, either
            break
        n += step
    for wanted in also:
        if wanted not in ppl and wanted > init and allowed(wanted):
            return wanted
    n = init
    while n > step:
        best = min(value for length, value in ppl.items() if length >= n)
        if not ppl[n] <= best * (1 + gain):
            break
        if n - step not in ppl:
            return n - step
        n -= step
    return None


class Kept:
    """Progress of a row, in `row.json` of its folder: what it is of, its training as it was fixed,
    its scores.

    Attributes:
        train: options of training; None before they are fixed.
        trained, finished: whether training, and all of it, is done.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """about: the job, the corpus and other settings, JSON-able.

        Raises:
            TxlError: the file is of another job, which is named, or damaged.
        """
        self.path, self.about = path, about
        self.train: dict[str, Any] | None = None
        self.trained = self.finished = False
        self.scores: list[Score] = []
        if path.exists():
            try:
                values = json.loads(read_text(path))
                if "train_seconds" in values:
                    raise TxlError(f"{path}: is of an earlier version; choose another folder with --run")
                before, self.train = dict(values["about"]), values["train"]
                self.trained, self.finished = bool(values["trained"]), bool(values["finished"])
                self.scores = [Score(**score) for score in values["scores"]]
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise TxlError(f"{path}: is damaged ({error}); remove {path.parent} to begin the row anew") from error
            changed = [
                f"{k} is {about.get(k)}, was {before.get(k)}" for k in about | before if about.get(k) != before.get(k)
            ]
            if changed:
                raise TxlError(
                    f"{path.parent}: holds another row: {'; '.join(changed)}; choose another folder with --run"
                )

    def write(self) -> None:
        """Replaces the file."""
        self.path.parent.mkdir(exist_ok=True)
        values = {"about": self.about, "train": self.train, "trained": self.trained, "finished": self.finished}
        found = init_and_best(self.scores, self.about["init"]) if self.finished else None
        reported = {name: getattr(found, name).attn_len if found else None for name in ("init", "best", "shortest")}
        scores = [asdict(score) for score in self.scores]
        replace_text(self.path, json.dumps(values | {"reported": reported, "scores": scores}, indent=2))
