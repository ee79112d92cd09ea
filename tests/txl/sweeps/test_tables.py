"""The tables as data, and their rows at every scale."""

import json

import pytest
import torch

from txl import TransformerXL, recipes
from txl.errors import TxlError
from txl.model.transformer import count_parameters
from txl.sweeps import scales, tables
from txl.sweeps.plan import Plan, check_corpus, make_plan
from txl.text.corpus import Corpus

EVERY = [(table.name, row.name) for table in tables.TABLES.values() for row in table.rows]
# Init, best and attention length as the paper prints them, in its order.
PRINTED = {
    "table6": [
        (27.02, 26.77, 500), (27.94, 27.94, 256), (28.69, 28.33, 460), (29.59, 29.02, 260), (30.10, 30.10, 120),
        (29.75, 29.75, 120), (30.50, 30.50, 120), (30.97, 30.97, 120), (31.16, 31.16, 120), (23.43, 23.09, 640),
    ],
    "table7": [(None, 25.2, None), (None, 25.7, None), (None, 27.1, None)],
    "table10": [(27.02, 26.77, 500), (28.69, 28.33, 460), (28.43, 27.98, 400), (28.83, 28.83, 120)],
}  # fmt: skip


def planned(table: str, row: str, scale: str = "paper", vocab_size: int | None = None, **settings: int) -> Plan:
    found = tables.find(table)
    (chosen,) = found.chosen(row)
    if vocab_size is None:
        vocab_size = recipes.load(chosen.recipe).data["vocab_size"]
    return make_plan(found, chosen, {"scale": scale, "steps": None, "eval_tokens": None} | settings, vocab_size)


def parameters(plan: Plan) -> int:
    with torch.device("meta"):
        return count_parameters(TransformerXL(plan.model_config()))


@pytest.mark.parametrize("table", tables.TABLES)
def test_the_papers_figures(table: str) -> None:
    rows = tables.find(table).rows
    assert [(row.init, row.best, row.length) for row in rows] == PRINTED[table]
    assert len({row.name for row in rows}) == len(rows)


def test_the_151m_row_has_every_length_of_the_paper() -> None:
    plan = planned("table6", "151m")
    assert plan.reading.init == 300
    assert plan.reading.also == (450, 640)
    assert plan.row.at == {300: 23.35, 450: 23.16}


@pytest.mark.parametrize(("table", "row"), EVERY)
def test_at_scale_paper_a_row_is_its_recipe(table: str, row: str) -> None:
    plan = planned(table, row)
    recipe = recipes.load(plan.row.recipe)
    assert plan.model_config() == recipe.model_config()
    assert plan.train == recipe.train | dict(plan.row.train)
    evaluate = recipe.evaluate
    assert plan.reading.method == evaluate.get("method", "cached")
    assert plan.reading.segment(1000) == evaluate.get("segment", 128)
    assert plan.reading.clamp_len == evaluate.get("clamp_len")
    assert plan.reading.limit is None
    if plan.row.length is not None and plan.reading.longest is not None:
        assert plan.row.length <= plan.reading.longest


@pytest.mark.parametrize("scale", ["tiny", "small"])
@pytest.mark.parametrize(("table", "row"), EVERY)
def test_a_smaller_scale_keeps_what_a_row_is_about(table: str, row: str, scale: str) -> None:
    plan, published = planned(table, row, scale, 5000), planned(table, row)
    small, large = plan.model_config(), published.model_config()
    assert small.encoding == large.encoding
    assert bool(small.mem_len) == bool(large.mem_len)
    assert plan.train_config().loss == published.train_config().loss
    divide = scales.SCALES[scale].divide
    assert (small.mem_len, plan.train["tgt_len"]) == (large.mem_len // divide, published.train["tgt_len"] // divide)
    if large.table_len is not None:
        assert small.table_len == large.table_len // divide
    assert len(small.cutoffs) == len(large.cutoffs)
    assert plan.reading.method == ("cached" if large.mem_len else "sliding")
    assert [plan.reading.segment(n) for n in (4, 16, 44)] == ([128] * 3 if large.mem_len else [1, 2, 5])
    json.dumps(plan.to_json())


def test_limits_of_absolute_encodings() -> None:
    for scale, length in (("paper", 128), ("small", 32), ("tiny", 16)):
        for row in ("vaswani-half", "al-rfou-half"):
            reading = planned("table6", row, scale, 300_000).reading
            assert (reading.init, reading.longest) == (length, length)
        assert planned("table6", "no-recurrence-shaw", scale, 300_000).reading.longest is None


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_the_151m_row_is_larger_and_backprop_lengths_keep_their_order(scale: str) -> None:
    sizes = {row.name: parameters(planned("table6", row.name, scale, 267_735)) for row in tables.find("table6").rows}
    assert sizes.pop("151m") > 1.02 * max(sizes.values())
    lengths = [planned("table10", row.name, scale, 5000).train["tgt_len"] for row in tables.find("table10").rows]
    assert lengths[0] == lengths[1] < lengths[3] < lengths[2]


def test_small_is_about_the_size_of_the_laptop_recipe() -> None:
    config, laptop = planned("table6", "recurrence", "small", 500).model_config(), recipes.load("laptop").model
    assert {k: getattr(config, k) for k in ("n_layer", "d_model", "n_head", "d_head", "d_inner")} == {
        k: laptop[k] for k in ("n_layer", "d_model", "n_head", "d_head", "d_inner")
    }


def test_bins_are_fitted_to_the_vocabulary() -> None:
    cutoffs = [20_000, 40_000, 200_000]
    assert scales.fitted(cutoffs, 267_735, 267_735) == cutoffs
    assert scales.fitted(cutoffs, 267_735, 200_001) == cutoffs
    assert scales.fitted(cutoffs, 267_735, 2002) == [149, 299, 1495]
    assert scales.fitted(cutoffs, 267_735, 999) == []
    # Bins that are gone take their narrowing with them.
    assert planned("table7", "recurrence", "paper", 300).model_config().div_val == 1
    assert planned("table7", "recurrence", "paper", 30_000).model_config().div_val == 4


def test_updates_and_tokens_that_are_asked_for() -> None:
    plan = planned("table6", "recurrence", "tiny", 300, steps=50, eval_tokens=77)
    assert [plan.train[k] for k in ("steps", "eval_every", "save_every")] == [50, 13, 13]
    assert plan.reading.limit == 77
    assert planned("table6", "recurrence", "tiny", 300, eval_tokens=0).reading.limit is None
    assert planned("table6", "recurrence", steps=50).train["save_every"] == 4000


def test_what_cannot_be_planned_or_trained(words: Corpus) -> None:
    with pytest.raises(TxlError, match=r"^TABLE must be one of table6, table7, table10, got 'table5'$"):
        tables.find("table5")
    with pytest.raises(TxlError, match=r"^--scale must be one of tiny, small, paper, got 'huge'$"):
        scales.find("huge")
    with pytest.raises(TxlError, match=r"^--rows takes names of table7 .*\(recurrence, .*\), got '151m'$"):
        tables.find("table7").chosen("recurrence,151m")
    with pytest.raises(TxlError, match=r"^row recurrence: .*vocab_size must be >= 1"):
        planned("table6", "recurrence", "tiny", 0)
    check_corpus(planned("table6", "recurrence", vocab_size=203), words)
    plan = planned("table6", "recurrence", vocab_size=203)
    plan.train["batch"] = 60_000
    with pytest.raises(TxlError, match=r"^--data: row recurrence: .* 60000 streams need at least 60001"):
        check_corpus(plan, words)
