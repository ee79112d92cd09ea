"""`txl sweep`: the rows of an ablation of the paper, trained and scored one after the other."""

import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table as Grid

from txl import recipes
from txl.commands import last_resort
from txl.commands.console import EvaluationProgress, tell
from txl.commands.options import Device, console, in_panel, pick_device, say
from txl.commands.training import header, train_on_terminal
from txl.errors import Interrupted, TxlError
from txl.evaluation.evaluate import evaluate, init_and_best
from txl.paths import make_folder
from txl.sweep import (
    NO_REPRODUCTION,
    SCALES,
    TABLES,
    Job,
    Kept,
    Table,
    check_corpus,
    make_job,
    next_length,
    prepare_options,
)
from txl.text import corpus as corpora
from txl.text.corpus import Corpus
from txl.text.preparing import META
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig
from txl.training.run import unlock
from txl.training.timing import timed
from txl.training.trainer import Trainer

_ROW = "Each row"


def sweep_command(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="table6, table7 or table10 of the paper.")],
    run: Annotated[Path, typer.Option("--run", "-r", help="Folder of the sweep: a run a row.")],
    source: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="A prepared corpus, or a text, which becomes words (at scale paper: what the recipes take). Default: the "
            "sweep's own; where it begins the standard library.",
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="paper: the recipes as they are. small: a few minutes a row on two cores. tiny: a second a row, to try the "
            "command."
        ),
    ] = "small",
    row: Annotated[
        str | None,
        typer.Option(
            help="Only this one, as for each job of a job array; prepare the corpus first.", show_default=False
        ),
    ] = None,
    minutes: Annotated[float | None, in_panel(_ROW, help="Train about so long.", show_default=False)] = None,
    steps: Annotated[int | None, in_panel(_ROW, help="Updates; default: the scale's.", show_default=False)] = None,
    eval_tokens: Annotated[
        int | None,
        in_panel(
            _ROW,
            help="Tokens scored at each attention length; 0: the whole split. Default: the scale's.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Train and score the rows of the paper's Table 6, 7 or 10.

    The same command goes on where it was, after Ctrl-C, an error or a crash; rows that are done are
    skipped.
    """
    for name, value, known in (("TABLE", table, TABLES), ("--scale", scale, SCALES)):
        if value not in known:
            raise TxlError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    chosen = TABLES[table].chosen(row)
    if minutes is not None and (steps is not None or not 0 < minutes < math.inf):
        also = "" if steps is None else f" and --steps {steps}"
        raise TxlError(f"--minutes must be > 0 and finite, and without --steps, got {minutes:g}{also}")
    for name, number, least in (("steps", steps, 1), ("eval-tokens", eval_tokens, 0)):
        if number is not None and number < least:
            raise TxlError(f"--{name} must be >= {least}, got {number}")
    where = pick_device(device)
    corpus = _corpus(TABLES[table], scale, source, run)
    jobs = [
        make_job(TABLES[table], each, scale, len(corpus.vocabulary), steps, eval_tokens) for each in TABLES[table].rows
    ]
    settings = {"table": table, "scale": scale, "corpus": corpus.fingerprint, "minutes": minutes}
    kept = {job.row.name: Kept(run / job.row.name / "row.json", settings | job.to_json()) for job in jobs}
    errors = {}
    for job in jobs:
        if job.row in chosen:
            check_corpus(job, corpus)
    try:
        for job in jobs:
            name = job.row.name
            if job.row in chosen and not kept[name].finished:
                try:
                    _run(job, kept[name], corpus, where, minutes)
                    say(f"{name}: done")
                except Interrupted:
                    raise
                except Exception as error:  # the other rows go on
                    errors[name] = error
                    why = last_resort.reason(error)
                    if why is None:
                        last_resort.report(error)
                    tell(f"{name} failed: {why or type(error).__name__}".replace("\n", "\\n"))
                finally:
                    unlock(run / name)
    except (Interrupted, KeyboardInterrupt):
        tell(f"interrupted; go on with: {shlex.join(['txl', *sys.argv[1:]])}")
        raise Interrupted from None
    _show(TABLES[table], scale, [(job, kept[job.row.name]) for job in jobs], errors)
    if errors:
        raise TxlError(
            f"{len(errors)} of {len(chosen)} rows failed: {', '.join(errors)}; the same command tries them again"
        )


def _corpus(table: Table, scale: str, source: Path | None, folder: Path) -> Corpus:
    """What is given, if it is prepared; else the sweep's own, which it is prepared as."""
    make_folder(folder, "--run")
    own = folder / "corpus"
    held = (own / META).is_file()  # not so where its preparation was killed
    if source is None and scale == "paper" and not held:
        rule = prepare_options(table, scale).rule
        raise TxlError(f"--data must be given at --scale paper: a prepared corpus, or the files of {rule}; got none")
    prepared = source is not None and (source / META).is_file()
    corpus = corpora.open_corpus(own if held and not prepared else source, own, prepare_options(table, scale))
    data = recipes.load(table.rows[0].recipe).data
    if scale == "paper" and (corpus.rule, len(corpus.vocabulary)) != (data["rule"], data["vocab_size"]):
        say(
            f"the paper's figures are of {data['rule']} with {data['vocab_size']:,} symbols; this corpus is {corpus.rule} "
            f"with {len(corpus.vocabulary):,}, so they do not apply"
        )
    return corpus


def _run(job: Job, kept: Kept, corpus: Corpus, device: torch.device, minutes: float | None) -> None:
    """Begins a row, or goes on with it where it was."""
    folder = kept.path.parent
    if not kept.trained:
        trainer = _trainer(job, kept, corpus, device, minutes)
        say(f"{job.row.name}: {header(trainer)}")
        train_on_terminal(trainer)
        kept.trained = True
        kept.write()
        if trainer.stop_requested:  # during the last update
            raise Interrupted
    model, _ = checkpoints.restore(folder / "best.safetensors", device)
    tokens = corpus.split(job.split)
    corpus.verify(job.split)
    while (attn_len := _next(job, kept)) is not None:
        title, total = f"{job.row.name}: attention length {attn_len}", min(len(tokens), job.limit or len(tokens))
        with EvaluationProgress(console, title, total) as progress:
            score = evaluate(
                model, tokens, corpus.vocabulary.start, job.reading(attn_len), batch=64 if job.method == "sliding" else 8,
                limit=job.limit, progress=progress.update,
            )  # fmt: skip
        if not math.isfinite(score.nats):
            raise TxlError(f"the loss at attention length {attn_len} is {score.nats}")
        kept.scores.append(score)
        kept.write()
        say(f"{title}, ppl {score.ppl:.2f}, {score.tokens_per_s:,.0f} tokens/s")
    kept.finished = True
    kept.write()


def _trainer(job: Job, kept: Kept, corpus: Corpus, device: torch.device, minutes: float | None) -> Trainer:
    model, config = job.model_config, TrainConfig(**(kept.train or job.train))
    if kept.train is None:
        if minutes is not None:
            config = timed(minutes, corpus, model, config, device)
        kept.train = config.to_json()  # kept before the first update: one that is killed goes on with as many
    folder = kept.path.parent
    trainer = Trainer(folder, corpus, model, config, resume=(folder / "last.safetensors").exists(), device=device)
    kept.write()
    return trainer


def _next(job: Job, kept: Kept) -> int | None:
    ppl = {score.attn_len: score.ppl for score in kept.scores}
    return next_length(ppl, job.init, job.step, longest=job.longest, also=job.also)


def _show(table: Table, scale: str, rows: list[tuple[Job, Kept]], errors: Mapping[str, Exception]) -> None:
    """Prints the rows as far as they are, the paper's figures beside."""
    grid = Grid(title=f"{table.title}\nscale {scale}, perplexity of the {table.split} split")
    grid.add_column("row", no_wrap=True)
    for name in ("PPL init", "PPL best", "attn len", "the paper's"):
        grid.add_column(name, justify="right")
    for job, kept in rows:
        row = job.row
        state = (
            "failed" if row.name in errors else "scoring" if kept.trained else "training" if kept.train else "waiting"
        )
        own = (f"[dim]{state}[/]", "", "")
        if kept.finished:
            found = init_and_best(kept.scores, job.init)
            own = (f"{found.init.ppl:.2f}", f"{found.best.ppl:.2f}", str(found.shortest.attn_len))
        paper = "  ".join("-" if value is None else f"{value:g}" for value in (row.init, row.best, row.length))
        grid.add_row(row.name, *own, paper)
    console.print(grid)
    for job, kept in rows:
        for length, reported in job.row.at.items():
            own_length = int(length) * job.init // job.row.published_init
            for score in (x for x in kept.scores if x.attn_len == own_length):
                told = f"{score.ppl:.2f} at attention length {own_length}; the paper's {reported:g} at {length}"
                say(f"{job.row.name}: {told}")
    if scale != "paper":
        say(f"scale {scale}: {NO_REPRODUCTION}")
