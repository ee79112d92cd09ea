"""The page of a run: of what is there, whatever is missing or damaged; shown without a network."""

import dataclasses
import io
import json
import math
import shutil
from pathlib import Path

import pytest
from browser import opened
from training_helpers import trainer

from txl import report
from txl.errors import TxlError
from txl.evaluation.evaluate import Score
from txl.evaluation.speed import Speedup
from txl.pictures import new_figure
from txl.report import Evaluation, write_report
from txl.text.corpus import Corpus, prepare
from txl.text.datasets import PrepareOptions
from txl.training.checkpoint import load

SPEED = Speedup(800, 0.5, 0.001)
SAMPLE = {"context": "before <b>&</b>", "generation": "made\nof two lines", "reference": "after"}


def scores(checkpoint: str = "") -> list[Evaluation]:
    def each(n: int, nats: float, method: str = "cached", **others: object) -> Evaluation:
        return Evaluation(Score(n, 100, nats, 2.0), "test", method, checkpoint=checkpoint, **others)  # type: ignore[arg-type]

    levels = [
        each(16, 1.9, "sliding", what="no memory, a window of 16", memory=False),
        each(8, 2.0, "sliding", memory=False),
    ]
    return [*levels, *(each(n, 1.5 - n / 100) for n in (8, 16, 40))]


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
        assert "6 of 6" in text
        assert "best validation" in text
        assert text.count("Not there yet") == 5
        assert shown.locator("figure img").count() == 1
        width = shown.evaluate("document.documentElement.scrollWidth")
        assert width <= 1200


def test_everything_that_is_measured_is_shown(folder: Path) -> None:
    digest = load(folder).digest
    report.keep_evaluations(folder, [*scores(digest), *scores("of an earlier checkpoint")])
    other = Evaluation(Score(8, 100, 9.0, 2.0), "valid", "cached", checkpoint=digest)
    report.keep_evaluations(folder, [other, *scores(digest)])  # of another split: listed, not drawn
    report.keep_speed(folder, [SPEED])
    report.keep_samples(folder, [SAMPLE])
    effective = {"length": 300, "reached_end": True, "short": [2.0], "long": [1.0], "gains": [0.5]}
    recl = {"contexts": [100, 200], "positions": 50, "perplexity": {"mine": [9.5, 8.25]}}
    recl |= {"effective": {"0.1": {"mine": effective}}}
    (folder / "recl").mkdir(exist_ok=True)
    (folder / "recl" / "recl.json").write_text(json.dumps(recl))
    (folder / "attention").mkdir(exist_ok=True)
    (folder / "attention" / "figure-5.png").write_bytes(_png())
    (folder / "attention" / "attention.html").write_text("page")
    path = write_report(folder)
    page = path.read_text(encoding="utf-8")
    assert page.count("<td>cached</td>") == 4
    with opened(path, width=500, dark=True) as shown:
        text = shown.locator("body").inner_text()
        for words in (
            "5 of an earlier checkpoint left out",
            "Of an earlier checkpoint.",
            "500x",
            "at least 300",
            "8.250",
            "no memory, a window of 16",
            "before <b>&</b>",
            "made\nof two lines",
        ):
            assert words in text
        assert shown.locator("figure img").count() == 3
        assert shown.locator("figure img").evaluate_all("all => all.every(e => e.naturalWidth > 0)")
        assert shown.locator("a").get_attribute("href") == "attention/attention.html"
        assert shown.evaluate("document.documentElement.scrollWidth") <= 500  # nothing runs off a phone


DAMAGED = [
    "", "{", "[1, {}]", "{}", "\x00\xff", '{"a": 1}', '[{"score": 3}]', '[{"score": {"attn_len": 1}}]',
    '{"contexts": [], "perplexity": {}, "effective": {}, "positions": 1}',
    '{"contexts": [1, 2], "perplexity": {"a": [1, 2]}, "effective": {"1": {}}, "positions": 1}',
    '{"contexts": [1, 2], "perplexity": {"a": [1, Infinity]}, "effective": {}, "positions": 1}',
    '[{"score": {"attn_len": 8, "tokens": 9, "nats": "x", "seconds": 1}, "split": "test", "method": "cached"}]',
    '[{"score": {"attn_len": 8, "tokens": 9, "nats": NaN, "seconds": 1}, "split": "test", "method": "cached"}]',
    '[{"score": {"attn_len": 8, "tokens": 9, "nats": 1.0, "seconds": 0}, "split": "test", "method": "cached"}]',
    '[{"attn_len": 8, "vanilla_s": 1.0, "cached_s": 0}, {"attn_len": 8, "vanilla_s": 1.0, "cached_s": "x"}]',
    '{"step": 1, "bpc": 1e308, "valid_bpc": 1e308, "lr": -1e308}\n{"step": 2, "bpc": -1e308}',
]  # fmt: skip


def _png() -> bytes:
    content = io.BytesIO()
    new_figure(1, 1).savefig(content, format="png")
    return content.getvalue()


@pytest.mark.parametrize("content", DAMAGED)
def test_what_is_damaged_is_left_out(folder: Path, tmp_path: Path, content: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    names = [
        report.EVALUATIONS,
        report.SPEED,
        report.SAMPLES,
        "recl/recl.json",
        "attention/attention.json",
        "log.jsonl",
    ]
    for name in names:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(content, encoding="latin-1")
    assert "<h2>Training</h2>" in write_report(copy).read_text(encoding="utf-8")


def test_a_later_evaluation_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    report.keep_evaluations(tmp_path, scores())
    again = Evaluation(Score(8, 100, 1.0, 2.0), "test", "cached")
    report.keep_evaluations(tmp_path, [again])
    found = report.evaluations(tmp_path)
    assert sorted(e.score.attn_len for e in found) == [8, 8, 16, 16, 40]
    assert found[-1] == again
    others = [
        dataclasses.replace(again, split="valid"),
        dataclasses.replace(again, batch=1),
        dataclasses.replace(again, checkpoint="b"),
        dataclasses.replace(again, score=dataclasses.replace(again.score, tokens=9)),
    ]
    nothing = dataclasses.replace(again, score=dataclasses.replace(again.score, nats=math.nan))
    report.keep_evaluations(tmp_path, [*others, nothing])
    assert len(report.evaluations(tmp_path)) == 9


def test_the_best_validation_is_the_least(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    lines = [{"step": n, "valid_bpc": bpc} for n, bpc in ((2, 3.0), (4, 1.25), (6, 2.0))]
    (copy / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "1.2500 bpc, at update 4" in write_report(copy).read_text(encoding="utf-8")


def test_words_are_words_without_their_corpus(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the line of a text with words\n" * 200)
    corpus = prepare(tmp_path / "text.txt", tmp_path / "corpus", PrepareOptions("words"))
    trained = trainer(tmp_path / "run [b] $x$ {y}", corpus, steps=2)
    trained.run()
    shutil.rmtree(corpus.folder)
    page = write_report(trained.folder).read_text(encoding="utf-8")
    assert "bits per character" not in page
    assert "[b] $x$ {y}" in page


def test_no_page_of_what_is_no_run(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(TxlError, match="holds no run"):
        write_report(tmp_path)
    begun = trainer(tmp_path / "begun", corpus)
    with pytest.raises(TxlError, match="the run has no checkpoint yet"):
        write_report(begun.folder)
