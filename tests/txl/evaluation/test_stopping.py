"""Stop strings: a text ends before one however it is cut, and no part of one is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl.errors import TxlError
from txl.evaluation.stopping import UpToStop, stop_strings

letters = st.text("ab", max_size=12).map(str.encode)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4).map(str.encode), max_size=3)


def up_to_stop(text: bytes, stops: list[bytes]) -> tuple[bytes, int | None]:
    """By trying every end; and where the stop string that counted is complete."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], end
    return text, None


@given(st.lists(letters, max_size=6), stop_lists)
def test_any_text_in_any_pieces(pieces: list[bytes], stops: list[bytes]) -> None:
    want, end = up_to_stop(b"".join(pieces), stops)
    shown, taken, text = b"", 0, UpToStop(stops)
    for piece in pieces:
        shown += text.add(piece)
        taken += len(piece)
        assert want.startswith(shown)
        assert text.stopped == (end is not None and end <= taken), "it ends as soon as it can be known"
        if not text.stopped:  # nothing is held back but what may begin a stop string
            held = b"".join(pieces)[len(shown) : taken]
            assert not held or any(len(held) < len(stop) and stop.startswith(held) for stop in stops)
    assert shown + text.rest() == want
    assert text.rest() == b""


def test_by_hand() -> None:
    text = UpToStop(stop_strings(["\n\n", "END"]))
    assert [text.add(piece) for piece in (b"one\n", b"two E", b"N", b"d E", b"ND three")] == [
        b"one", b"\ntwo ", b"", b"ENd ", b"",
    ]  # fmt: skip
    assert text.stopped
    assert text.add(b"four") == text.rest() == b""


def test_what_is_taken_for_stop_strings() -> None:
    assert stop_strings("é") == ("é".encode(),)
    assert stop_strings(b"\xff") == (b"\xff",)
    assert stop_strings(["a", b"b"]) == (b"a", b"b")
    assert stop_strings(()) == ()


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "stop must hold strings of at least one character, got ''"),
        (["a", b""], "stop must hold strings of at least one character, got b''"),
        (["a", 5], "stop must hold strings of at least one character, got 5"),
        (5, "stop must be a string or a sequence of them, got 5"),
        ("\ud800", "cannot be encoded"),
    ],
)
def test_mistakes(stop: object, message: str) -> None:
    with pytest.raises(TxlError, match=message):
        stop_strings(stop)
