"""What a sweep has found so far: `table6.json`, and the same in short as `table6.csv`."""

import csv
import io
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import torch

import txl_kernels
from txl.evaluation.evaluate import Lengths, Score, init_and_best
from txl.paths import replace_text
from txl.sweeps.ledger import Ledger, Progress
from txl.sweeps.plan import Plan
from txl.sweeps.tables import Table

NO_REPRODUCTION = "models, lengths and text are not the paper's: its figures are not reproduced here"


@dataclass(frozen=True)
class Result:
    """A row as far as it is.

    Attributes:
        found: None until it is finished.
        error: why this sweep could not finish it, or None.
    """

    plan: Plan
    progress: Progress
    found: Lengths | None
    error: str | None

    @property
    def state(self) -> str:
        """finished, failed, scoring, training or waiting."""
        if self.found is not None:
            return "finished"
        if self.error is not None:
            return "failed"
        if self.progress.trained:
            return "scoring"
        return "waiting" if self.progress.train is None else "training"

    def at(self, published: int, published_init: int) -> Score | None:
        """The score at the row's own share of a length of the paper; None if it was not scored."""
        own = published * self.plan.reading.init // published_init
        return next((score for score in self.progress.scores if score.attn_len == own), None)


def collect(ledger: Ledger, plans: Sequence[Plan], errors: Mapping[str, str]) -> list[Result]:
    """Every row of a ledger as its folder has it. errors: by row, of this sweep."""
    results = []
    for plan in plans:
        progress = ledger.progress(plan.name)
        found = init_and_best(progress.scores, plan.reading.init) if progress.finished is not None else None
        results.append(Result(plan, progress, found, None if found else errors.get(plan.name)))
    return results


def write(ledger: Ledger, table: Table, results: Sequence[Result]) -> None:
    """Replaces both files, each whole."""
    record = {
        "table": table.name, "title": table.title,
        "note": None if ledger.settings["scale"] == "paper" else NO_REPRODUCTION,
        "settings": ledger.settings,
        "versions": {"txl": txl_kernels.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rows": [_full(result) for result in results],
    }  # fmt: skip
    replace_text(ledger.folder / f"{table.name}.json", json.dumps(record, indent=2))
    text = io.StringIO()
    lines = [_short(result) for result in results]
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    replace_text(ledger.folder / f"{table.name}.csv", text.getvalue())


def _full(result: Result) -> dict[str, Any]:
    plan, progress, found = result.plan, result.progress, result.found
    kept = asdict(progress)
    scores = sorted(progress.scores, key=lambda score: score.attn_len)
    row = plan.row
    return {
        "name": plan.name, "state": result.state, "error": result.error, **plan.to_json(),
        "train": progress.train or plan.to_json()["train"],
        **{k: kept[k] for k in ("parameters", "device", "threads", "finished")},
        "seconds": {"train": progress.train_seconds, "scores": sum(score.seconds for score in scores)},
        "scores": [{**asdict(score), "ppl": score.ppl} for score in scores],
        **{name: _point(getattr(found, name)) if found else None for name in ("init", "best", "shortest")},
        "paper": {"init": row.init, "best": row.best, "length": row.length, "at": dict(row.at)},
    }  # fmt: skip


def _point(score: Score) -> dict[str, Any]:
    return {"attn_len": score.attn_len, "ppl": score.ppl}


def _short(result: Result) -> dict[str, Any]:
    plan, found, row = result.plan, result.found, result.plan.row
    return {
        "row": plan.name, "recipe": row.recipe, "recurrence": "yes" if plan.model["mem_len"] else "no",
        "encoding": plan.model_config().encoding, "loss": plan.train_config().loss, "backprop_len": plan.train["tgt_len"],
        "parameters": result.progress.parameters, "state": result.state,
        "init_len": found and found.init.attn_len, "init": found and found.init.ppl,
        "best_len": found and found.best.attn_len, "best": found and found.best.ppl,
        "shortest_len": found and found.shortest.attn_len,
        "paper_init": row.init, "paper_best": row.best, "paper_len": row.length,
    }  # fmt: skip
