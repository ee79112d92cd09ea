"""The table of a sweep on the terminal, the paper's figures beside."""

from collections.abc import Sequence

from rich.table import Table as Grid

from txl.commands.options import console, say
from txl.sweeps.plan import published_init
from txl.sweeps.results import NO_REPRODUCTION, Result
from txl.sweeps.tables import Row, Table


def show(table: Table, scale: str, results: Sequence[Result]) -> None:
    """Prints the rows, what the paper has beyond three figures a row, and what they are worth."""
    grid = Grid(title=f"{table.title}\nscale {scale}, perplexity of the {table.split} split")
    grid.add_column("row", no_wrap=True)
    for name in ("PPL init", "PPL best", "attn len", "the paper's"):
        grid.add_column(name, justify="right")
    for result in results:
        found = result.found
        own = (f"[dim]{result.state}[/]", "", "")
        if found is not None:
            own = (f"{found.init.ppl:.2f}", f"{found.best.ppl:.2f}", str(found.shortest.attn_len))
        grid.add_row(result.plan.name, *own, _reported(result.plan.row))
    console.print(grid)
    for result in results:
        for length, reported in result.plan.row.at.items():
            score = result.at(length, published_init(result.plan.row))
            if score is not None:
                say(
                    f"{result.plan.name}: {score.ppl:.2f} at attention length {score.attn_len}; the paper's {reported:g} at "
                    f"{length}"
                )
    if scale != "paper":
        say(f"scale {scale}: {NO_REPRODUCTION}")


def _reported(row: Row) -> str:
    return "  ".join("-" if value is None else f"{value:g}" for value in (row.init, row.best, row.length))
