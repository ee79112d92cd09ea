"""Vocabularies: round trips, files, errors."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl.errors import TxlError
from txl.text.vocabulary import (
    ByteVocabulary,
    Vocabulary,
    WordVocabulary,
    decoded_again,
    first_words,
    from_file,
    token_dtype,
)

WORDS = ("<eos>", "the", "cat", "<unk>", "sat")


@given(st.binary(min_size=1, max_size=300))
def test_round_trip_of_bytes(text: bytes) -> None:
    vocabulary = ByteVocabulary(bytes(sorted(set(text))))
    assert vocabulary.decode(vocabulary.encode(text).tolist()) == text


def test_unseen_bytes_are_named() -> None:
    with pytest.raises(TxlError, match=r"bytes that the training data never did: 0x21 '!', 0xe9"):
        ByteVocabulary(b"abc").encode(b"ab!\xe9")
    with pytest.raises(TxlError, match=r"0x00 '\\x00', .*, 0x07 '\\x07' and 245 more$"):
        ByteVocabulary(b"abc").encode(bytes(range(256)))


def test_a_text_of_bytes_starts_after_a_newline_or_the_first_symbol() -> None:
    assert ByteVocabulary(b"\t\nab").start == 1
    assert ByteVocabulary(b" ab").start == 0


def test_words_by_hand() -> None:
    vocabulary = WordVocabulary(WORDS)
    tokens = vocabulary.encode(b"the cat sat\n\n The\tcat\r\nthe")
    assert tokens.tolist() == [1, 2, 4, 0, 0, 3, 2, 0, 1]
    assert tokens.dtype == np.uint8
    assert vocabulary.decode(tokens.tolist()) == b"the cat sat\n\n<unk> cat\nthe"
    assert (vocabulary.start, vocabulary.unit, len(vocabulary)) == (0, "words", 5)


@given(st.lists(st.lists(st.sampled_from(WORDS[1:]), max_size=4), max_size=5))
def test_round_trip_of_words(lines: list[list[str]]) -> None:
    text = "".join(" ".join(line) + "\n" for line in lines).encode()
    vocabulary = WordVocabulary(WORDS)
    assert vocabulary.decode(vocabulary.encode(text).tolist()) == text


@pytest.mark.parametrize(("size", "dtype"), [(256, "uint8"), (257, "uint16"), (1 << 16, "uint16"), (65537, "uint32")])
def test_tokens_take_the_smallest_type(size: int, dtype: str) -> None:
    assert np.dtype(token_dtype(size)).name == dtype


def test_unknown_words_without_unk() -> None:
    with pytest.raises(TxlError, match=r"words that the vocabulary lacks.*: 'a', 'b', 'c', 'd', 'e', \.\.$"):
        WordVocabulary(["<eos>", "x"]).encode(b"a b a c\nd e f x")


def test_words_need_utf_8() -> None:
    with pytest.raises(TxlError, match=r"not UTF-8 \(at byte 2\)"):
        WordVocabulary(WORDS).encode(b"a \xff")


@pytest.mark.parametrize(
    "vocabulary",
    [
        ByteVocabulary(b"\n a\xff"),
        WordVocabulary(WORDS),
        WordVocabulary(["<S>", "<eos>", "été"], lower=True, end="<S>"),
        WordVocabulary(["<eos>", "10\xa0km", "\x85", "\u3000", "a\u2028b\x1cc"]),
    ],
)
def test_file_and_settings_rebuild_it(vocabulary: Vocabulary) -> None:
    settings = json.loads(json.dumps(vocabulary.settings()))
    again = from_file(vocabulary.to_file(), settings)
    assert again == vocabulary
    assert again.settings() == settings


def test_files_by_hand() -> None:
    assert ByteVocabulary(b"\n\xff").to_file() == b"0x0a\n0xff\n"
    assert WordVocabulary(["<eos>", "été"]).to_file() == "<eos>\nété\n".encode()


SPACES = [x for x in map(chr, range(0x3001)) if x.isspace()]


@pytest.mark.parametrize("space", SPACES, ids=lambda x: f"U+{ord(x):04X}")
def test_words_with_other_white_space(space: str) -> None:
    """Only ASCII white space separates words; other white space may be part of one."""
    words = ["<eos>", f"10{space}km", "a"]
    if space in " \t\n\r\v\f":
        with pytest.raises(TxlError, match="a line holds"):
            WordVocabulary(words)
        return
    vocabulary = WordVocabulary(words)
    assert vocabulary.encode(f"a 10{space}km\na".encode()).tolist() == [2, 1, 0, 2]
    assert vocabulary.encode(vocabulary.decode([2, 1, 0, 2])).tolist() == [2, 1, 0, 2]
    assert first_words(f"<eos> 9\n10{space}km 8\n".encode()) == words[:2]
    assert WordVocabulary(["<eos>", "10", "km"]).encode(f"10{space}km".encode()).tolist() == [1, 2]


@given(st.lists(st.text(min_size=1), unique=True))
def test_words_read_as_latin_1_are_repaired(words: list[str]) -> None:
    """If one word is right, all are kept."""
    mojibake = [word.encode().decode("latin-1") for word in words]
    assert decoded_again(mojibake) == words
    for right in ("café", "naïve", "voilà", "Ω", "\u2019", "\xa0", "\x85"):
        assert decoded_again([*mojibake, right]) == [*mojibake, right]


@given(st.lists(st.text(st.characters(max_codepoint=0xFF), min_size=1), unique=True))
def test_repaired_words_stay_distinct(words: list[str]) -> None:
    assert len(set(decoded_again(words))) == len(words)


BYTES, OF_WORDS = {"unit": "bytes"}, {"unit": "words"}


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b"<eos>\na\nb\na\nb\n", OF_WORDS, "'a' is there twice"),
        (b"<eos>\na\n\nb\n", OF_WORDS, "a line holds '', not one word"),
        (b"<eos>\na b\n", OF_WORDS, "a line holds 'a b', not one word"),
        (b"<eos>\na\n\xe9\n", OF_WORDS, r"is not UTF-8 \(at byte 8\)"),
        (b"<eos>\n", OF_WORDS, r"1 word\(s\) are too few"),
        (b"", OF_WORDS, r"0 word\(s\) are too few"),
        (b"a\nb\n", OF_WORDS, "<eos> is not there; it is the word that ends a line"),
        (b"0x0a\n0x61\n0x0a\n", BYTES, "a byte is there twice"),
        (b"0x0a\nzz\n", BYTES, "every line must be a byte such as 0x0a"),
        (b"0x100\n", BYTES, "every line must be a byte such as 0x0a"),
        (b"", BYTES, "none at all"),
        (b"", {"unit": "letters"}, "unit must be bytes or words, got 'letters'"),
    ],
)
def test_bad_files(content: bytes, settings: dict[str, str], message: str) -> None:
    with pytest.raises(TxlError, match=rf"^vocabulary: .*({message})"):
        from_file(content, settings)


def test_vocabulary_file_with_counts() -> None:
    assert first_words(b"<S> 10\nthe 9\n") == ["<S>", "the"]
    assert first_words(b"a\n\nb\n") == ["a", "", "b"]
