"""One page of a run, HTML that needs no network: what was trained and what has been measured of it.

Commands leave in the run's folder what the page shows; nothing that is wrong with it stops one.
"""

import base64
import dataclasses
import datetime
import json
import math
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import torch

import txl_kernels
from txl.errors import TxlError
from txl.evaluation.evaluate import Score
from txl.evaluation.speed import Speedup
from txl.model import make_network
from txl.model.transformer import count_parameters
from txl.paths import AnyPath, lock_file, read_bytes, read_text, replace_text
from txl.pictures import missing, new_figure, save
from txl.training import checkpoint as checkpoints
from txl.training.run import read_log, read_record

EVALUATIONS, SPEED, SAMPLES = "evaluations.json", "speed.json", "samples.json"
MOST = 1e100  # of what can be drawn
_TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True)
class Evaluation:
    """A score and how it was come by.

    Attributes:
        what: in words, as "no memory, segments of 128"; "" for the method at its attention length.
        memory: False where a token saw no more than the window or segment it is in.
        checkpoint: digest of what was scored.
        batch: streams side by side, each of which begins without memory.
    """

    score: Score
    split: str
    method: str
    what: str = ""
    memory: bool = True
    checkpoint: str = ""
    batch: int = 8

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells evaluations apart; a later one of the same key takes its place."""
        return (self.checkpoint, self.split, self.method, self.what, self.score.attn_len, self.score.tokens, self.batch)


def keep_evaluations(folder: Path, new: Sequence[Evaluation]) -> None:
    """Adds those that are finite to what is there, in the place of older ones of the same."""
    descriptor = lock_file(folder / ".kept.lock", wait=True)
    assert descriptor is not None
    try:
        finite = [each for each in new if math.isfinite(each.score.nats)]
        replaced = {each.key for each in finite}
        found = [*(each for each in evaluations(folder) if each.key not in replaced), *finite]
        _write(folder / EVALUATIONS, [dataclasses.asdict(each) for each in found])
    finally:
        os.close(descriptor)


def evaluations(folder: Path) -> list[Evaluation]:
    found = []
    for entry in _read_list(folder / EVALUATIONS):
        try:
            score = {name: x for name, x in entry["score"].items() if name != "words"}  # of earlier versions
            each = Evaluation(**(entry | {"score": Score(**score)}))
        except (TypeError, KeyError, AttributeError):
            continue
        if _can_be_shown(each):
            found.append(each)
    return found


def _can_be_shown(each: Evaluation) -> bool:
    words, counts = (
        (each.split, each.method, each.what, each.checkpoint),
        (each.score.attn_len, each.score.tokens, each.batch),
    )
    right = all(type(x) is str for x in words) and all(type(x) is int for x in counts)
    numbers = (*counts, each.score.seconds, each.score.nats)
    return right and all(isinstance(x, (int, float)) and abs(x) < MOST for x in numbers) and min(numbers[:-1]) > 0


def keep_speed(folder: Path, speeds: Sequence[Speedup]) -> None:
    _write(folder / SPEED, [dataclasses.asdict(each) for each in speeds])


def keep_samples(folder: Path, samples: Sequence[dict[str, Any]]) -> None:
    """Keeps samples: objects with "context", "generation" and "reference", texts or absent."""
    _write(folder / SAMPLES, list(samples))


def _write(path: Path, values: list[Any]) -> None:
    replace_text(path, json.dumps(values, indent=2) + "\n")


def _read(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None


def _read_list(path: Path) -> list[Any]:
    values = _read(path)
    return values if isinstance(values, list) else []


def points(entries: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """The updates of a log that have a value of this name, a number that can be drawn."""
    return [(e["step"], e[name]) for e in entries if isinstance(e.get(name), float) and abs(e[name]) < MOST]


def loss_curve(log: AnyPath, path: AnyPath, bytewise: bool = True) -> None:
    """Training and validation loss against the update, from a run's `log.jsonl`.

    bytewise: in bits per character; else the perplexity of a word.
    """
    entries, _ = read_log(log)
    unit = "bpc" if bytewise else "ppl"
    train, valid = points(entries, unit), points(entries, f"valid_{unit}")
    figure = new_figure()
    axes = figure.add_subplot()
    for values, style, label in ((train, "-", "training"), (valid, "o-", "validation")):
        axes.plot([x for x, _ in values], [y for _, y in values], style, label=label)
    if len(train) > 4:  # the first steps would flatten everything after them
        late = [y for _, y in train[len(train) // 20 :] + valid]
        margin = 0.05 * (max(late) - min(late)) or 0.1
        axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set(xlabel="update", ylabel="bits per character" if bytewise else "perplexity", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def attention_length(
    scores: list[Score], levels: dict[str, Score], trained: int, path: AnyPath, bytewise: bool = True
) -> None:
    """Bits per character, or perplexity, against attention length.

    levels: lines across. trained: a vertical.
    """

    def value(score: Score) -> float:
        return score.bpc if bytewise else score.ppl

    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot([s.attn_len for s in scores], [value(s) for s in scores], "o-", label="cached memory")
    for n, (label, score) in enumerate(levels.items()):
        axes.axhline(value(score), color=f"C{n + 1}", ls="--", label=label)
    axes.axvline(trained, color="gray", ls=":", label="longest attention in training")
    axes.set_xscale("log", base=2)
    axes.set_xticks([s.attn_len for s in scores], [str(s.attn_len) for s in scores])
    values = [value(s) for s in [*scores, *levels.values()]]
    margin = 0.05 * (max(values) - min(values)) or 0.01
    axes.set_ylim(min(values) - margin, max(values) + margin)
    name = "bits per character" if bytewise else "perplexity"
    axes.set(xlabel="attention length (keys a token sees)", ylabel=name, title="What memory is worth")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


@dataclass
class _Part:
    """What the page shows under a heading, or the command that would make it.

    Attributes:
        rows: of a table, the first its head. pictures: titles and data addresses.
    """

    title: str
    command: str
    note: str = ""
    rows: list[list[str]] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    link: str = ""


def write_report(folder: Path) -> Path:
    """Writes `report.html` into a run's folder, of all that is there; returns its path.

    The pictures of the loss and of attention lengths are drawn anew.

    Raises:
        TxlError: the folder holds no run or no checkpoint, or matplotlib is missing.
        OSError: the page or a picture cannot be written.
    """
    record = read_record(folder)
    if not any((folder / name).exists() for name in ("best.safetensors", "last.safetensors")):
        raise TxlError(f"{folder}: the run has no checkpoint yet; train it first")
    reason = missing()
    if reason is not None:
        raise TxlError(reason)
    saved = checkpoints.load(folder)
    bytewise = saved.vocabulary.unit == "bytes"
    entries, _ = read_log(folder / "log.jsonl")
    loss_curve(folder / "log.jsonl", folder / "loss.png", bytewise)
    with torch.device("meta"):
        size = count_parameters(make_network(saved.config)) / 1e6
    facts = {"model": f"{size:.2f}M parameters; {_listed(record.model)}", "training": _listed(record.train)}
    samples = [x for x in _read_list(folder / SAMPLES) if isinstance(x, dict) and isinstance(x.get("generation"), str)]
    parts = [
        _Part("Training", "txl train --resume", pictures=_pictures(folder, {"loss.png": "Loss"})),
        _lengths(folder, saved, bytewise),
        _speed(folder),
        _Part("Samples", "txl demo", samples=samples),
        _recl(folder / "recl", saved.digest),
        _attention(folder / "attention", saved.digest),
    ]  # fmt: skip
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    versions = f"txl {txl_kernels.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    text = page.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=folder.resolve().name.encode("utf-8", "replace").decode("utf-8"),  # whatever bytes it has
        facts=facts | _course(record.train, entries, "bpc" if bytewise else "ppl"), parts=parts,
        made=f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}, {versions}, {platform.machine()}",
    )  # fmt: skip
    path = folder / "report.html"
    replace_text(path, text)
    return path


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)


def _course(train: dict[str, Any], entries: list[dict[str, Any]], unit: str) -> dict[str, str]:
    """How far training has come, in words."""
    valid, rate = points(entries, f"valid_{unit}"), points(entries, "tokens_per_s")
    facts = {"updates": f"{max((entry['step'] for entry in entries), default=0)} of {train.get('steps')}"}
    if valid:
        at, best = min(valid, key=lambda point: point[1])
        facts["best validation"] = f"{best:.4f} {unit}, at update {at:,}"
    if rate:
        middle = sorted(value for _, value in rate)[len(rate) // 2]
        facts["training speed, median"] = f"{middle:,.0f} tokens/s"
    return facts


def _lengths(folder: Path, saved: checkpoints.Checkpoint, bytewise: bool) -> _Part:
    """Evaluations of the run's checkpoint, and a picture of those that go together: of one split,
    of as many tokens and streams."""
    part = _Part("Attention lengths", "txl eval RUN --attn-len 128,256,512")
    everything = evaluations(folder)
    found = [e for e in everything if e.checkpoint == saved.digest]
    if len(found) < len(everything):
        part.note = f"{len(everything) - len(found)} of an earlier checkpoint left out."
    if found:
        names = ["read", "split", "attention length", "tokens", "bpc" if bytewise else "bits", "perplexity", "tokens/s"]
        part.rows = [names, *map(_row, found)]
    cached = [e for e in found if e.memory and not e.what and e.method == "cached"]
    if cached:
        last = cached[-1]
        alike = [e for e in found if (e.split, e.score.tokens) == (last.split, last.score.tokens)]
        plain = sorted((e.score for e in alike if e in cached and e.batch == last.batch), key=lambda s: s.attn_len)
        levels = {_level(e): e.score for e in alike if not e.memory}
        if len(plain) > 1:
            attention_length(plain, levels, saved.attn_len, folder / "attention_length.png", bytewise)
            part.pictures = _pictures(folder, {"attention_length.png": "What memory is worth"})
    return part


def _row(each: Evaluation) -> list[str]:
    score, reach = each.score, "" if "all before" in each.what else str(each.score.attn_len)
    numbers = [f"{score.tokens:,}", f"{score.bpc:.4f}", f"{score.ppl:,.3f}", f"{score.tokens_per_s:,.0f}"]
    return [each.what or each.method, each.split, reach, *numbers]


def _level(evaluation: Evaluation) -> str:
    """How a line across is called."""
    if evaluation.what.startswith("no memory"):
        return evaluation.what
    return f"{evaluation.what or evaluation.method}, length {evaluation.score.attn_len}"


def _speed(folder: Path) -> _Part:
    part = _Part("Speed of evaluation", "txl demo")
    for entry in _read_list(folder / SPEED):
        with suppress(TypeError, ValueError, ArithmeticError):
            each = Speedup(**entry)
            times = f"{each.vanilla_s * 1000:,.2f}", f"{each.cached_s * 1000:,.4f}"
            part.rows.append([f"{each.attn_len:d}", *times, f"{each.ratio:,.0f}x"])
    if part.rows:
        part.rows.insert(0, ["attention length", "sliding window, ms a token", "cached, ms a token", "speed-up"])
        part.note = "The sliding window is a vanilla Transformer of the same sizes, one prediction a forward pass."
    return part


def _recl(folder: Path, digest: str) -> _Part:
    """What `txl recl` wrote; nothing if it is not all there."""
    part, found = _Part("Effective context", "txl recl RUN OTHERS"), _read(folder / "recl.json")
    try:
        groups, contexts = found["effective"], found["contexts"]
        names = [f"RECL, r = {r}" for r in groups]
        rows = [["model", *names, f"perplexity at {contexts[0]}", f"at {contexts[-1]}"]]
        for model, values in found["perplexity"].items():
            effective = [group[model] for group in groups.values()]
            lengths = [("at least " if each["reached_end"] else "") + f"{each['length']:d}" for each in effective]
            rows.append([model, *lengths, f"{values[0]:,.3f}", f"{values[-1]:,.3f}"])
        old = digest not in found.get("checkpoints", {}).values()
        told = f"A property of a model in this group, of {found['positions']} positions."
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return part
    titles = {"figure-3.png": "Gain of each step of context (figure 3)", "figure-4.png": "Perplexity (figure 4)"}
    part.note = ("Of an earlier checkpoint. " if old else "") + told
    part.rows, part.pictures = rows, _pictures(folder, titles)
    return part


def _attention(folder: Path, digest: str) -> _Part:
    titles = {
        "figure-5.png": "Mean attention of every head (figure 5)",
        "figure-6.png": "Where three heads look, target by target (figure 6)",
        "figure-7.png": "The terms alone (figure 7)",
    }
    part = _Part("Attention", "txl attention RUN", pictures=_pictures(folder, titles))
    about = _read(folder / "attention.json")
    if part.pictures and (not isinstance(about, dict) or about.get("checkpoint") != digest):
        part.note = "Of an earlier checkpoint."
    if (folder / "attention.html").is_file():
        part.link = "attention/attention.html"
    return part


def _pictures(folder: Path, wanted: dict[str, str]) -> list[tuple[str, str]]:
    """Titles and data addresses of those that are there."""
    found = [(title, folder / name) for name, title in wanted.items() if (folder / name).is_file()]
    return [(title, "data:image/png;base64," + base64.b64encode(read_bytes(path)).decode()) for title, path in found]
