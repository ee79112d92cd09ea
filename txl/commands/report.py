"""`txl report`: one page of a run."""

from pathlib import Path
from typing import Annotated

import typer

from txl.commands.options import say
from txl.report.page import write_report


def report_command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
) -> None:
    """Write RUN/report.html: curves, attention lengths, speed, samples, RECL and attention.

    Of what has been measured: `txl eval`, `txl generate`, `txl recl` and `txl attention` leave
    their results in the run's folder.
    """
    say(write_report(run))
