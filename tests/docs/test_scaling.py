"""The scaling page's tables are those that the code prints, and so are the figures of its text."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from txl.recipes.scaling import hardware, memory, search, step_time, traffic
from txl.recipes.scaling.hardware import H200
from txl.recipes.scaling.setup import table_count
from txl.recipes.scaling.tables import LARGE, setup, tables

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())


def number(pattern: str) -> float:
    found = re.search(pattern, TEXT)
    assert found, pattern
    return float(found[1].replace(",", ""))


def test_tables() -> None:
    for name, table in tables().items():
        assert f"\n\n{table}\n\n" in PAGE, f"{name}: print it with `python -m txl.recipes.scaling`"


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({}, r"costs a row's device (\d+) KB"),
        ({"recompute": True}, r"(\d+) with `--recompute`"),
    ],
)
def test_what_a_position_remembered_costs(options: dict[str, bool], pattern: str) -> None:
    one = setup("enwik8-large", 8, 1)
    longer = [
        replace(one, model=replace(one.model, mem_len=n), train=replace(one.train, **options))
        for n in (10**5, 2 * 10**5)
    ]
    less, more = (memory.device_memory(each).total for each in longer)
    assert number(pattern) == round((more - less) / 10**5 / 1000)


def test_sharding_on_a_thousand_gpus() -> None:
    many = replace(setup("lm1b-large-tf", 1024), shard=True)
    assert number(r"needs (\d+) exchanges") == sum(each.times for each in traffic.collectives(many))
    assert number(r"exchanges: (\d+) ms") == round(1e3 * step_time.step_time(many, H200).total)
    ring = hardware.RING.base + hardware.steps(1024, 8, hardware.RING, tree=False)
    assert number(r"takes ([\d.]+) ms in steps alone") == round(1e3 * ring, 1)


def test_64_gpus() -> None:
    free = replace(H200, launch=0.0)
    best = [[search.best(setup(name, 64), each)[1].efficiency for name in LARGE] for each in (H200, free)]
    assert number(r"Products fill (\d+)% of an update at most") == round(100 * max(best[0]))
    assert number(r"at most, (\d+)% if launches were free") == round(100 * max(best[1]))


def test_of_the_text() -> None:
    large = setup("lm1b-large")
    assert 1 / 6.5 < table_count(large.model) / large.parameters.count < 1 / 5.5
    assert f"{large.model.vocab_size:,}" in TEXT
    assert all(search.fits(setup(name), H200) for name in LARGE)
    grown = search.rows_for(setup("enwik8-large", 1024), H200, 0.8)
    assert grown is not None
    assert number(r"at a batch of ([\d,]+) a stream") == 1024 * grown
    assert number(r"of them, (\d+) segments") == pytest.approx(90e6 / (1024 * grown) / 768, abs=0.5)
    times = [search.best(setup("enwik8-large", world), H200)[1].total for world in (64, 1024)]
    assert times[0] < times[1]
    assert (H200.used, H200.launch, H200.across(1024, 8)) == (0.4, 5e-6, 400e9)
