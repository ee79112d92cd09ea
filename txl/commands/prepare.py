"""`txl prepare`: make a corpus from a text or a data set's files."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from txl.commands.console import NO_DATA, bar, console, in_panel, say
from txl.text import corpus as data
from txl.text.datasets import RULES, PrepareOptions
from txl.text.readers import SPLITS

_TEXT, _WORDS = "Text", "Words"


def prepare(
    out: Annotated[Path, typer.Argument(help="The new folder to write the corpus to.")],
    source: Annotated[
        Path | None,
        in_panel(
            _TEXT,
            "--data",
            help="A text file (.gz, .bz2, .xz, .zip, .tar too), a data set's archive (.zip, .tar), or a folder. "
            "Default: Python's standard library.",
        ),
    ] = None,
    rule: Annotated[
        str,
        in_panel(_TEXT, "--as", help=f"The data set, or what any text becomes: auto, {', '.join(RULES)}."),
    ] = "auto",
    newline: Annotated[
        str, in_panel(_TEXT, help="enwik8: keep newlines, or drop them as the original preparation does.")
    ] = "keep",
    lower: Annotated[bool, in_panel(_WORDS, "--lower", help="Words in lower case.")] = False,
    min_count: Annotated[int, in_panel(_WORDS, help="Words seen less often become <unk>.")] = 1,
    max_words: Annotated[int | None, in_panel(_WORDS, help="Keep so many words; the rest become <unk>.")] = None,
    vocabulary: Annotated[
        Path | None, in_panel(_WORDS, help="A file of the words, one a line; they are not counted then.")
    ] = None,
) -> None:
    """Turn text into a corpus of bytes or words, data sets into their standard splits.

    Sizes are compared with the published ones. Memory does not grow with the text.

    The bar of the first reading stays empty for a folder and an archive of several
    files: the size of their text is known only when it has been read.
    """
    if source is None:
        say(NO_DATA)
    options = PrepareOptions(rule, newline, lower or None, min_count, max_words, vocabulary)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with bar(*columns, transient=True) as shown:
        task = shown.add_task("looking", total=None)

        def show(what: str, done: int, total: int) -> None:
            shown.update(task, description=what, completed=done, total=total or None)

        corpus = data.prepare(source, out, options, show)
    published = RULES[corpus.rule].published(options)
    console.print(corpus.source, markup=False, soft_wrap=True)
    for name in SPLITS:
        size = len(corpus.split(name))
        console.print(f"{name:>6}: {size:>13,} tokens{_compared(size, published.get(name))}", highlight=False)
    size = len(corpus.vocabulary)
    written = f"vocabulary: {size:,} {corpus.vocabulary.unit}{_compared(size, published.get('vocabulary'))}"
    console.print(f"{written}; written to {out}", markup=False, soft_wrap=True)


def _compared(size: int, published: int | None) -> str:
    if published is None:
        return ""
    return " (as published)" if size == published else f" (published: {published:,})"
