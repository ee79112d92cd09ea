"""Sampling, prompts, stop strings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import small_model

from txl import LanguageModel
from txl.errors import TxlError
from txl.evaluation import generate as sampling
from txl.evaluation.evaluate import Reading
from txl.evaluation.generate import Sampling, text_of
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
    """Return a model whose likeliest texts differ by prompt."""
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
    """Return a list to which every step of sampling adds its batch size."""
    steps: list[int] = []

    def generate(*arguments: Any) -> Iterator[torch.Tensor]:
        for token in sampling.generate(*arguments):
            steps.append(len(token))
            yield token

    monkeypatch.setattr("txl.language_model.generate", generate)
    return steps


@pytest.mark.parametrize("name", [*SYSTEMS, "lstm", "qrnn"])
def test_prompts_of_text_bytes_and_tokens(name: str) -> None:
    """Prompts shorter and longer than the memory; a seed repeats a text."""
    model = language_model(**SYSTEMS[name]) if name in SYSTEMS else recurrent(name)
    texts = set()
    for prompt in ("abc", "the quick brown fox jumps over it", "a"):
        text = model.generate(prompt, 15, LIKELIEST)
        assert len(text) == 15
        assert text == model.generate(prompt.encode(), 15, LIKELIEST)
        assert text == model.generate(LETTERS.encode(prompt.encode()), 15, LIKELIEST)
        texts.add(text)
    assert len(texts) == 3, "texts that are all alike would show nothing"
    assert model.generate("a", 10, seed=3) == model.generate("a", 10, seed=3) != model.generate("a", 10, seed=4)


def test_space_before_the_first_word() -> None:
    model = language_model(WORDS)
    after_word, after_space, after_line = (model.generate(p, 5, LIKELIEST) for p in ("w1 w2", "w1 w2 ", "w1\n"))
    assert after_word == " " + after_space
    assert after_line[0] != " "


@pytest.mark.parametrize("vocabulary", [LETTERS, WORDS], ids=["bytes", "words"])
def test_stop_string_of_several_tokens(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert model.generate(prompt, 40, plain, seed=1, stop=stop.decode()) == whole[:place].decode()
    held = whole[-3:].decode() + "!"  # its beginning ends the text
    assert model.generate(prompt, 40, plain, seed=1, stop=held) == whole.decode()


@pytest.mark.parametrize("system", ["relative", "sinusoid", "no recurrence"])
def test_methods_of_reading_the_prompt(system: str) -> None:
    """Windows and memories that hold the whole text give the same text in every method."""
    model = language_model(**SYSTEMS[system])
    window = model.generate("abc", 12, LIKELIEST, Reading(40, method="sliding"))
    assert window == model.generate("abc", 12, LIKELIEST, Reading(40, method="sliding", segment=3))
    if system != "sinusoid":
        assert model.generate("abc", 12, LIKELIEST, Reading(40, method="cached", segment=2)) == window
        assert model.generate("abc", 12, LIKELIEST, Reading(40, method="segments", segment=1)) == window
    with pytest.raises(TxlError, match="stride must be from 1 to the window's 2 tokens, got 3"):
        model.generate("abc", 12, LIKELIEST, Reading(2, method="sliding", segment=3))


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
def test_invalid_sampling(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(TxlError, match=message):
        Sampling(**arguments)


def test_top_k_of_equal_scores() -> None:
    """A threshold at the k-th value would keep all of them."""
    drawn = Sampling(1.0, top_k=3).draw(torch.zeros(2000, 50))
    assert len(drawn.unique()) == 3


AB = ByteVocabulary(b"ab")


@given(st.text("ab", max_size=40).map(str.encode), st.text("ab", max_size=4).map(str.encode))
def test_any_text_and_stop_string(text: bytes, stop: bytes) -> None:
    """The text up to its first stop string, each part as soon as it is certain."""
    taken = 0

    def drawn() -> Iterator[torch.Tensor]:
        nonlocal taken
        for token in AB.encode(text):
            taken += 1
            yield torch.tensor([int(token)])

    shown, end = b"", text.find(stop) if stop else -1
    for piece in text_of(drawn(), AB, 0, False, stop):
        assert piece
        shown += piece
        held = text[len(shown) : taken]  # nothing is held back but what may begin the stop string
        assert not held or stop.startswith(held)
    assert shown == (text if end < 0 else text[:end])
    assert taken == (len(text) if end < 0 else end + len(stop))
