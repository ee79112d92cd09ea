"""The reproduction page's operations are those that are counted, its commands ones that exist."""

import re
from pathlib import Path

import pytest

from txl import recipes
from txl.commands.cli import COMMANDS
from txl.recipes.cost import training_cost
from txl.sweep import TABLES, make_job
from txl.training.config import TrainConfig

PAGE = (Path(__file__).parents[2] / "docs" / "reproduction.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([\d.]+) \| ([\d.,]+) \|$", PAGE, re.M)


def operations(recipe: str) -> float:
    found = recipes.load(recipe)
    return training_cost(found.model_config(None if found.data else 204), found.train_config()).total


def counted(command: str) -> float:
    sweep = re.search(r"txl sweep (\w+)", command)
    if sweep:
        table = TABLES[sweep.group(1)]
        vocabulary = recipes.load(table.rows[0].recipe).data["vocab_size"]
        jobs = [make_job(table, row, "paper", vocabulary) for row in table.rows]
        return sum(training_cost(job.model_config, TrainConfig(**job.train)).total for job in jobs)
    if "txl recl" in command:
        return operations("wt103-qrnn") + operations("wt103-lstm")
    return operations(re.search(r"--recipe ([\w-]+)", command).group(1))  # type: ignore[union-attr]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_operations_and_hours(row: tuple[str, str, str, str]) -> None:
    total = counted(row[1])
    assert float(row[2]) * 1e18 == pytest.approx(total, rel=0.006)
    assert float(row[3].replace(",", "")) == pytest.approx(total / 3.6e17, rel=0.03, abs=0.05)


def test_every_table_and_figure_is_there() -> None:
    assert len(ROWS) == 14
    for number in range(1, 11):
        assert f"| Table {number}" in PAGE
    for figure in ("figures 3 and 4", "Figures 5, 6 and 7", "Figures 1 and 2"):
        assert figure in PAGE


def test_commands_are_those_of_txl() -> None:
    assert set(re.findall(r"`txl (\w+)", PAGE)) <= set(COMMANDS)
