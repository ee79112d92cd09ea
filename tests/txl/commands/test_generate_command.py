"""`txl generate`: as the paper's authors did, up to a stop string; and what it
refuses."""

from pathlib import Path

import pytest
from command_helpers import Run, one_line

from txl.evaluation.generate import Sampling
from txl.language_model import load
from txl.text import corpus as data


def test_the_papers_way(txl: Run, run: Path, corpus: data.Corpus, tmp_path: Path) -> None:
    """Appendix E: a text of a corpus goes on."""
    context = corpus.vocabulary.decode(corpus.test[:512].tolist())
    (tmp_path / "context.txt").write_bytes(context)
    options = "--top-k 40 --temperature 1 --attn-len 1601 --clamp-len 1000 --zeros --count 60 --seed 5".split()
    done = txl("generate", run, "--prompt", f"@{tmp_path / 'context.txt'}", *options)
    assert done.returncode == 0, done.stderr
    saved = load(run, clamp_len=1000, zeros=True)
    assert done.stdout == context.decode() + saved.generate(context, 60, Sampling(1.0, top_k=40), 1601, seed=5) + "\n"


def test_a_stop_string(txl: Run, run: Path) -> None:
    options = ["generate", run, "--prompt", "00", "--count", "80", "--seed", "3"]
    whole = txl(*options).stdout[2:-1]
    stop = whole[30:33]
    assert txl(*options, "--stop", stop).stdout == "00" + whole.partition(stop)[0] + "\n"


BAD = {
    "--count 0": "count must be an integer >= 1, got 0",
    "--clamp-len 0": "clamp_len must be >= 1, got 0",
    "--stop=": "stop must be a string of at least one character, got ''",
}


@pytest.mark.parametrize("arguments", BAD)
def test_mistakes(txl: Run, run: Path, arguments: str) -> None:
    one_line(txl("generate", run, *arguments.split()), BAD[arguments])
