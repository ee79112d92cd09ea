"""The page of a run, one HTML file that needs no network."""

import base64
import datetime
import platform
from pathlib import Path
from typing import Any

import jinja2
import torch
from markupsafe import Markup

import txl_kernels
from txl.errors import TxlError
from txl.model import make_network
from txl.model.config import Config, RecurrentConfig
from txl.model.transformer import count_parameters
from txl.paths import replace_text
from txl.pictures import missing
from txl.report import curves, kept
from txl.text import corpus as data
from txl.training import checkpoint as checkpoints
from txl.training import log
from txl.training.run import read_record

_TEMPLATE = Path(__file__).with_name("page.html")
PICTURES = {
    "recl": {"figure-3.png": "Gain of each step of context (figure 3)", "figure-4.png": "Perplexity (figure 4)"},
    "attention": {
        "figure-5.png": "Mean attention of every head (figure 5)",
        "figure-6.png": "Where three heads look, target by target (figure 6)",
        "figure-7.png": "The terms alone (figure 7)",
    },
}


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a run's folder, of all that is there; returns its path.

    Raises:
        TxlError: the folder holds no run or no checkpoint, matplotlib is missing, or the page
            cannot be written.
    """
    record = read_record(folder)
    if not any((folder / name).exists() for name in ("best.safetensors", "last.safetensors")):
        raise TxlError(f"{folder}: the run has no checkpoint yet; train it first")
    reason = missing()
    if reason is not None:
        raise TxlError(reason)
    saved = checkpoints.load(folder)
    unit = "ppl" if saved.vocabulary.unit == "words" else "bpc"
    entries, _ = log.read(folder / "log.jsonl")
    found = kept.recl(folder / "recl" / "recl.json")
    drawn = kept.read_object(folder / "attention" / "attention.json") or {}
    text = _environment().from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=_shown(folder.resolve().name), summary=_summary(saved.config),
        facts=_facts(record.train, _corpus(record.corpus), entries, unit), model=record.model, train=record.train,
        entries=bool(entries), unit=unit, loss=_loss(entries, unit), course=_course(entries),
        lengths=_lengths(folder, saved, unit), speeds=kept.speeds(folder), samples=kept.samples(folder), recl=found,
        old_recl=found is not None and saved.digest not in found["checkpoints"],
        old_attention=drawn.get("checkpoint") != saved.digest,
        pictures={part: _pictures(folder / part, wanted) for part, wanted in PICTURES.items()},
        attention_page=(folder / "attention" / "attention.html").is_file(), made=_made(),
    )  # fmt: skip
    path = folder / "report.html"
    try:
        replace_text(path, text)
    except OSError as error:
        raise TxlError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def _shown(name: str) -> str:
    """A file's name, whatever bytes it has."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)


def _corpus(folder: Path) -> data.Corpus | None:
    """The run's text; None if it is no longer there."""
    try:
        return data.load(folder)
    except TxlError:
        return None


def _summary(config: Config) -> str:
    with torch.device("meta"):
        size = count_parameters(make_network(config)) / 1e6
    if isinstance(config, RecurrentConfig):
        return f"{config.network.upper()} of {config.n_layer} layers x {config.d_inner}, {size:.2f}M parameters"
    memory = f"a memory of {config.mem_len:,} tokens" if config.mem_len else "no recurrence"
    kind = f"encoding {config.encoding}, {memory}"
    return f"{config.n_layer} layers x {config.d_model}, {config.n_head} heads, {kind}; {size:.2f}M parameters"


def _facts(
    train: dict[str, Any], corpus: data.Corpus | None, entries: list[dict[str, Any]], unit: str
) -> dict[str, str]:
    """What stands at the top, in words."""
    valid = curves.points(entries, f"valid_{unit}")
    rate = curves.points(entries, "tokens_per_s")
    step = max((entry["step"] for entry in entries), default=0)
    steps = train.get("steps")
    facts = {"updates": f"{step:,} of {steps:,}" if isinstance(steps, int) else f"{step:,}"}
    if valid:
        at, best = min(valid, key=lambda point: point[1])
        facts["best validation"] = f"{best:.4f} {unit}, at update {at:,}"
    if rate:
        middle = sorted(value for _, value in rate)[len(rate) // 2]
        facts["training speed, median"] = f"{middle:,.0f} tokens/s"
    if corpus is not None:
        counted = (
            f"{len(corpus.train):,} {corpus.vocabulary.unit} to train on, vocabulary of {len(corpus.vocabulary):,}"
        )
        facts["text"] = f"{_shown(corpus.source)}; {counted}"
    return facts


def _loss(entries: list[dict[str, Any]], unit: str) -> Markup:
    return Markup(curves.svg(lambda figure: curves.draw_loss(figure.add_subplot(), entries, unit)))


def _course(entries: list[dict[str, Any]]) -> Markup:
    return Markup(curves.svg(lambda figure: curves.draw_course(figure, entries), 10.0, 2.4))


def _lengths(folder: Path, saved: checkpoints.Checkpoint, unit: str) -> dict[str, Any] | None:
    """Evaluations of the run's checkpoint, and a picture of those that go together: of one split,
    of as many tokens and streams."""
    everything = kept.evaluations(folder)
    found = [e for e in everything if e.checkpoint == saved.digest]
    cached = [e for e in found if e.memory and not e.what and e.method == "cached"]
    picture = None
    if cached and not isinstance(saved.config, RecurrentConfig):
        last = cached[-1]
        alike = [e for e in found if (e.split, e.score.tokens) == (last.split, last.score.tokens)]
        plain = sorted((e.score for e in alike if e in cached and e.batch == last.batch), key=lambda s: s.attn_len)
        levels = {_level(e): e.score for e in alike if not e.memory}
        if len(plain) > 1:
            picture = Markup(
                curves.svg(
                    lambda figure: curves.draw_lengths(figure.add_subplot(), plain, levels, saved.attn_len, unit)
                )
            )
    return {"all": found, "picture": picture, "old": len(everything) - len(found)} if everything else None


def _level(evaluation: kept.Evaluation) -> str:
    """How a line across is called."""
    if evaluation.what.startswith("no memory"):
        return evaluation.what
    return f"{evaluation.what or evaluation.method}, length {evaluation.score.attn_len}"


def _pictures(folder: Path, wanted: dict[str, str]) -> list[tuple[str, str]]:
    """Titles and data addresses of those that are there."""
    found = [(title, folder / name) for name, title in wanted.items() if (folder / name).is_file()]
    return [(title, "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()) for title, path in found]


def _made() -> str:
    versions = f"txl {txl_kernels.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}, {versions}, {platform.machine()}"
