"""The order in which a split is read: streams for training, segments for evaluation."""

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txl.errors import TxlError
from txl.text.corpus import Corpus
from txl.text.vocabulary import Tokens

Indices = npt.NDArray[np.int64]
Counting = Literal["all", "released"]


class Streams:
    """`batch` streams of `stream_len` pairs (token, next token), read in segments of `length`.

    Stream b begins at token b * `stride` of the text, which is read in order, so that memory can be
    carried over, or of its sentences, shuffled anew each epoch by (seed, epoch).

    Inputs and targets of shuffled sentences are those of the released PyTorch code's iterator: the
    `<S>` that closes a sentence also opens the next and is scored once. The order differs: the
    released code shuffles the shards, then the sentences of each; a stream takes the next sentence
    when its own has ended; and the last batch of a shard is left out unless it is full. Memory use:
    an index of the sentences, not the tokens.
    """

    def __init__(
        self,
        tokens: Tokens,
        batch: int,
        length: int,
        ext_len: int = 0,
        counting: Counting = "all",
        sentences: Indices | None = None,
        seed: int = 0,
    ) -> None:
        """Cut a split into streams.

        Args:
            tokens: [n]; with sentences, `<S> w1 .. wn` one after the other, and a final `<S>`.
            ext_len: tokens before a segment that are read again as context.
            counting: "all": streams of (n - 1) // batch targets; a stream's last target is the next
                stream's first token. "released": as in the released code, streams of n // batch
                tokens, the first of which is only an input. So a stream has one target less or, if
                batch divides n, as many targets but another start.
            sentences: [m], index of each sentence's first token, if they are to be shuffled.

        Raises:
            TxlError: a size is too small, the split is too short for so many streams, counting is
                not one of these words, or it is "released" and there are sentences.
        """
        _check_counting("streams", counting)
        for name, value, least in (("batch", batch, 1), ("length", length, 1), ("ext_len", ext_len, 0)):
            if value < least:
                raise TxlError(f"{name} must be >= {least}, got {value}")
        self.tokens, self.sentences, self.seed = tokens, sentences, seed
        self.batch, self.length, self.ext_len = batch, length, ext_len
        count = len(tokens)
        if sentences is not None:
            if counting != "all":
                raise TxlError(f"streams {counting!r} is for text in order; shuffled sentences go with streams 'all'")
            if not len(sentences):
                raise TxlError("the training split has no sentences to shuffle")
            count -= int(sentences[0])
            self._lengths = np.diff(sentences, append=len(tokens) - 1)
            self._epoch = -1
        if counting == "released":
            self.stride, fewest = count // batch, 2 * batch
            self.stream_len = self.stride - 1
        else:
            self.stride = self.stream_len = (count - 1) // batch
            fewest = batch + 1
        self.segments = -(-self.stream_len // length)
        if count < fewest:
            raise TxlError(
                f"the training split has {count} tokens; {batch} streams need at least {fewest}: "
                "use a longer text or a smaller batch"
            )

    def starts_epoch(self, n: int) -> bool:
        """Whether segment n begins an epoch, so that the memory must be cleared."""
        return n % self.segments == 0

    def is_whole(self, n: int) -> bool:
        """Whether segment n has `length` targets, as all have but an epoch's last."""
        return (n % self.segments + 1) * self.length <= self.stream_len

    def segment(self, n: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return segment n, counted over all epochs. It is a pure function of n.

        rows: the streams to return.

        Returns:
            Inputs [batch, e + l] and targets [batch, l], both int64. l is `length`, or less at the
            end of an epoch, whose last segment is kept as in the released code. e is ext_len, or
            the number of tokens before the segment in this epoch if that is less. Targets are the
            tokens after the last l inputs.
        """
        epoch, n = divmod(n, self.segments)
        first = n * self.length
        last = min(first + self.length, self.stream_len)
        begins = np.arange(self.batch)[rows, None] * self.stride
        places = begins + np.arange(max(first - self.ext_len, 0), last + 1)
        if self.sentences is not None:
            places = self._shuffled(self.sentences, epoch, places)
        block = torch.from_numpy(self.tokens[places].astype(np.int64))
        return block[:, :-1], block[:, first - last :]

    def _shuffled(self, sentences: Indices, epoch: int, places: Indices) -> Indices:
        """Return where in the split the tokens at these places of the epoch's order are."""
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(sentences))
            self._ends = np.cumsum(self._lengths[self._order])
            self._epoch = epoch
        closing = places == self._ends[-1]
        which = np.searchsorted(self._ends, np.where(closing, 0, places), side="right")
        from_end = places - self._ends[which] + self._lengths[self._order[which]]
        return np.where(closing, len(self.tokens) - 1, sentences[self._order[which]] + from_end)


def training_streams(
    corpus: Corpus, batch: int, length: int, ext_len: int, seed: int, counting: Counting = "all"
) -> Streams:
    """Make the streams of a corpus's training split, shuffled if it has `Corpus.sentences`."""
    return Streams(corpus.train, batch, length, ext_len, counting, corpus.sentences(), seed)


def scored_segments(
    tokens: Tokens,
    start: int,
    batch: int,
    length: int,
    counting: Counting = "all",
    sentences: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield segments (inputs, targets), int64 [batch, l <= length] each, that score a split.

    Args:
        tokens: [n]. start: the token before the first.
        batch: number of streams; reduced if the split has fewer tokens.
        counting: "all" scores each token exactly once: its input is the token before it, and
            targets are -100 (ignored) after the end of a shorter stream. "released" is as in the
            released code: tokens beyond a multiple of batch are left out, and the first token of
            each stream is only an input.
        sentences: the split consists of independent sentences, each ended by `start`. With
            "released", a stream then takes the next sentence when its own has ended, and the last
            segment is left out unless all streams fill it.

    Raises:
        TxlError: the split is empty or too short, or counting is not one of these words.
    """
    _check_counting("counting", counting)
    count = len(tokens)
    batch = min(batch, count)
    too_few = TxlError(f"the split to score has {count} tokens, too few for {max(batch, 1)} streams")
    if not count:
        raise too_few
    if counting == "released" and sentences:
        block = None
        for block in _dealt(tokens, start, batch, length):
            yield block
        if block is None:
            raise too_few
        return
    if counting == "released" and count < 2 * batch:
        raise too_few
    if counting == "all":
        per_stream = -(-count // batch)
        shift, scored = 0, per_stream
    else:
        per_stream = count // batch
        shift, scored = 1, per_stream - 1
    rows = np.arange(batch)[:, None] * per_stream + shift
    for first in range(0, scored, length):
        places = rows + np.arange(first, min(first + length, scored))
        before = places - 1
        inside = (before >= 0) & (before < count)
        inputs = np.where(inside, tokens[np.clip(before, 0, count - 1)].astype(np.int64), start)
        targets = np.where(places < count, tokens[np.minimum(places, count - 1)].astype(np.int64), -100)
        yield torch.from_numpy(inputs), torch.from_numpy(targets)


def _dealt(tokens: Tokens, start: int, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield segments [batch, length] of sentences: a stream whose sentence has ended takes the next
    one, until a segment cannot be filled."""
    ends = np.append(np.flatnonzero(tokens == start) + 1, len(tokens)).tolist()
    sentences = map(range, [0, *ends], ends)
    left: list[list[int]] = [[] for _ in range(batch)]  # positions in each stream that are not scored yet
    while True:
        for places in left:
            while len(places) < length:
                sentence = next(sentences, None)
                if sentence is None:
                    return
                places.extend(sentence)
        targets = np.array([places[:length] for places in left])
        left = [places[length:] for places in left]
        inputs = np.where(targets > 0, tokens[targets - 1].astype(np.int64), start)
        yield torch.from_numpy(inputs), torch.from_numpy(tokens[targets].astype(np.int64))


def _check_counting(name: str, value: str) -> None:
    if value not in get_args(Counting):
        raise TxlError(f"{name} must be {' or '.join(get_args(Counting))}, got {value!r}")
