"""`txl eval`: the loss of a split at each attention length."""

import functools
from pathlib import Path
from typing import Annotated, get_args

import torch
from rich.table import Table
from rich.text import Text

from txl.commands.console import (
    CheckpointOrRun,
    Device,
    Run,
    console,
    evaluation_progress,
    in_panel,
    numbers,
    one_of,
    pick_device,
    say,
)
from txl.errors import TxlError
from txl.evaluation.evaluate import Reading, Score, check_positive
from txl.language_model import LanguageModel, load
from txl.model.recurrent import RecurrentNetwork
from txl.text import corpus as data
from txl.text.preparing import encode_file
from txl.text.readers import SPLITS
from txl.text.streams import Counting
from txl.text.vocabulary import Tokens
from txl.training.config import PRECISIONS, autocast_dtype
from txl.training.run import read_record

_TEXT, _READING = "What is scored", "How it is read"


def evaluate_command(
    checkpoint: CheckpointOrRun = None,
    run: Run = None,
    source: Annotated[
        Path | None,
        in_panel(_TEXT, "--data", help="A prepared corpus, or a text file, scored whole. Default: the run's."),
    ] = None,
    split: Annotated[str, in_panel(_TEXT, help="train, valid or test, of a corpus.")] = "test",
    limit: Annotated[int | None, in_panel(_TEXT, help="Score only the first so many tokens.")] = None,
    counting: Annotated[
        str,
        in_panel(
            _TEXT,
            help="all: every token once. released: as the released code, without each stream's first; or, of One Billion "
            "Word, without the last --segment that is not full in all streams.",
        ),
    ] = "all",
    attn_len: Annotated[
        str,
        in_panel(
            _READING,
            help="Most keys a token sees; several separated by commas. Default: as in training.",
            show_default=False,
        ),
    ] = "",
    method: Annotated[
        str | None,
        in_panel(
            _READING,
            help="cached: exactly --attn-len keys a token. segments: a memory of hidden states, as released; the keys vary. "
            "sliding: a window read anew for every --segment tokens. Default: sliding without recurrence, else cached, "
            "or segments where positions are absolute.",
        ),
    ] = None,
    segment: Annotated[
        int | None,
        in_panel(
            _READING,
            help="Tokens a step; default: cached 512 (fewer if they need over 1 GiB), sliding 1, segments as in training.",
            show_default=False,
        ),
    ] = None,
    clamp_len: Annotated[
        int | None, in_panel(_READING, help="Largest distinct distance. Default: as in training.")
    ] = None,
    zeros: Annotated[
        bool | None,
        in_panel(
            _READING,
            "--zeros/--empty",
            help="What precedes a text: zero states, attended, or nothing.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, in_panel(_READING, help="Parallel streams; each starts without memory.")] = 8,
    precision: Annotated[
        str, in_panel(_READING, help="fp32; bf16; or auto: bf16 where the device multiplies it faster.")
    ] = "fp32",
    device: Device = "auto",
) -> None:
    """Bits per token, perplexity and speed at each attention length."""
    if precision not in PRECISIONS:
        raise TxlError(f"--precision must be {', '.join(PRECISIONS)}, got {precision!r}")
    for name, value in (("batch", batch), ("limit", limit)):
        check_positive(name, value)
    if counting not in get_args(Counting):
        raise TxlError(f"--counting must be all or released, got {counting!r}")
    lengths = numbers("--attn-len", attn_len) if attn_len else [None]
    asked = [Reading(n, method, segment) for n in lengths]  # type: ignore[arg-type]
    where = pick_device(device)
    language_model = load(one_of(checkpoint, run), where, clamp_len=clamp_len, zeros=zeros)
    tokens = split_of(language_model, source, split, limit)
    score_at = functools.partial(language_model.evaluate, tokens, batch=batch, counting=counting)  # type: ignore[arg-type]
    dtype = autocast_dtype(precision, where)
    autocast = functools.partial(torch.autocast, where.type, dtype=dtype, enabled=dtype is not None)
    scores = []
    readings = [language_model.resolve(one, batch) for one in asked]
    untimed = min(batch * readings[0].segment, limit or len(tokens), len(tokens))
    with autocast():  # one step, which allocates memory and makes first calls
        language_model.evaluate(tokens, readings[0], batch=batch, limit=untimed)
    for reading in readings:
        title = f"attention length {reading.attn_len}"
        total = min(len(tokens), limit or len(tokens))
        with evaluation_progress(title, total) as progress, autocast():
            scores.append(score_at(reading, limit=limit, progress=progress))
    how = readings[0].method
    _print(scores, language_model, how, how if dtype is None else f"{how} in bfloat16")


def split_of(saved: LanguageModel, source: Path | None, split: str, enough: int | None = None) -> Tokens:
    """Return the tokens of a split or of a file.

    source: a corpus, or a file, which is read as a whole; None for the run's corpus.
    enough: maximum number of tokens to read from a file; None for all.

    Raises:
        TxlError: the source does not exist, or the corpus has another vocabulary than the model.
    """
    if split not in SPLITS:
        raise TxlError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    source = source or read_record(saved.path.parent).corpus
    if not source.exists():
        raise TxlError(f"{source}: no such file or folder")
    if not source.is_dir():  # also a pipe
        return encode_file(saved.vocabulary, source, enough)
    corpus = data.load(source)
    if corpus.vocabulary != saved.vocabulary:
        raise TxlError(f"{source}: its vocabulary is not the one {saved.path} was trained with")
    corpus.verify(split)
    return corpus.split(split)


def _print(scores: list[Score], saved: LanguageModel, how: str, method: str) -> None:
    words = saved.vocabulary.unit == "words"
    measure = "ppl" if words else "bpc"
    table = Table("attention length", "tokens", measure, "tokens/s", title=Text(f"{method}, of {saved.path}"))
    for column in table.columns:
        column.justify = "right"
    for s in scores:
        reach = "all before" if isinstance(saved.model, RecurrentNetwork) and how == "segments" else str(s.attn_len)
        table.add_row(reach, f"{s.tokens:,}", f"{s.ppl if words else s.bpc:.4f}", f"{s.tokens_per_s:,.0f}")
    console.print(table)
    init = next((s for s in scores if s.attn_len == saved.attn_len), None)
    if len(scores) > 1 and init is not None:  # columns of the paper's Table 6
        best = min(scores, key=lambda s: s.nats)
        shortest = min(s.attn_len for s in scores if s.ppl <= best.ppl * 1.001)
        shown = [f"{s.ppl if words else s.bpc:.4f}" for s in (init, best)]
        say(
            f"init {shown[0]} {measure} (training's length {saved.attn_len}), best {shown[1]} (length {best.attn_len}), "
            f"shortest length within 0.1% of its perplexity: {shortest}"
        )
