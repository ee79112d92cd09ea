"""The page of a run: of what is there, whatever is missing or damaged; shown without a network."""

import io
import json
import shutil
from pathlib import Path

import pytest
from browser import opened
from training_helpers import trainer

from txl.errors import TxlError
from txl.evaluation.score import Score
from txl.evaluation.speed import Speedup
from txl.pictures import new_figure
from txl.report import kept
from txl.report.kept import Evaluation
from txl.report.page import write_report
from txl.text.corpus import Corpus

SPEED = Speedup(800, 0.5, 0.001)
SAMPLE = {"context": "before <b>&</b>", "generation": "made\nof two lines", "reference": "after"}


def scores() -> list[Evaluation]:
    cached = [Evaluation(Score(n, 100, 1.5 - n / 100, 2.0), "test", "cached") for n in (8, 16, 40)]
    return [Evaluation(Score(16, 100, 1.9, 1.0), "test", "sliding", "no memory, a window of 16", False), *cached]


@pytest.fixture(scope="module")
def folder(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    trained = trainer(tmp_path_factory.mktemp("report") / "my run", corpus, steps=6, eval_every=3)
    trained.run()
    return trained.folder


def test_a_run_of_which_nothing_is_measured(folder: Path) -> None:
    path = write_report(folder)
    with opened(path) as shown:
        assert shown.title() == "my run"
        text = shown.locator("body").inner_text()
        for words in (
            "6 of 6",
            "best validation",
            "None measured yet",
            "Not measured yet",
            "Not drawn yet",
            "None kept",
        ):
            assert words in text
        assert shown.locator("figure svg").count() == 2
        width = shown.evaluate("document.documentElement.scrollWidth")
        assert width <= 1200


def test_everything_that_is_measured_is_shown(folder: Path) -> None:
    kept.keep_evaluations(folder, scores())
    kept.keep_speed(folder, [SPEED])
    kept.keep_samples(folder, [SAMPLE])
    effective = {"length": 300, "reached_end": True, "short": [2.0], "long": [1.0], "gains": [0.5]}
    recl = {"contexts": [100, 200], "positions": 50, "perplexity": {"mine": [9.5, 8.25]}}
    recl |= {"effective": {"0.1": {"mine": effective}}}
    (folder / "recl").mkdir(exist_ok=True)
    (folder / "recl" / "recl.json").write_text(json.dumps(recl))
    (folder / "attention").mkdir(exist_ok=True)
    (folder / "attention" / "figure-5.png").write_bytes(_png())
    (folder / "attention" / "attention.html").write_text("page")
    path = write_report(folder)
    with opened(path, width=500, dark=True) as shown:
        text = shown.locator("body").inner_text()
        for words in (
            "500x",
            "at least 300",
            "8.250",
            "no memory, a window of 16",
            "before <b>&</b>",
            "made\nof two lines",
        ):
            assert words in text
        assert shown.locator("figure svg").count() == 3
        assert shown.locator("figure img").evaluate_all("all => all.every(e => e.naturalWidth > 0)")
        assert shown.locator("a").get_attribute("href") == "attention/attention.html"
        assert shown.evaluate("document.documentElement.scrollWidth") <= 500  # nothing runs off a phone


def _png() -> bytes:
    content = io.BytesIO()
    new_figure(1, 1).savefig(content, format="png")
    return content.getvalue()


@pytest.mark.parametrize("name", [kept.EVALUATIONS, kept.SPEED, kept.SAMPLES, "recl/recl.json", "log.jsonl"])
@pytest.mark.parametrize(
    "content", ["", "{", "[1, {}]", "{}", '[{"score": 3}]', '[{"score": {"attn_len": 1}}]', "\x00\xff"]
)
def test_what_is_damaged_is_left_out(folder: Path, tmp_path: Path, name: str, content: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text(content, encoding="latin-1")
    assert "<h2>Training</h2>" in write_report(copy).read_text(encoding="utf-8")


def test_a_later_evaluation_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    kept.keep_evaluations(tmp_path, scores())
    again = Evaluation(Score(8, 100, 1.0, 2.0), "test", "cached")
    kept.keep_evaluations(tmp_path, [again])
    assert sorted(e.score.attn_len for e in kept.evaluations(tmp_path)) == [8, 16, 16, 40]
    assert again in kept.evaluations(tmp_path)


def test_no_page_of_what_is_no_run(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(TxlError, match="holds no run"):
        write_report(tmp_path)
    begun = trainer(tmp_path / "begun", corpus)
    with pytest.raises(TxlError, match="the run has no checkpoint yet"):
        write_report(begun.folder)
