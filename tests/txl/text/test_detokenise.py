"""WikiText's tokens as running text: by hand, and what holds for any text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl.text.detokenise import detokenise

BY_HAND = {
    "a two @-@ part film": "a two-part film",
    "5 @,@ 000 people and 2 @.@ 5 km": "5,000 people and 2.5 km",
    "Yes , no . One ; two : three ! Four ?": "Yes, no. One; two: three! Four?",
    "Du Fu ( Wade @-@ Giles : Tu Fu ) [ ... ] was": "Du Fu (Wade-Giles: Tu Fu) [...] was",
    'titled " Teddy \'s Story " , and " Craig " .': 'titled "Teddy\'s Story", and "Craig".',
    'noted , " He brings it . " <unk> \'s role': 'noted, "He brings it." <unk>\'s role',
    "you don 't know what they 're at , I 've , I 'm , he 'd , we 'll": (
        "you don't know what they're at, I've, I'm, he'd, we'll"
    ),
    "in the tourists ' last match": "in the tourists' last match",
    "<unk> and <unk> ' homes": "<unk> and <unk>' homes",
    "the 1930s and ' 40s , he": "the 1930s and '40s, he",
    "Old Norse : ' harbour bay ' )": "Old Norse: 'harbour bay')",
    "described as ' one of the ' .": "described as 'one of the'.",
    "the Beach Boys ' \" Surfer Girl \" '": "the Beach Boys' \"Surfer Girl\"'",
    "in the U.S. ' s capital": "in the U.S.'s capital",
    '" one line is open\n" another begins anew "': '"one line is open\n"another begins anew"',
    " \n = Robert <unk> = \n \n = = 2 @-@ 5 ( A ) = = \n It is . \n": (
        " \n = Robert <unk> = \n \n = = 2 @-@ 5 ( A ) = = \n It is. \n"
    ),
    "": "",
    ' "': ' "',
}
PARTS = [
    *"a b s t 5 é , . ; : ! ? ( ) [ ] \" ' @ = - <unk>".split(),
    *("@-@", "@,@", "@.@", "'s", "'t", "n't", "tourists", "as", "\n", "\t", "  ", "= = A @-@ B = ="),
]
texts = st.lists(st.sampled_from(PARTS)).flatmap(lambda parts: st.sampled_from([" ".join(parts), "".join(parts)]))


@pytest.mark.parametrize("tokens", BY_HAND)
def test_by_hand(tokens: str) -> None:
    assert detokenise(tokens) == BY_HAND[tokens]


def test_a_quote_and_a_letter_that_look_like_a_contraction_are_one() -> None:
    """Or they would be one the next time only."""
    assert detokenise("as ' t b '") == "as't b'"


@given(texts | st.text())
def test_once_is_enough(tokens: str) -> None:
    text = detokenise(tokens)
    assert detokenise(text) == text


@given(texts | st.text(), texts)
def test_no_letter_and_no_digit_is_lost(tokens: str, before: str) -> None:
    def kept(text: str) -> str:
        return "".join(text.split(" ")).replace("@-@", "-").replace("@,@", ",").replace("@.@", ".")

    text = detokenise(tokens, before)
    assert [c for c in text if c.isalnum()] == [c for c in tokens if c.isalnum()]
    assert [c for c in kept(text) if c not in "@"] == [c for c in kept(tokens) if c not in "@"]


def test_a_quotation_that_is_open_before_goes_on() -> None:
    assert detokenise('there " , he said . " A', 'He : " I was') == 'there", he said. "A'
    assert detokenise('there " , he said', 'He : " I was\n') == 'there ", he said'


def test_time_is_linear() -> None:
    """A hostile line of a million apostrophes would take hours if each looked at all the others."""
    began = time.perf_counter()
    detokenise("' " * 100_000)
    assert time.perf_counter() - began < 5
