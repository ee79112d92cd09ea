"""Texts go on: sampling, and `LanguageModel` with stop strings, batches, clamped distances, zeros
before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import small_model

from txl import Engine, LanguageModel
from txl.errors import TxlError
from txl.evaluation import generate as sampling
from txl.evaluation.evaluate import Reading
from txl.evaluation.generate import Sampling, UpToStop, generate, stop_strings
from txl.model import Network
from txl.model.config import RecurrentConfig
from txl.model.recurrent import RecurrentNetwork
from txl.text.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary

LETTERS = ByteVocabulary(b"\n abcdefghijklmnopqrstuvwxyz.,;")
WORDS = WordVocabulary(["<eos>", "<unk>", *(f"w{n}" for n in range(29))])
LIKELIEST = Sampling(temperature=0)
SYSTEMS: dict[str, dict[str, object]] = {
    "relative": {},
    "clamped, after zeros": {"clamp_len": 3, "initial_memory": "zeros"},
    "shaw": {"encoding": "shaw", "table_len": 5},
    "sinusoid": {"encoding": "sinusoid"},
    "learned": {"encoding": "learned", "table_len": 12, "mem_len": 0},
    "no recurrence": {"mem_len": 0},
}


def opened(model: Network, vocabulary: Vocabulary = LETTERS) -> LanguageModel:
    """With parameters whose likeliest texts differ and go on changing."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, 0.0, 0.5)
        else:
            torch.nn.init.constant_(p, float("norm" in name and "weight" in name))
    return LanguageModel(model, vocabulary, attn_len=12, segment=4, path=Path("a.safetensors"))


def language_model(vocabulary: Vocabulary = LETTERS, **options: object) -> LanguageModel:
    return opened(small_model(tie_weight=False, **options), vocabulary)


def recurrent(kind: str) -> LanguageModel:
    config = RecurrentConfig(network=kind, vocab_size=31, d_model=8, d_inner=16, tie_weight=False)
    return opened(RecurrentNetwork(config).double().eval())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch of every step of sampling from now on."""
    steps: list[int] = []

    def generate(*arguments: Any) -> Iterator[torch.Tensor]:
        for token in sampling.generate(*arguments):
            steps.append(len(token))
            yield token

    monkeypatch.setattr("txl.language_model.generate", generate)
    return steps


@pytest.mark.parametrize("name", [*SYSTEMS, "lstm", "qrnn"])
def test_a_batch_is_its_texts_one_by_one(name: str) -> None:
    """Prompts of several lengths, longer than memory too, as text, bytes and tokens."""
    model = language_model(**SYSTEMS[name]) if name in SYSTEMS else recurrent(name)
    prompts = ["abc", b"xyz", "the quick brown fox jumps over it", LETTERS.encode(b"q"), "a", "lazy, dog"]
    one_by_one = [model.generate(prompt, 30, LIKELIEST) for prompt in prompts]
    assert model.generate_batch(prompts, 30, LIKELIEST) == one_by_one
    assert len(set(one_by_one)) == len(prompts), "texts that are all alike would show nothing"
    stops = [one_by_one[0][5:7], one_by_one[2][9]]
    stopped = [model.generate(prompt, 30, LIKELIEST, stop=stops) for prompt in prompts]
    assert model.generate_batch(prompts, 30, LIKELIEST, stop=stops) == stopped != one_by_one
    held = [text[-3:] + "!" for text in one_by_one]  # their beginnings end the texts
    assert model.generate_batch(prompts, 30, LIKELIEST, stop=held) == one_by_one


def test_a_space_goes_before_a_word_unless_there_is_one() -> None:
    after_word, after_space, after_line = language_model(WORDS).generate_batch(
        ["w1 w2", "w1 w2 ", "w1\n"], 5, LIKELIEST
    )
    assert after_word == " " + after_space
    assert after_line[0] != " "


def test_sampled_batches_are_repeatable() -> None:
    model, prompts = language_model(), ["ab", "cd", "e"]
    first = model.generate_batch(prompts, 20, seed=3)
    assert first == model.generate_batch(prompts, 20, seed=3) != model.generate_batch(prompts, 20, seed=4)
    assert model.generate_batch(["ab"], 20, seed=3) == [model.generate("ab", 20, seed=3)]
    same = model.generate_batch(["ab"] * 3, 20, seed=3)
    assert len(set(same)) == 3, "each text of a batch is drawn for itself"


def test_a_batch_ends_with_its_last_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = language_model(), ["ab", "cd", "e"]
    whole = model.generate_batch(prompts, 40, LIKELIEST)
    stops = [text[n : n + 4] for text, n in zip(whole, (3, 10, 6), strict=True)]
    ends = [min(text.find(stop) + 4 for stop in stops if stop in text) for text in whole]
    steps = counted(monkeypatch)
    found = model.generate_batch(prompts, 40, LIKELIEST, stop=stops)
    assert found == [text[: end - 4] for text, end in zip(whole, ends, strict=True)]
    assert steps == [1] * ends[2] + [2] * max(ends[:2])


@pytest.mark.parametrize("vocabulary", [LETTERS, WORDS], ids=["bytes", "words"])
def test_a_stop_string_over_several_tokens(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = language_model(vocabulary), Sampling(1.0)
    prompt = b"abc" if vocabulary is LETTERS else b"w1 w2"
    pieces = list(model.stream(prompt, 40, plain, seed=1))
    whole = b"".join(pieces)
    stop = b"".join(pieces[20:24])[:-1]  # it ends within a word
    place = whole.find(stop)
    steps = counted(monkeypatch)
    shown = list(model.stream(prompt, 40, plain, seed=1, stop=stop))
    assert b"".join(shown) == whole[:place]
    assert all(shown)
    needed = next(n for n in range(41) if stop in b"".join(pieces[:n]))
    assert steps == [1] * needed, "nothing is drawn after it"
    assert model.generate(prompt, 40, plain, seed=1, stop=["never", stop.decode()]) == whole[:place].decode()
    held = whole[-3:].decode() + "!"  # its beginning ends the text
    assert model.generate(prompt, 40, plain, seed=1, stop=held) == whole.decode()


@pytest.mark.parametrize(
    ("mem_len", "options"), [(8, {"clamp_len": 3}), (0, {"clamp_len": 3}), (8, {"initial_memory": "zeros"})]
)
def test_settings_are_those_of_a_model_that_has_them(mem_len: int, options: dict[str, Any]) -> None:
    model, other = language_model(mem_len=mem_len), language_model(mem_len=mem_len, **options)
    asked = {"zeros": True} if "initial_memory" in options else options
    want = other.generate("abc", 40, LIKELIEST, 12)
    config = model.model.config
    assert want != model.generate("abc", 40, LIKELIEST, 12)
    assert model.generate("abc", 40, LIKELIEST, Reading(12, **asked)) == want
    assert model.generate_batch(["abc"], 40, LIKELIEST, Reading(12, **asked)) == [want]
    assert model.model.config == config
    assert model.model.layers[0].attention.clamp_len is None


@pytest.mark.parametrize("system", ["relative", "sinusoid", "no recurrence"])
def test_a_method_asked_for_reads_the_text_so(system: str) -> None:
    """Of windows as long as the text and memories that hold all of it every method sees the same,
    but for how far back its positions reach."""
    model = language_model(**SYSTEMS[system])
    window = model.generate("abc", 12, LIKELIEST, Reading(40, method="sliding"))
    assert window == model.generate("abc", 12, LIKELIEST, Reading(40, method="sliding", segment=3))
    if system != "sinusoid":
        assert model.generate("abc", 12, LIKELIEST, Reading(40, method="cached", segment=2)) == window
        assert model.generate("abc", 12, LIKELIEST, Reading(40, method="segments", segment=1)) == window
    with pytest.raises(TxlError, match="stride must be from 1 to the window's 2 tokens, got 3"):
        model.generate("abc", 12, LIKELIEST, Reading(2, method="sliding", segment=3))


def test_zeros_can_be_left_out() -> None:
    zeros, empty = language_model(initial_memory="zeros"), language_model()
    want = empty.generate("ab", 20, LIKELIEST)
    assert zeros.generate("ab", 20, LIKELIEST, Reading(zeros=False)) == want != zeros.generate("ab", 20, LIKELIEST)
    window = language_model(mem_len=0)
    assert window.generate("ab", 20, LIKELIEST, Reading(zeros=False)) == window.generate("ab", 20, LIKELIEST)


def test_streams_with_and_without_zeros_at_the_same_time() -> None:
    model = language_model()
    alone = [model.generate("abc", 20, LIKELIEST, Reading(zeros=zeros)).encode() for zeros in (True, False)]
    assert alone[0] != alone[1]
    both = zip(*(model.stream("abc", 20, LIKELIEST, Reading(zeros=zeros)) for zeros in (True, False)), strict=True)
    assert [b"".join(pieces) for pieces in zip(*both, strict=True)] == alone


@pytest.mark.parametrize("own", [True, False], ids=["the model's", "asked for"])
def test_zeros_are_as_many_as_a_token_sees(own: bool) -> None:
    """And not as few as there are tokens, which would be right with an empty memory."""
    model = language_model(initial_memory="zeros" if own else "empty")
    engine = Engine(language_model(initial_memory="zeros").model, 1, attn_len=60, max_segment=8)
    tokens = torch.tensor(LETTERS.encode(b"abc").astype(np.int64)).unsqueeze(0)
    want = torch.cat(list(sampling.generate(engine, tokens, 8, LIKELIEST))).tolist()
    found = model.generate("abc", 8, LIKELIEST, Reading(60, zeros=None if own else True))
    assert found == LETTERS.decode(want).decode()
    short = sampling.generate(Engine(engine.model, 1, 11, 8), tokens, 8, LIKELIEST)
    assert want != torch.cat(list(short)).tolist()


def test_generation_is_repeatable_by_its_generator() -> None:
    engine, prompt = Engine(small_model(), 2, 6, 4), torch.zeros(2, 3, dtype=torch.long)

    def text() -> torch.Tensor:
        return torch.stack(list(generate(engine, prompt, 20, Sampling(1.0), torch.Generator().manual_seed(3))))

    assert torch.equal(text(), text())


def test_sampling_options() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]]).expand(4000, 4)
    torch.manual_seed(0)
    assert Sampling(0.0).draw(logits).unique().tolist() == [1]
    assert Sampling(1.0, top_k=2).draw(logits).unique().tolist() == [1, 2]
    assert Sampling(1.0, top_p=0.6).draw(logits).unique().tolist() == [1]
    shares = Sampling(1.0).draw(logits).bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, logits[0].softmax(0), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature must be >= 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be >= 0, got nan"),
        ({"top_k": -1}, "top-k must be >= 0, got -1"),
        ({"top_p": 0.0}, r"top-p must be in \(0, 1\], got 0.0"),
    ],
)
def test_bad_sampling(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(TxlError, match=message):
        Sampling(**arguments)


def test_equal_scores_let_no_more_than_k_through() -> None:
    """A threshold at the k-th value would let all of them through."""
    drawn = Sampling(1.0, top_k=3).draw(torch.zeros(2000, 50))
    assert len(drawn.unique()) == 3


BAD: dict[str, tuple[dict[str, object], dict[str, Any], str]] = {
    "none": ({}, {"prompts": []}, r"prompts must be a sequence of one prompt or more, got \[\]"),
    "one": ({}, {"prompts": "abc"}, "prompts must be a sequence of one prompt or more, got 'abc'"),
    "empty": ({}, {"prompts": ["a", ""]}, r"prompts\[1\]: the prompt is empty"),
    "unknown": ({}, {"prompts": ["a", "b", "C"]}, r"prompts\[2\]: the text holds bytes that .*: 0x43 'C'"),
    "lists": ({}, {"prompts": [[1, 2]]}, r"prompts\[0\]: prompt must be str, bytes, or a NumPy array \[n\] of tokens"),
    "tokens": ({}, {"prompts": [np.array([99])]}, r"prompts\[0\]: prompt must hold tokens from 0 to 30, got 99 to 99"),
    "count": ({}, {"count": 0}, "count must be an integer >= 1, got 0"),
    "attn_len": ({}, {"reading": {"attn_len": 0}}, "attn_len must be an integer >= 1, got 0"),
    "clamp_len": ({}, {"reading": {"clamp_len": 0}}, "clamp_len must be an integer >= 1, got 0"),
    "shaw": (SYSTEMS["shaw"], {"reading": {"clamp_len": 3}}, "clamp_len is for encoding 'relative', not 'shaw'"),
    "zeros": (
        SYSTEMS["sinusoid"],
        {"reading": {"zeros": True}},
        "zeros are for a Transformer with recurrence and relative positions",
    ),
    "no memory": ({"mem_len": 0}, {"reading": {"zeros": True}}, "zeros are for a Transformer with recurrence"),
    "stop": ({}, {"stop": ["a", ""]}, "stop must hold strings of at least one character, got ''"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes(name: str) -> None:
    options, arguments, message = BAD[name]
    model, asked = language_model(**options), dict(arguments)
    how = asked.pop("reading", {})
    with pytest.raises(TxlError, match=message):
        model.generate_batch(**({"prompts": ["ab"]} | asked), reading=Reading(**how))
    if "prompts" not in arguments:
        with pytest.raises(TxlError, match=message):
            model.stream("ab", **asked, reading=Reading(**how))  # before the first token is asked for


def test_an_lstm_has_no_zeros_and_no_distances() -> None:
    with pytest.raises(TxlError, match="zeros is for Transformers"):
        recurrent("lstm").generate("ab", 3, reading=Reading(zeros=True))
    with pytest.raises(TxlError, match="clamp_len is for Transformers"):
        recurrent("lstm").generate("ab", 3, reading=Reading(clamp_len=3))


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
def test_bad_stop_strings(stop: object, message: str) -> None:
    with pytest.raises(TxlError, match=message):
        stop_strings(stop)
