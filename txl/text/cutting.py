"""Text in pieces: its last line closed, cut into splits, the edges of splits stripped."""

from collections.abc import Iterable, Iterator

Pieces = Iterator[tuple[int, bytes]]
"""Text and the split it belongs to: 0 train, 1 valid, 2 test."""


def closed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """With a line end after the last line, if there is any text."""
    last = b"\n"
    for piece in pieces:
        yield piece
        last = piece[-1:] or last
    if last != b"\n":
        yield b"\n"


def cut_at(pieces: Iterable[bytes], ends: tuple[int, int], lines: bool) -> Pieces:
    """Three splits of a text, of which the first two end after so many bytes.

    lines: or at the line end that follows.
    """
    split, at = 0, 0
    for piece in pieces:
        while split < 2 and at + len(piece) >= ends[split]:
            stop = max(ends[split] - at, 0)
            if lines:
                stop = piece.find(b"\n", max(stop - 1, 0)) + 1
                if not stop:
                    break
            if stop:
                yield split, piece[:stop]
            split, at, piece = split + 1, at + stop, piece[stop:]
        if piece:
            yield split, piece
        at += len(piece)


def stripped(pieces: Pieces) -> Pieces:
    """Without the white space at the edges of each split."""
    current, started, held = -1, False, b""
    for split, piece in pieces:
        if split != current:
            current, started, held = split, False, b""
        text = held + piece if started else piece.lstrip()
        body = text.rstrip()
        started, held = started or bool(body), text[len(body) :]
        if body:
            yield split, body
