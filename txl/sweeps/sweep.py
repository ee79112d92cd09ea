"""A sweep from its settings to its table: checked whole, begun or gone on with, row after row."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from txl import recipes
from txl.commands.console import tell
from txl.commands.options import say
from txl.distributed.same import code_digest
from txl.distributed.world import World
from txl.errors import TxlError
from txl.paths import make_folder
from txl.sweeps import ledger as ledgers
from txl.sweeps import ranks, results, scales, show, text
from txl.sweeps.devices import Deal
from txl.sweeps.faults import reason
from txl.sweeps.ledger import Ledger
from txl.sweeps.plan import Plan, check_corpus, make_plan
from txl.sweeps.row import run_row
from txl.sweeps.tables import Row, Table
from txl.sweeps.terminal import Terminal
from txl.text import corpus as data
from txl.text.corpus import Corpus
from txl.training.lock import lock, unlock
from txl.training.run_folder import refuse_used_folder
from txl.training.trainer import Interrupted


@dataclass(frozen=True)
class Sweep:
    """A sweep that is ready to run.

    Attributes:
        plans: of every row of the table. chosen: names of those to run.
    """

    ledger: Ledger
    table: Table
    corpus: Corpus
    plans: Sequence[Plan]
    chosen: Sequence[str]


def run(
    folder: Path, table: Table, rows: Sequence[Row], source: Path | None, settings: dict[str, Any],
    devices: Sequence[torch.device], world: World = World(),  # noqa: B008 - frozen
) -> None:  # fmt: skip
    """Trains and scores rows, prints the table, and leaves all that was found in the folder.

    settings: `scale`, `minutes`, `steps`, `eval_tokens`, see `Ledger`.
    devices: of this process; a single one where there are several processes.
    world: processes that share the rows; each must see the folder.

    Raises:
        TxlError: the folder holds another sweep or another process runs one there, the corpus does
            not do, rows failed, or another process is lost.
        Interrupted, KeyboardInterrupt: Ctrl-C.
    """
    try:
        sweep = world.in_order(lambda: _taken(folder, table, rows, source, settings, world))
        if world.size > 1:
            facts = {
                "torch": torch.__version__,
                "the code of txl": code_digest(),
                "the corpus": sweep.corpus.fingerprint,
            }
            world.agree(facts | {"the rows": ", ".join(sweep.chosen)})
        errors = _run_rows(sweep, devices, world)
        with world.together():
            if world.first:
                show.show(table, settings["scale"], _written(sweep, errors))
    finally:
        unlock(folder)
    say(f"in {folder}: {table.name}.json, {table.name}.csv, and a run a row")
    with world.together():
        if errors:
            raise TxlError(
                f"{len(errors)} of {len(rows)} rows failed: {', '.join(errors)}; the same command tries them again"
            )


def _taken(
    folder: Path, table: Table, rows: Sequence[Row], source: Path | None, settings: dict[str, Any], world: World
) -> Sweep:
    """The sweep, made ready and locked by the first process, read by the others."""
    if world.first:
        if not (folder / "sweep.json").exists():
            refuse_used_folder(folder)
        make_folder(folder, "--run")
        lock(folder)
        return _ready(folder, table, rows, source, {"table": table.name, **settings})
    ledger = ledgers.read(folder)
    if ledger is None:
        raise TxlError(f"{folder}: the first process's sweep is not seen here; all need the same folder")
    corpus = data.load(ledger.corpus)
    plans = [make_plan(table, row, ledger.settings, len(corpus.vocabulary)) for row in table.rows]
    return Sweep(ledger, table, corpus, plans, [row.name for row in rows])


def _ready(folder: Path, table: Table, rows: Sequence[Row], source: Path | None, settings: dict[str, Any]) -> Sweep:
    """Everything that can be wrong is found here, before anything is trained."""
    ledger = ledgers.read(folder)
    if ledger is not None:
        ledger.refuse_others(settings)
    scale = scales.find(settings["scale"])
    options = scales.prepare_options(table, scale)
    text.refuse_no_text(source, ledger, options)
    corpus = text.open_text(folder, source, options, ledger)
    settings = settings | {"corpus": corpus.fingerprint}
    plans = [make_plan(table, row, settings, len(corpus.vocabulary)) for row in table.rows]
    for plan in plans:
        if plan.row in rows:
            check_corpus(plan, corpus)
    described = {plan.name: plan.to_json() for plan in plans}
    if ledger is None:
        for plan in plans:
            refuse_used_folder(folder / plan.name)
    else:
        ledger.refuse_others(settings, described)
    ledger = Ledger(folder, settings, described, corpus.folder)
    ledger.write()
    published = recipes.load(table.rows[0].recipe).data
    said = text.other_data(published["rule"], published["vocab_size"], corpus) if scale is None else None
    if said:
        say(said)
    return Sweep(ledger, table, corpus, plans, [row.name for row in rows])


def _run_rows(sweep: Sweep, devices: Sequence[torch.device], world: World) -> dict[str, str]:
    """Runs what is not finished; why rows failed, by name."""
    errors: dict[str, str] = {}

    def done(name: str, error: str | None) -> None:
        if error is None:
            say(f"{name}: done")
        else:
            errors[name] = error
            tell(f"{name} failed: {error}".replace("\n", "\\n"))
        _written(sweep, errors)

    todo = world.first_does(lambda: [n for n in sweep.chosen if sweep.ledger.progress(n).finished is None])
    if not todo:
        return errors
    plans = {plan.name: plan for plan in sweep.plans}
    if world.size > 1:
        own = [plans[name] for name in todo]
        return ranks.run_rows(sweep.ledger, own, sweep.corpus, devices[0], world, partial(_written, sweep))
    if min(len(devices), len(todo)) > 1:
        Deal(sweep.ledger.folder, todo, devices[: len(todo)], say, done).run()
        return errors
    for name in todo:
        try:
            run_row(sweep.ledger, plans[name], sweep.corpus, devices[0], Terminal())
        except Interrupted:
            raise
        except Exception as error:
            done(name, reason(error, sweep.ledger.folder / name))
        else:
            done(name, None)
    return errors


def _written(sweep: Sweep, errors: dict[str, str]) -> list[results.Result]:
    """All rows as they are, written beside the ledger."""
    found = results.collect(sweep.ledger, sweep.plans, errors)
    results.write(sweep.ledger, sweep.table, found)
    return found
