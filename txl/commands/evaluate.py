"""`txl eval`: the loss of a split at each attention length."""

import dataclasses
import functools
from contextlib import suppress
from pathlib import Path
from typing import Annotated, get_args

from rich.table import Table
from rich.text import Text

from txl.commands.console import EvaluationProgress
from txl.commands.options import Checkpoint, Device, console, in_panel, numbers, say
from txl.commands.processes import Devices, processes, start_processes
from txl.commands.splits import split_of
from txl.distributed.reading import agree_on_reading
from txl.errors import TxlError
from txl.evaluation.evaluate import METHODS, default_method
from txl.evaluation.precision import check_precision, evaluation_dtype, in_dtype, sliding_part
from txl.evaluation.score import Score, init_and_best
from txl.language_model import LanguageModel, load
from txl.model import Network
from txl.model.recurrent import RecurrentNetwork
from txl.model.transformer import TransformerXL
from txl.report import Evaluation, keep_evaluations
from txl.text.streams import Counting

_TEXT, _READING = "What is scored", "How it is read"
_TRIAL = 4096  # tokens of a trial in either precision


def evaluate_command(
    checkpoint: Checkpoint,
    source: Annotated[
        Path | None,
        in_panel(_TEXT, "--data", help="A prepared corpus, or a text file, scored whole. Default: the run's."),
    ] = None,
    split: Annotated[str, in_panel(_TEXT, help="train, valid or test, of a corpus.")] = "test",
    limit: Annotated[int | None, in_panel(_TEXT, help="Score only the first so many tokens.")] = None,
    counting: Annotated[
        str,
        in_panel(_TEXT, help="all: every token once. released: as the released code, without each stream's first."),
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
            _READING, help="Tokens a step; default: cached 128, sliding 1, segments as in training.", show_default=False
        ),
    ] = None,
    clamp_len: Annotated[
        int | None, in_panel(_READING, help="Largest distance told apart. Default: as in training.")
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
        str, in_panel(_READING, help="fp32; bf16; or auto: bf16 where a GPU has it or a CPU is measured faster in it.")
    ] = "fp32",
    device: Device = "auto",
    devices: Devices = None,
) -> None:
    """Bits per token, perplexity and speed at each attention length."""
    if devices is not None:
        start_processes(devices, device)
        return
    with processes(device) as (world, where):
        with world.together():
            for name, value in (("segment", segment), ("batch", batch), ("limit", limit)):
                if value is not None and value < 1:
                    raise TxlError(f"--{name} must be >= 1, got {value}")
            if method not in (None, *METHODS):
                raise TxlError(f"--method must be one of {', '.join(METHODS)}, got {method!r}")
            check_precision(precision)
            counted = _counting(counting)
            lengths = _attention_lengths(attn_len) if attn_len else None
            language_model = load(checkpoint, where)
            model = language_model.model
            how = default_method(model) if method is None else method
            _begin_with(model, zeros, lengths if how != "sliding" else None)
            tokens = split_of(language_model, source, split)
        options = {
            "--split": split, "--limit": limit, "--attn-len": lengths, "--method": how, "--segment": segment,
            "--clamp-len": clamp_len, "--zeros": zeros, "--batch": batch, "--counting": counted, "--precision": precision,
        }  # fmt: skip
        agree_on_reading(world, {"": language_model.digest}, tokens, options)
        score_at = functools.partial(
            language_model.evaluate, tokens, method=how, segment=segment, batch=batch, clamp_len=clamp_len,
            counting=counted, world=world,
        )  # fmt: skip
        longest = max(lengths) if lengths else None
        if how == "sliding":
            length = longest or language_model.attn_len
            start = language_model.vocabulary.start
            part = sliding_part(model, tokens[:limit], start, length, segment or 1, batch, clamp_len)
        else:
            few = min(len(tokens), limit or len(tokens), max(_TRIAL, 2 * batch))
            part = functools.partial(score_at, longest, limit=few)
        dtype, measured = evaluation_dtype(precision, where, part, world)
        if measured is not None:
            say(measured)
        scores = []
        for n in lengths or [language_model.attn_len]:
            title, total = f"attention length {n}", min(len(tokens), limit or len(tokens))
            with world.together(), EvaluationProgress(console, title, total) as progress, in_dtype(where, dtype):
                scores.append(score_at(n if lengths else None, limit=limit, progress=progress.update))
        _print(scores, language_model, how, how if dtype is None else f"{how} in bfloat16")
        if world.first and checkpoint.is_dir() and source is None:
            asked = {"clamp_len": clamp_len, "segment": segment, "zeros": zeros}
            told = [f"{name} {value}" for name, value in asked.items() if value is not None]
            told += [] if dtype is None else ["bfloat16"]
            told += [] if counted == "all" else [f"counting {counted}"]
            told += ["all before"] if isinstance(model, RecurrentNetwork) and how == "segments" else []
            what = ", ".join([how, *told]) if told else ""
            memory, mark = how != "sliding", language_model.digest
            _keep(checkpoint, [Evaluation(s, split, how, what, memory, mark, batch) for s in scores])


def _begin_with(model: Network, zeros: bool | None, lengths: list[int] | None) -> None:
    """Sets what precedes a text, where it is asked for.

    Raises:
        TxlError: that, or lengths, are given of a network that reads all before.
    """
    if isinstance(model, RecurrentNetwork) and (zeros is not None or lengths):
        raise TxlError(
            f"a network of kind {model.config.network!r} reads all that is before a token: --zeros and --empty are not for "
            "it, --attn-len only with --method sliding"
        )
    if zeros is not None:
        assert isinstance(model, TransformerXL)
        model.config = dataclasses.replace(model.config, initial_memory="zeros" if zeros else "empty")


def _keep(folder: Path, found: list[Evaluation]) -> None:
    """For the run's page; a folder that cannot be written does not matter."""
    with suppress(OSError):
        keep_evaluations(folder, found)


def _counting(name: str) -> Counting:
    for known in get_args(Counting):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise TxlError(f"--counting must be all or released, got {name!r}")


def _attention_lengths(text: str) -> list[int]:
    lengths = numbers("--attn-len", text)
    if any(n < 1 for n in lengths):
        raise TxlError(f"--attn-len must be >= 1 (a token sees at least itself), got {text}")
    return lengths


def _print(scores: list[Score], saved: LanguageModel, how: str, told: str) -> None:
    words = saved.vocabulary.unit == "words"
    measure = "ppl" if words else "bpc"
    table = Table("attention length", "tokens", measure, "tokens/s", title=Text(f"{told}, of {saved.path}"))
    for column in table.columns:
        column.justify = "right"
    for s in scores:
        reach = "all before" if isinstance(saved.model, RecurrentNetwork) and how == "segments" else str(s.attn_len)
        table.add_row(reach, f"{s.tokens:,}", f"{s.ppl if words else s.bpc:.4f}", f"{s.tokens_per_s:,.0f}")
    console.print(table)
    for s in scores:
        if s.ppl_with_starts is not None:
            say(
                f"attention length {s.attn_len}: {s.ppl_with_starts:.4f} ppl as TensorFlow counts the opening <S>, at least"
            )
    if len(scores) > 1 and saved.attn_len in [s.attn_len for s in scores]:
        found = init_and_best(scores, saved.attn_len)
        init, best = (f"{s.ppl if words else s.bpc:.4f}" for s in (found.init, found.best))
        say(
            f"init {init} {measure} (training's length {saved.attn_len}), best {best} (length {found.best.attn_len}), "
            f"shortest length within 0.1% of its perplexity: {found.shortest.attn_len}"
        )
