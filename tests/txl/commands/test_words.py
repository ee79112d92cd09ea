"""Models of words: prepare, train, resume, evaluate, generate, for the paper's systems."""

from pathlib import Path

import pytest
from command_helpers import SMALL, Run, one_line, succeeded

from txl.text import corpus as data

SYSTEMS = {
    "ours, bins": "--cutoffs 50,200 --div-val 2",
    "shaw": "--encoding shaw --table-len 9",
    "sinusoid": "--encoding sinusoid --mem-len 0 --loss half",
    "sinusoid with recurrence": "--encoding sinusoid",
    "learned": "--encoding learned --table-len 16 --mem-len 0 --intermediate-losses",
    "ours, with a recipe of shaw's": "--recipe wt103-128m-shaw --cutoffs none --tie-projs none --encoding relative",
    "penn treebank's": "--variational-dropout --word-dropout 0.1 --average triggered",
}


@pytest.fixture(scope="module")
def words(text: Path, tmp_path_factory: pytest.TempPathFactory) -> data.Corpus:
    return data.prepare(text, tmp_path_factory.mktemp("words"), data.PrepareOptions("words", max_words=400))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", SYSTEMS)
def test_system_of_the_paper(txl: Run, words: data.Corpus, tmp_path: Path, name: str) -> None:
    run = tmp_path / "r"
    done = succeeded(txl("train", "--run", run, "--data", words.folder, *SMALL, *SYSTEMS[name].split()))
    assert "ppl" in done.stdout
    assert txl("train", "--run", run, "--resume", "--steps", "4").returncode == 0
    scored = succeeded(txl("eval", run, "--limit", "50", "--attn-len", "8,16"))
    assert " ppl " in scored.stdout
    assert " bpc " not in scored.stdout
    written = succeeded(txl("generate", run, "--prompt", "0001 follows the", "--count", "6", "--seed", "1"))
    assert written.stdout.startswith("0001 follows the")
    assert len(written.stdout.replace("\n", " <eos> ").split()) >= 3 + 6
    assert "  " not in written.stdout


def test_eval_options(txl: Run, run: Path) -> None:
    for method in ("segments", "sliding"):
        shown = txl("eval", run, "--method", method, "--attn-len", "32", "--limit", "64", "--clamp-len", "20")
        assert shown.returncode == 0, shown.stderr
        assert f"{method}, of " in shown.stdout
    for zeros in ("--zeros", "--empty"):
        assert txl("eval", run, zeros, "--limit", "64").returncode == 0
    assert "996" in txl("eval", run, "--counting", "released", "--batch", "12").stdout  # 1,008 less one a stream
    one_line(txl("eval", run, "--counting", "some"), "--counting must be all or released")


def test_recipes(txl: Run) -> None:
    listed = txl("recipes")
    assert max(map(len, listed.stdout.splitlines())) <= 80
    assert listed.returncode == 0, listed.stderr
    for words in ("wt103-base", "151.11M", "9,000", "200,000", "Table 1: 24.0 ppl"):
        assert words in listed.stdout
    shown = txl("recipes", "enwik8-base").stdout
    assert "txl prepare CORPUS --data FILES --as enwik8 --newline drop" in shown
    assert "txl eval RUN --segment 80 --attn-len 2100 --clamp-len 820" in shown
