"""Samples on the terminal, side by side or one after the other, and in a file."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from txl.commands.console import output_is_gone
from txl.commands.samples import Sample
from txl.errors import TxlError
from txl.paths import replace_text

WIDE = 120  # columns of a terminal on which the three texts stand side by side


def show(sample: Sample, console: Console) -> None:
    """Side by side on a wide terminal, else one after the other; that nobody reads it ends
    nothing."""
    try:
        _show(sample, console)
    except BrokenPipeError:
        output_is_gone()


def _show(sample: Sample, console: Console) -> None:
    if not console.is_terminal or console.width < WIDE:
        for heading, text in sample.parts:
            sys.stdout.buffer.write(f"--- {heading} ---\n{text}\n\n".encode())
        sys.stdout.buffer.flush()
        return
    table = Table(expand=True)
    for heading, _ in sample.parts:
        table.add_column(heading, ratio=1, overflow="fold")
    table.add_row(*(Text(text) for _, text in sample.parts))  # as it is, brackets and all
    console.print(table)


def check_place(path: Path) -> None:
    """Raises TxlError if no file can be there; before the time is spent."""
    if path.is_dir() or not path.parent.is_dir():
        raise TxlError(f"--out must name a file in a folder that exists, got {path}")


def write(path: Path, samples: list[Sample], settings: dict[str, Any], checkpoint: Path) -> None:
    """A JSON list over the samples; a file that is there is replaced whole."""
    entries = [
        {
            **dataclasses.asdict(sample),
            "tokens_per_s": sample.generated_tokens / sample.seconds,
            "settings": settings,
            "checkpoint": str(checkpoint),
        }
        for sample in samples
    ]
    replace_text(path, json.dumps(entries, indent=2) + "\n")
