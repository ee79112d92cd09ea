"""Streams and segments: every token is a target once, with its context, in a repeatable order."""

import dataclasses
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from released import training as released

from txl.errors import TxlError
from txl.text.corpus import Corpus
from txl.text.streams import Streams, scored_segments, training_streams

S = 0  # `<S>`
Sentences = list[list[int]]


def stored(sentences: Sentences) -> tuple[np.ndarray, np.ndarray]:
    tokens = [t for sentence in sentences for t in (S, *sentence)] + [S]
    starts = np.cumsum([0, *(len(s) + 1 for s in sentences[:-1])])
    return np.array(tokens, np.uint16), starts.astype(np.int64)


def shuffled(text: tuple[np.ndarray, np.ndarray], batch: int, length: int, seed: int, ext_len: int = 0) -> Streams:
    return Streams(text[0], batch, length, ext_len, sentences=text[1], seed=seed)


def numbered(lengths: list[int]) -> Sentences:
    """Sentences of distinct words, so that each pair is unique."""
    words = iter(range(1, 10_000))
    return [[next(words) for _ in range(n)] for n in lengths]


def released_pairs(sentence: list[int]) -> list[tuple[int, int]]:
    """Pairs of the released iterator: inputs of `<S> a b <S>` lack the last, targets the first."""
    return list(pairwise([S, *sentence, S]))


def epoch_of(streams: Streams, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all segments, [batch, stream_len]."""
    first = epoch * streams.segments
    segments = [streams.segment(n) for n in range(first, first + streams.segments)]
    return torch.cat([x[:, -y.shape[1] :] for x, y in segments], 1), torch.cat([y for _, y in segments], 1)


@given(st.integers(2, 200), st.integers(1, 9), st.integers(1, 30), st.integers(0, 40))
def test_every_token_is_a_target_once_an_epoch(pairs: int, batch: int, length: int, ext_len: int) -> None:
    pairs = max(pairs, batch)
    tokens = np.arange(pairs + 1).astype(np.uint8)
    streams = Streams(tokens, batch, length, ext_len)
    inputs, targets = epoch_of(streams, 0)
    assert torch.equal(inputs + 1, targets)
    assert targets.flatten().tolist() == list(range(1, pairs // batch * batch + 1))
    for n in range(streams.segments):
        x, y = streams.segment(n)
        assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
        before = min(ext_len, n * length)
        assert y.shape[1] == min(length, streams.stream_len - n * length) >= 1
        assert x.shape[1] == before + y.shape[1]
        assert torch.equal(x, torch.arange(x.shape[1]) + x[:, :1])  # as in the text, context too


@given(st.integers(2, 200), st.integers(1, 9), st.integers(1, 30))
def test_released_streams_are_those_of_the_released_iterator(count: int, batch: int, length: int) -> None:
    count = max(count, 2 * batch)
    tokens = np.arange(count).astype(np.uint8)
    streams = Streams(tokens, batch, length, counting="released")
    want = list(released.ordered(torch.arange(count), batch, length))
    assert streams.segments == len(want)
    for n, pair in enumerate(want * 2):  # two epochs
        for x, y in zip(streams.segment(n), pair, strict=True):
            assert torch.equal(x, y)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 2**31), st.integers(0, 5)
)
def test_shuffled_pairs_are_those_of_the_released_iterator(
    lengths: list[int], length: int, seed: int, epoch: int
) -> None:
    sentences = numbered(lengths)
    streams = shuffled(stored(sentences), 1, length, seed)
    inputs, targets = (x.flatten().tolist() for x in epoch_of(streams, epoch))
    pairs = list(zip(inputs, targets, strict=True))
    assert Counter(pairs) == Counter(pair for s in sentences for pair in released_pairs(s))
    opened = [n for n, t in enumerate(inputs) if t == S] + [len(pairs)]
    runs = [pairs[a:b] for a, b in pairwise(opened)]
    assert sorted(runs) == sorted(released_pairs(s) for s in sentences)  # each sentence once, whole


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 7))
def test_shuffled_streams_keep_order_and_context(batch: int, length: int, ext_len: int) -> None:
    tokens, starts = stored(numbered([3, 1, 4, 1, 5, 9, 2, 6]))
    whole = epoch_of(shuffled((tokens, starts), 1, 50, seed=3), 2)[0].flatten()
    streams = shuffled((tokens, starts), batch, length, seed=3, ext_len=ext_len)
    inputs, _ = epoch_of(streams, 2)
    assert torch.equal(inputs.flatten(), whole[: inputs.numel()])
    for n in range(streams.segments):
        x, y = streams.segment(2 * streams.segments + n)
        first, before = n * length, min(ext_len, n * length)
        assert torch.equal(x, inputs[:, first - before : first + y.shape[1]])


def test_shuffling_is_a_function_of_seed_and_epoch() -> None:
    text = stored(numbered([2, 3] * 20))
    streams = shuffled(text, 2, 7, seed=5)
    forwards = [streams.segment(n) for n in range(2 * streams.segments)]
    for n in (2 * streams.segments - 1, 0, streams.segments, 3):  # epochs to and fro
        for got, want in zip(streams.segment(n), forwards[n], strict=True):
            assert torch.equal(got, want)
    again = shuffled(text, 2, 7, seed=5)
    assert torch.equal(epoch_of(again, 1)[0], epoch_of(streams, 1)[0])
    others = [epoch_of(streams, 0)[0], epoch_of(shuffled(text, 2, 7, seed=6), 1)[0]]
    assert not any(torch.equal(epoch_of(streams, 1)[0], other) for other in others)


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 30))
def test_every_token_is_scored_once(count: int, batch: int, length: int) -> None:
    tokens = np.arange(count).astype(np.uint8)
    inputs, targets = zip(*scored_segments(tokens, 7, batch, length), strict=True)
    x, y = torch.cat(inputs, 1), torch.cat(targets, 1)
    scored = y[y >= 0].tolist()
    assert sorted(scored) == list(range(count))
    before = [a for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True) if b >= 0]
    assert before == [7, *scored[:-1]]


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 30))
def test_counted_as_released(count: int, batch: int, length: int) -> None:
    tokens = np.arange(count).astype(np.uint8)
    if count < 2 * min(batch, count):
        with pytest.raises(TxlError, match="too few for"):
            list(scored_segments(tokens, 7, batch, length, counting="released"))
        return
    streams = tokens[: count // batch * batch].reshape(batch, -1).astype(np.int64)
    inputs, targets = zip(*scored_segments(tokens, 7, batch, length, counting="released"), strict=True)
    assert np.array_equal(torch.cat(inputs, 1), streams[:, :-1])
    assert np.array_equal(torch.cat(targets, 1), streams[:, 1:])
    assert all(y.shape[1] <= length for y in targets)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 12))
def test_sentences_counted_as_released(lengths: list[int], batch: int, length: int) -> None:
    """The released iterator's segments; a validation or test split lacks the first `<S>`."""
    sentences = numbered(lengths)
    tokens = np.array([t for sentence in sentences for t in (*sentence, S)], np.uint16)
    batch = min(batch, len(tokens))
    want = list(released.shuffled([[S, *sentence, S] for sentence in sentences], batch, length))
    found = scored_segments(tokens, S, batch, length, counting="released", sentences=True)
    if not want:
        with pytest.raises(TxlError, match=f"{len(tokens)} tokens, too few for {batch} streams"):
            next(found)
        return
    for got, pair in zip(found, want, strict=True):
        for x, y in zip(got, pair, strict=True):
            assert torch.equal(x, y)


def test_shuffled_sentences_refuse_released_streams(corpus: Corpus) -> None:
    sentences = dataclasses.replace(corpus, rule="one-billion-word")
    with pytest.raises(TxlError, match=r"streams 'released' is for text in order; .* go with streams 'all'"):
        training_streams(sentences, 2, 5, 0, 0, "released")


def test_fewer_tokens_than_streams(corpus: Corpus) -> None:
    with pytest.raises(TxlError, match=r"^the training split has 8 tokens; 8 streams need at least 9: use a longer"):
        Streams(corpus.train[:8], 8, 50)
    with pytest.raises(TxlError, match="15 tokens; 8 streams need at least 16"):
        Streams(corpus.train[:15], 8, 50, counting="released")
    with pytest.raises(TxlError, match="3 tokens; 3 streams need at least 4"):
        shuffled(stored([[1]]), 3, 5, seed=0)
    with pytest.raises(TxlError, match="no sentences to shuffle"):
        shuffled((np.zeros(1, np.uint8), np.zeros(0, np.int64)), 1, 5, seed=0)
    with pytest.raises(TxlError, match="has 0 tokens, too few for 1 streams"):
        list(scored_segments(corpus.train[:0], 0, 4, 5))


def test_invalid_counting(corpus: Corpus) -> None:
    with pytest.raises(TxlError, match="counting must be all or released, got 'some'"):
        list(scored_segments(corpus.train, 0, 1, 1, counting="some"))  # type: ignore[arg-type]
    with pytest.raises(TxlError, match="streams must be all or released, got 'some'"):
        Streams(corpus.train, 1, 5, counting="some")  # type: ignore[arg-type]
