"""The tables as data, their rows at every scale; the search for attention lengths, against curves
whose answers are known."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from txl import TransformerXL, recipes
from txl.errors import TxlError
from txl.evaluation.evaluate import Lengths, Score, init_and_best
from txl.model.transformer import count_parameters
from txl.sweep import SCALES, TABLES, Job, Kept, check_corpus, fitted, make_job, next_length
from txl.text import corpus as data
from txl.text.corpus import Corpus
from txl.text.datasets import PrepareOptions
from txl.training.config import TrainConfig

Curve = Callable[[int], float]
EVERY = [(table.name, row.name) for table in TABLES.values() for row in table.rows]
# Init, best and attention length as the paper prints them, in its order.
PRINTED = {
    "table6": [
        (27.02, 26.77, 500), (27.94, 27.94, 256), (28.69, 28.33, 460), (29.59, 29.02, 260), (30.10, 30.10, 120),
        (29.75, 29.75, 120), (30.50, 30.50, 120), (30.97, 30.97, 120), (31.16, 31.16, 120), (23.43, 23.09, 640),
    ],
    "table7": [(None, 25.2, None), (None, 25.7, None), (None, 27.1, None)],
    "table10": [(27.02, 26.77, 500), (28.69, 28.33, 460), (28.43, 27.98, 400), (28.83, 28.83, 120)],
}  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """12,000 words of 203."""
    lines = [" ".join(f"w{(n * n + 7 * k) % 200}" for k in range(24)) for n in range(480)]
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text("\n".join(lines) + "\n")
    return data.prepare(path, tmp_path_factory.mktemp("words-corpus"), PrepareOptions("words"))


def planned(table: str, row: str, scale: str = "paper", vocab_size: int | None = None, **settings: int) -> Job:
    (chosen,) = TABLES[table].chosen(row)
    if vocab_size is None:
        vocab_size = recipes.load(chosen.recipe).data["vocab_size"]
    return make_job(TABLES[table], chosen, scale, vocab_size, **settings)


def parameters(job: Job) -> int:
    with torch.device("meta"):
        return count_parameters(TransformerXL(job.model_config))


@pytest.mark.parametrize("table", TABLES)
def test_the_papers_figures(table: str) -> None:
    rows = TABLES[table].rows
    assert [(row.init, row.best, row.length) for row in rows] == PRINTED[table]
    assert len({row.name for row in rows}) == len(rows)


def test_the_151m_row_has_every_length_of_the_paper() -> None:
    plan = planned("table6", "151m")
    assert plan.init == 300
    assert plan.also == [450, 640]
    assert plan.row.at == {"300": 23.35, "450": 23.16}


@pytest.mark.parametrize(("table", "row"), EVERY)
def test_at_scale_paper_a_row_is_its_recipe(table: str, row: str) -> None:
    plan = planned(table, row)
    recipe = recipes.load(plan.row.recipe)
    assert plan.model_config == recipe.model_config()
    assert plan.train == recipe.train | plan.row.train
    evaluate = recipe.evaluate
    assert plan.method == evaluate.get("method", "cached")
    assert plan.reading(1000).segment == evaluate.get("segment", 128)
    assert plan.clamp_len == evaluate.get("clamp_len")
    assert plan.limit is None
    if plan.row.length is not None and plan.longest is not None:
        assert plan.row.length <= plan.longest


@pytest.mark.parametrize("scale", ["tiny", "small"])
@pytest.mark.parametrize(("table", "row"), EVERY)
def test_a_smaller_scale_keeps_what_a_row_is_about(table: str, row: str, scale: str) -> None:
    plan, published = planned(table, row, scale, 5000), planned(table, row)
    small, large = plan.model_config, published.model_config
    assert small.encoding == large.encoding
    assert bool(small.mem_len) == bool(large.mem_len)
    assert TrainConfig(**plan.train).loss == TrainConfig(**published.train).loss
    divide = SCALES[scale]["divide"]
    assert (small.mem_len, plan.train["tgt_len"]) == (large.mem_len // divide, published.train["tgt_len"] // divide)
    if large.table_len is not None:
        assert small.table_len == large.table_len // divide
    assert len(small.cutoffs) == len(large.cutoffs)
    assert plan.method == ("cached" if large.mem_len else "sliding")
    assert [plan.reading(n).segment for n in (4, 16, 44)] == ([128] * 3 if large.mem_len else [1, 2, 5])
    json.dumps(plan.to_json())


def test_limits_of_absolute_encodings() -> None:
    for scale, length in (("paper", 128), ("small", 32), ("tiny", 16)):
        for row in ("vaswani-half", "al-rfou-half"):
            job = planned("table6", row, scale, 300_000)
            assert (job.init, job.longest) == (length, length)
        assert planned("table6", "no-recurrence-shaw", scale, 300_000).longest is None


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_the_151m_row_is_larger_and_backprop_lengths_keep_their_order(scale: str) -> None:
    sizes = {row.name: parameters(planned("table6", row.name, scale, 267_735)) for row in TABLES["table6"].rows}
    assert sizes.pop("151m") > 1.02 * max(sizes.values())
    lengths = [planned("table10", row.name, scale, 5000).train["tgt_len"] for row in TABLES["table10"].rows]
    assert lengths[0] == lengths[1] < lengths[3] < lengths[2]


def test_small_is_about_the_size_of_the_laptop_recipe() -> None:
    config, laptop = planned("table6", "recurrence", "small", 500).model_config, recipes.load("laptop").model
    assert {k: getattr(config, k) for k in ("n_layer", "d_model", "n_head", "d_head", "d_inner")} == {
        k: laptop[k] for k in ("n_layer", "d_model", "n_head", "d_head", "d_inner")
    }


def test_bins_are_fitted_to_the_vocabulary() -> None:
    cutoffs = [20_000, 40_000, 200_000]
    assert fitted(cutoffs, 267_735, 267_735) == cutoffs
    assert fitted(cutoffs, 267_735, 200_001) == cutoffs
    assert fitted(cutoffs, 267_735, 2002) == [149, 299, 1495]
    assert fitted(cutoffs, 267_735, 999) == []
    # Bins that are gone take their narrowing with them.
    assert planned("table7", "recurrence", "paper", 300).model_config.div_val == 1
    assert planned("table7", "recurrence", "paper", 30_000).model_config.div_val == 4


def test_updates_and_tokens_that_are_asked_for() -> None:
    plan = planned("table6", "recurrence", "tiny", 300, steps=50, eval_tokens=77)
    assert [plan.train[k] for k in ("steps", "eval_every", "save_every")] == [50, 13, 13]
    assert plan.limit == 77
    assert planned("table6", "recurrence", "tiny", 300, eval_tokens=0).limit is None
    assert planned("table6", "recurrence", steps=50).train["save_every"] == 4000


def test_what_cannot_be_planned_or_trained(words: Corpus) -> None:
    with pytest.raises(TxlError, match=r"^--row must be one of recurrence, .*, got '151m'$"):
        TABLES["table7"].chosen("151m")
    with pytest.raises(TxlError, match=r"^row recurrence: .*vocab_size must be >= 1"):
        planned("table6", "recurrence", "tiny", 0)
    check_corpus(planned("table6", "recurrence", vocab_size=203), words)
    plan = planned("table6", "recurrence", vocab_size=203)
    plan.train["batch"] = 60_000
    with pytest.raises(TxlError, match=r"^--data: row recurrence: .* 60000 streams need at least 60001"):
        check_corpus(plan, words)


ABOUT = {"scale": "tiny", "corpus": "ab", "init": 8, "model": {"d_model": 16}}


def test_progress_is_kept_to_the_last_bit(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "row" / "row.json", ABOUT)
    assert (kept.train, kept.trained, kept.finished, kept.scores) == (None, False, False, [])
    kept.train, kept.trained, kept.scores = {"steps": 3}, True, [Score(8, 100, 1 / 3, 2 / 3)]
    kept.write()
    again = Kept(kept.path, ABOUT)
    assert (again.train, again.trained, again.finished, again.scores) == ({"steps": 3}, True, False, kept.scores)


def test_another_row_is_refused_by_name(tmp_path: Path) -> None:
    Kept(tmp_path / "row.json", ABOUT).write()
    for name, value, said in (
        ("scale", "small", "scale is small, was tiny"),
        ("model", {}, "model is {}, was {'d_model'"),
    ):
        with pytest.raises(TxlError, match=f"holds another row: {said}.*; choose another folder with --run$"):
            Kept(tmp_path / "row.json", ABOUT | {name: value})


@pytest.mark.parametrize("text", ["", "[]", '{"about": 3}', '{"about": {}, "scores": [{"nats": 1}]}', "[" * 100_000])
def test_a_damaged_row(tmp_path: Path, text: str) -> None:
    (tmp_path / "row.json").write_text(text)
    with pytest.raises(TxlError, match=r"row\.json: is damaged .*; remove .* to begin the row anew$"):
        Kept(tmp_path / "row.json", ABOUT)


def searched(curve: Curve, init: int, step: int, **options: object) -> tuple[list[int], Lengths]:
    """The lengths tried, in their order, and what is reported."""
    ppl: dict[int, float] = {}
    while (n := next_length(ppl, init, step, **options)) is not None:
        assert n not in ppl
        ppl[n] = curve(n)
    scores = [Score(n, 1, math.log(value), 1.0) for n, value in ppl.items()]
    return list(ppl), init_and_best(scores, init)


def test_a_curve_that_falls_to_a_level() -> None:
    """20 + 10 e^(-n / 100): upward until 20 more keys gain less than 0.1%, by closed form."""

    def curve(n: int) -> float:
        return 20 + 10 * math.exp(-n / 100)

    tried, found = searched(curve, 100, 20)
    # The gain of a step from n is 10 (1 - e^-0.2) e^(-n/100) / curve(n), a falling function of n.
    last = next(n for n in range(100, 2000, 20) if 10 * (1 - math.exp(-0.2)) * math.exp(-n / 100) < 1e-3 * curve(n))
    assert tried == list(range(100, last + 21, 20))
    assert (found.init.attn_len, found.best.attn_len) == (100, last + 20)
    assert found.shortest.attn_len == last == 460


def test_the_tables_step_ends_where_the_paper_does() -> None:
    """On exponentials through the three figures of the 151M row, and with the same decay through
    those of the first: a shorter step would end before a gain that the paper reports."""
    decay, table = 135, TABLES["table6"]

    def fitted(init: int, low: float, best_len: int, best: float) -> Curve:
        size = (low - best) / (1 - math.exp((init - best_len) / decay))
        return lambda n: low - size * (1 - math.exp((init - n) / decay))

    standard, first = fitted(300, 23.35, 640, 23.09), fitted(256, 27.02, 500, 26.77)
    assert standard(450) == pytest.approx(23.16, abs=0.005)
    assert searched(standard, 300, table.step)[0][-1] == 620
    assert searched(standard, 300, 20)[0][-1] == 400
    assert searched(first, 256, table.step)[1].shortest.attn_len in (448, 512)


def test_a_curve_that_rises_beyond_training() -> None:
    """20 + |n - 70| / 10, best below training's 128, as absolute positions may be."""
    tried, found = searched(lambda n: 20 + abs(n - 68) / 10, 128, 20)
    assert tried == [128, 148, 108, 88, 68, 48]
    assert (found.best.attn_len, found.shortest.attn_len) == (68, 68)


def test_a_flat_curve_goes_down_to_the_last_step() -> None:
    tried, found = searched(lambda n: 30.0, 50, 20)
    assert tried == [50, 70, 30, 10]
    assert found.shortest.attn_len == 10


def test_a_curve_that_is_flat_down_to_120_keys() -> None:
    """As the paper's rows that are at their best with training's 128 or less."""
    tried, found = searched(lambda n: 30.0 if n >= 120 else 31.0, 128, 8)
    assert tried == [128, 136, 120, 112]
    assert (found.init.ppl, found.shortest.attn_len) == (pytest.approx(30.0), 120)


@pytest.mark.parametrize(("longest", "highest"), [(128, 128), (147, 128), (148, 148), (650, 648), (None, 668)])
def test_a_limit_is_never_exceeded(longest: int | None, highest: int) -> None:
    tried, _ = searched(lambda n: 100 * 0.99 ** min(n, 640), 128, 20, longest=longest, also=(200, 640))
    assert max(tried) == highest
    assert (200 in tried, 640 in tried) == (highest > 200, highest > 640)


def test_lengths_that_are_wanted_in_any_case() -> None:
    """They are scored after the search upward and count for the best; those below training's are
    what the search downward finds."""
    tried, found = searched(lambda n: 20.0 if n < 400 else 19.0, 300, 10, also=(150, 450, 640))
    assert tried == [300, 310, 450, 640]
    assert (found.best.attn_len, found.shortest.attn_len) == (450, 450)


def test_a_gain_of_just_a_thousandth_goes_on() -> None:
    assert next_length({10: 1000.0, 12: 999.0}, 10, 2) == 14
    assert next_length({10: 1000.0, 12: 999.1}, 10, 2) == 8


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_search_of_no_numbers_ends(value: float) -> None:
    ppl: dict[int, float] = {}
    while (n := next_length(ppl, 50, 20)) is not None:
        ppl[n] = value
    assert set(ppl) <= {50, 70, 30, 10}


def test_any_part_of_a_search_is_gone_on_with() -> None:
    """The next length is a function of what is known, so it is the same after a restart."""
    tried, _ = searched(lambda n: 20 + 10 * math.exp(-n / 40), 64, 5)
    for done in range(len(tried)):
        assert next_length({n: 20 + 10 * math.exp(-n / 40) for n in tried[:done]}, 64, 5) == tried[done]
