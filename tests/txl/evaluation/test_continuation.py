"""`LanguageModel` goes on with texts: stop strings, batches, clamped distances, zeros before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_helpers import small_model

from txl import Engine, LanguageModel
from txl.errors import TxlError
from txl.evaluation import generate as sampling
from txl.evaluation.generate import Sampling
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
    steps, told = counted(monkeypatch), []
    shown = list(model.stream(prompt, 40, plain, seed=1, stop=stop, progress=told.append))
    assert b"".join(shown) == whole[:place]
    assert all(shown)
    needed = next(n for n in range(41) if stop in b"".join(pieces[:n]))
    assert told == list(range(1, needed + 1)), "nothing is drawn after it"
    assert steps == [1] * needed
    assert model.generate(prompt, 40, plain, seed=1, stop=["never", stop.decode()]) == whole[:place].decode()
    held = whole[-3:].decode() + "!"  # its beginning ends the text
    assert model.generate(prompt, 40, plain, seed=1, stop=held) == whole.decode()


@pytest.mark.parametrize(
    ("mem_len", "options"), [(8, {"clamp_len": 3}), (0, {"clamp_len": 3}), (8, {"initial_memory": "zeros"})]
)
def test_settings_are_those_of_a_model_that_has_them(mem_len: int, options: dict[str, Any]) -> None:
    model, other = language_model(mem_len=mem_len), language_model(mem_len=mem_len, **options)
    asked = {"zeros": True} if "initial_memory" in options else options
    want = other.generate("abc", 40, LIKELIEST, attn_len=12)
    config = model.model.config
    assert want != model.generate("abc", 40, LIKELIEST, attn_len=12)
    assert model.generate("abc", 40, LIKELIEST, attn_len=12, **asked) == want
    assert model.generate_batch(["abc"], 40, LIKELIEST, attn_len=12, **asked) == [want]
    assert model.model.config == config
    assert model.model.layers[0].attention.clamp_len is None


def test_zeros_can_be_left_out() -> None:
    zeros, empty = language_model(initial_memory="zeros"), language_model()
    want = empty.generate("ab", 20, LIKELIEST)
    assert zeros.generate("ab", 20, LIKELIEST, zeros=False) == want != zeros.generate("ab", 20, LIKELIEST)
    window = language_model(mem_len=0)
    assert window.generate("ab", 20, LIKELIEST, zeros=False) == window.generate("ab", 20, LIKELIEST)


def test_streams_with_and_without_zeros_at_the_same_time() -> None:
    model = language_model()
    alone = [model.generate("abc", 20, LIKELIEST, zeros=zeros).encode() for zeros in (True, False)]
    assert alone[0] != alone[1]
    both = zip(*(model.stream("abc", 20, LIKELIEST, zeros=zeros) for zeros in (True, False)), strict=True)
    assert [b"".join(pieces) for pieces in zip(*both, strict=True)] == alone


@pytest.mark.parametrize("own", [True, False], ids=["the model's", "asked for"])
def test_zeros_are_as_many_as_a_token_sees(own: bool) -> None:
    """And not as few as there are tokens, which would be right with an empty memory."""
    model = language_model(initial_memory="zeros" if own else "empty")
    engine = Engine(language_model(initial_memory="zeros").model, 1, attn_len=60, max_segment=8)
    tokens = torch.tensor(LETTERS.encode(b"abc").astype(np.int64)).unsqueeze(0)
    want = torch.cat(list(sampling.generate(engine, tokens, 8, LIKELIEST))).tolist()
    found = model.generate("abc", 8, LIKELIEST, attn_len=60, zeros=None if own else True)
    assert found == LETTERS.decode(want).decode()
    short = sampling.generate(Engine(engine.model, 1, 11, 8), tokens, 8, LIKELIEST)
    assert want != torch.cat(list(short)).tolist()


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
    "attn_len": ({}, {"attn_len": 0}, "attn_len must be an integer >= 1, got 0"),
    "clamp_len": ({}, {"clamp_len": 0}, "clamp_len must be an integer >= 1, got 0"),
    "shaw": (SYSTEMS["shaw"], {"clamp_len": 3}, "clamp_len is for encoding 'relative', not 'shaw'"),
    "zeros": (
        SYSTEMS["sinusoid"],
        {"zeros": True},
        "zeros are for a Transformer with recurrence and relative positions",
    ),
    "no memory": ({"mem_len": 0}, {"zeros": True}, "zeros are for a Transformer with recurrence"),
    "stop": ({}, {"stop": ["a", ""]}, "stop must hold strings of at least one character, got ''"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes(name: str) -> None:
    options, arguments, message = BAD[name]
    model = language_model(**options)
    with pytest.raises(TxlError, match=message):
        model.generate_batch(**({"prompts": ["ab"]} | arguments))
    if "prompts" not in arguments:
        with pytest.raises(TxlError, match=message):
            model.stream("ab", **arguments)  # before the first token is asked for


def test_an_lstm_has_no_zeros_and_no_distances() -> None:
    with pytest.raises(TxlError, match="zeros is for Transformers"):
        recurrent("lstm").generate("ab", 3, zeros=True)
    with pytest.raises(TxlError, match="clamp_len is for Transformers"):
        recurrent("lstm").generate("ab", 3, clamp_len=3)
