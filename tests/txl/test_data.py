"""Corpora, vocabularies, streams: every token once, and clear words about bad input."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import small_model

from txl.errors import TxlError
from txl.evaluation.evaluate import evaluate
from txl.text import corpus as data
from txl.text import sources


def test_file_is_cut_90_5_5(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(10, 110)) * 10)
    splits = sources.read(path)
    assert [len(x) for x in splits[:3]] == [900, 50, 50]
    assert b"".join(splits[:3]) == path.read_bytes()


def test_enwik8_has_its_standard_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_STANDARD_BYTES", 20_000_000)
    (tmp_path / "enwik8").write_bytes(b"ab" * 10_000_000)
    assert [len(x) for x in sources.read(tmp_path / "enwik8")[:3]] == [10_000_000, 5_000_000, 5_000_000]


def test_folder_is_dealt_out_by_file_and_always_alike(tmp_path: Path) -> None:
    for n in range(60):
        (tmp_path / f"{n}.txt").write_text(f"file {n}\n" * (n + 1))
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    splits = sources.read(tmp_path)
    assert splits == sources.read(tmp_path)
    total = sum(len(x) for x in splits[:3])
    assert [len(x) / total for x in splits[:3]] == pytest.approx([0.9, 0.05, 0.05], abs=0.04)
    names = [set(part.decode().splitlines()) for part in splits[:3]]
    assert sum(len(n) for n in names) == 60
    assert not names[0] & names[1]


def test_default_corpus_is_the_standard_library() -> None:
    splits = sources.read(None)
    assert b"import " in splits.valid
    assert len(splits.train) > 5_000_000
    total = sum(len(x) for x in splits[:3])
    assert [round(len(x) / total, 2) for x in splits[:3]] == pytest.approx([0.9, 0.05, 0.05], abs=0.02)


@given(st.binary(min_size=1, max_size=300))
def test_encoding_round_trip(text: bytes) -> None:
    vocabulary = data.Vocabulary(bytes(sorted(set(text))))
    assert vocabulary.decode(vocabulary.encode(text).tolist()) == text


def test_all_256_bytes_fit() -> None:
    vocabulary = data.Vocabulary(bytes(range(256)))
    assert vocabulary.encode(b"\xff\x00").tolist() == [255, 0]


def test_unseen_bytes_are_named() -> None:
    with pytest.raises(TxlError, match=r"bytes that the training data never did: 0x21 '!', 0xe9"):
        data.Vocabulary(b"abc").encode(b"ab!\xe9")


def test_corpus_is_mapped_and_reopens(corpus: data.Corpus) -> None:
    again = data.load(corpus.folder)
    assert isinstance(again.train, np.memmap)
    assert again.vocabulary == corpus.vocabulary
    assert np.array_equal(again.test, corpus.test)


def test_streams_are_contiguous_and_pure(corpus: data.Corpus) -> None:
    streams = data.OrderedStreams(corpus.train, 3, 10)
    x0, y0 = streams.segment(0)
    x1, _ = streams.segment(1)
    assert torch.equal(x0[:, 1:], y0[:, :-1])
    assert torch.equal(y0[:, -1], x1[:, 0])
    assert torch.equal(streams.segment(streams.segments)[0], x0)
    assert [streams.starts_epoch(n) for n in (0, 1, streams.segments)] == [True, False, True]


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 30), st.none() | st.integers(1, 250))
def test_every_token_is_scored_once(count: int, batch: int, length: int, limit: int | None) -> None:
    tokens = np.arange(count).astype(np.uint8)
    inputs, targets = [], []
    for x, y in data.scored_segments(tokens, 7, batch, length, limit):
        inputs.append(x)
        targets.append(y)
    x, y = torch.cat(inputs, 1), torch.cat(targets, 1)
    scored = y[y >= 0].tolist()
    assert sorted(scored) == list(range(min(count, limit or count)))
    before = [a for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True) if b >= 0]
    assert before == [7, *scored[:-1]]


@pytest.mark.parametrize("segment", [1, 5, 64])
def test_score_does_not_depend_on_the_segment(segment: int) -> None:
    model, tokens = small_model(), np.random.default_rng(0).integers(0, 31, 150).astype(np.uint8)
    score = evaluate(model, tokens, 0, 7, segment=segment, batch=2)
    want = evaluate(model, tokens, 0, 7, segment=33, batch=2)
    assert score.tokens == 150
    assert math.isclose(score.nats, want.nats, rel_tol=1e-6)
    assert math.isclose(score.bpc, score.nats / math.log(2))


def test_forgetting_at_every_segment() -> None:
    model, tokens = small_model(), np.random.default_rng(0).integers(0, 31, 64).astype(np.uint8)
    want = [
        evaluate(model, tokens[n : n + 8], int(tokens[n - 1]) if n else 0, 8, batch=1).nats for n in range(0, 64, 8)
    ]
    got = evaluate(model, tokens, 0, 8, segment=8, batch=1, carry_memory=False)
    assert math.isclose(got.nats, sum(want) / 8, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "none.txt", "none.txt: no such file or folder"),
        (lambda p: p / "empty.txt", "empty.txt: the file is empty"),
        (lambda p: p / "short.txt", r"short.txt: 5 bytes are too few to split 90/5/5; at least 60 are needed"),
        (lambda p: p / "folder", "folder: 0 text files found, at least 3 are needed"),
    ],
)
def test_bad_sources(tmp_path: Path, make: object, message: str) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "image").write_bytes(b"\0\0\0")
    with pytest.raises(TxlError, match=message):
        data.prepare(make(tmp_path), tmp_path / "corpus")


def test_preparing_a_prepared_corpus(corpus: data.Corpus, tmp_path: Path) -> None:
    with pytest.raises(TxlError, match="is a prepared corpus already"):
        data.prepare(corpus.folder, tmp_path)
    assert data.open_corpus(corpus.folder, tmp_path).fingerprint == corpus.fingerprint


def test_paths_may_be_strings(text: Path, corpus: data.Corpus, tmp_path: Path) -> None:
    assert sources.read(str(text)) == sources.read(text)
    for made in (data.prepare(str(text), str(tmp_path)), data.open_corpus(str(tmp_path), "unused")):
        assert made.fingerprint == corpus.fingerprint
        assert made.folder == tmp_path


def test_preparing_takes_no_more_than_twice_the_text(tmp_path: Path) -> None:
    """The text and its tokens; an index of eight bytes a token would be seen at once."""
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 127)) * 1_000_000)
    code = f"""
import re
from txl.text import corpus as data
used = lambda: int(re.search("VmHWM: *([0-9]+) kB", open("/proc/self/status").read().replace("\\t", " "))[1]) * 1024
before = used()
data.prepare({str(tmp_path / "a.txt")!r}, {str(tmp_path / "c")!r})
print((used() - before) / 95_000_000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1.5 < float(done.stdout) < 3  # it was 12


def test_preparing_again_leaves_the_mapped_arrays_alone(text: Path, tmp_path: Path) -> None:
    first = data.prepare(text, tmp_path / "c")
    before = np.array(first.train)
    other = tmp_path / "other.txt"
    other.write_text("short " * 20)
    assert data.prepare(other, tmp_path / "c").fingerprint != first.fingerprint
    assert np.array_equal(first.train, before)


def test_damaged_corpora(tmp_path: Path, corpus: data.Corpus) -> None:
    with pytest.raises(TxlError, match="not a prepared corpus"):
        data.load(tmp_path)
    (tmp_path / "corpus.json").write_text("{")
    with pytest.raises(TxlError, match="the prepared corpus is damaged"):
        data.load(tmp_path)
    with pytest.raises(TxlError, match="split must be one of train, valid, test, got 'dev'"):
        corpus.split("dev")


def test_text_shorter_than_a_segment(corpus: data.Corpus) -> None:
    with pytest.raises(TxlError, match=r"8 streams of one segment of 5000 need at least 40001"):
        data.OrderedStreams(corpus.train, 8, 5000)
