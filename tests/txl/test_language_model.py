"""`txl.load`: a run's best checkpoint, evaluated and generated from as by the commands."""

import copy
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from model_helpers import small_model
from training_helpers import trainer

import txl
from txl.errors import TxlError
from txl.evaluation.evaluate import Reading, evaluate
from txl.evaluation.generate import Sampling
from txl.model.config import RecurrentConfig
from txl.model.recurrent import RecurrentNetwork
from txl.text import corpus as data
from txl.text.corpus import Corpus
from txl.text.vocabulary import ByteVocabulary, WordVocabulary
from txl.training import checkpoint as checkpoints


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaded") / "run"
    trainer(folder, corpus, steps=4).run()
    return folder


@pytest.fixture(scope="module")
def loaded(run: Path) -> txl.LanguageModel:
    return txl.load(run)


def test_load(loaded: txl.LanguageModel, run: Path, corpus: Corpus) -> None:
    assert loaded.path == run / "best.safetensors"
    assert loaded.vocabulary == corpus.vocabulary
    assert (loaded.segment, loaded.attn_len) == (16, 40)  # memory of 24
    assert not loaded.model.training


def test_text_and_tokens_have_one_score(loaded: txl.LanguageModel, corpus: Corpus) -> None:
    text = bytes(corpus.vocabulary.decode(corpus.test.tolist()))
    want = evaluate(loaded.model, corpus.test, corpus.vocabulary.start, Reading(40))
    for given in (corpus.test, text, text.decode()):
        score = loaded.evaluate(given)
        assert (score.nats, score.tokens, score.attn_len) == (want.nats, len(text), 40)
    assert loaded.evaluate(text, 8).nats != want.nats
    by_segments = evaluate(
        loaded.model, corpus.test, corpus.vocabulary.start, Reading(40, method="segments", segment=16)
    )
    assert loaded.evaluate(text, Reading(method="segments")).nats == by_segments.nats


def test_greedy_generation(loaded: txl.LanguageModel, corpus: Corpus) -> None:
    """Compared with the model that reads the whole text for every token."""
    tokens = data.as_tensor(corpus.vocabulary.encode(b"0123 follows")).unsqueeze(0)
    with torch.no_grad():
        for _ in range(12):
            logits, _ = loaded.model(tokens)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    want = corpus.vocabulary.decode(tokens[0, -12:].tolist()).decode()
    assert loaded.generate("0123 follows", 12, Sampling(temperature=0)) == want


def test_invalid_arguments(loaded: txl.LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(TxlError, match="bytes that the training data never did: 0x21 '!'"):
        loaded.stream("wait!")  # before the first token is asked for
    for prompt, message in (
        ("", "the prompt is empty"),
        ([1, 2], r"prompt must be str, bytes, or a NumPy array \[n\] of tokens"),
        (np.array([99]), "prompt must hold tokens from 0 to 24, got 99 to 99"),
    ):
        with pytest.raises(TxlError, match=message):
            loaded.generate(prompt)
    for stop in ("", ["a", "b"]):
        with pytest.raises(TxlError, match="stop must be a string of at least one character, got "):
            loaded.stream("00", stop=stop)
    with pytest.raises(TxlError, match="count must be an integer >= 1, got 0"):
        loaded.generate(count=0)
    with pytest.raises(TxlError, match="limit must be an integer >= 1, got -1"):
        loaded.evaluate("0123", limit=-1)
    with pytest.raises(TxlError, match=r"attn_len must be a whole number, got 3\.5"):
        loaded.evaluate("0123", 3.5)
    with pytest.raises(TxlError, match="got list"):
        loaded.evaluate([1, 2, 3])
    with pytest.raises(TxlError, match="text must hold tokens from 0 to 24, got 0 to 99"):
        loaded.evaluate(np.array([0, 99]))
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        loaded.generate("\ud800")
    with pytest.raises(TxlError, match="method must be one of cached, segments, sliding, got 'fast'"):
        loaded.evaluate("00", Reading(method="fast"))
    with pytest.raises(TxlError):
        txl.load(tmp_path)


@pytest.mark.parametrize("method", ["cached", "segments", "sliding"])
@pytest.mark.parametrize(
    ("options", "changes"),
    [({"clamp_len": 3}, {"clamp_len": 3}), ({"initial_memory": "zeros"}, {"zeros": True}), ({}, {"zeros": False})],
)
def test_settings_replace_those_of_training(
    tmp_path: Path, method: str, options: dict[str, object], changes: dict[str, object]
) -> None:
    words, reading = ByteVocabulary(bytes(range(31))), Reading(11, method, 4)
    trained = small_model(initial_memory="empty" if options else "zeros")
    wanted = small_model(**options)
    wanted.load_state_dict(trained.state_dict())
    checkpoints.save(tmp_path / "a.safetensors", trained.float(), words, {"attn_len": 11, "segment": 4}, {})
    tokens = np.random.default_rng(0).integers(0, 31, 40).astype(np.uint8)
    want = evaluate(wanted.float(), tokens, words.start, reading).nats
    assert txl.load(tmp_path / "a.safetensors", **changes).evaluate(tokens, reading).nats == want
    plain = txl.load(tmp_path / "a.safetensors").evaluate(tokens, reading).nats
    assert (plain != want) == (method != "sliding" or "clamp_len" in changes)


def test_invalid_settings(tmp_path: Path) -> None:
    words, path = ByteVocabulary(bytes(range(31))), tmp_path / "a.safetensors"
    lstm = RecurrentNetwork(RecurrentConfig(network="lstm", vocab_size=31, d_model=8, d_inner=16))
    for model, changes, message in (
        (lstm, {"zeros": True}, "zeros is for Transformers, not for a network of kind 'lstm'"),
        (lstm, {"clamp_len": 3}, "clamp_len is for Transformers"),
        (
            small_model(encoding="shaw", table_len=3),
            {"clamp_len": 3},
            "clamp_len is for encoding='relative', not 'shaw'",
        ),
        (small_model(), {"clamp_len": 0}, "clamp_len must be >= 1"),
    ):
        checkpoints.save(path, model, words, {}, {})
        with pytest.raises(TxlError, match=message):
            txl.load(path, **changes)


def test_sentences_counted_as_released() -> None:
    """Three streams take the next sentence when one ends, in segments of 4: 24 of 25 targets."""
    words = WordVocabulary(["<S>", *(f"w{n}" for n in range(30))])
    model = txl.LanguageModel(small_model().requires_grad_(False), words, 9, 4, Path("m"))
    sentences = [[1, 2, 0], [3, 0], [4, 5, 6, 7, 8, 0], [9, 0], [10, 11, 12, 13, 0], [14, 15, 0], [16, 0], [17, 0]]
    tokens = np.array([t for sentence in sentences for t in sentence], np.uint8)
    score = model.evaluate(tokens, Reading(9, segment=4), batch=3, counting="released")
    streams = [[1, 2, 0, 3, 0, 14, 15, 0], [4, 5, 6, 7, 8, 0, 16, 0], [9, 0, 10, 11, 12, 13, 0, 17]]
    want = [evaluate(model.model, np.array(stream, np.uint8), 0, Reading(9), batch=1).nats for stream in streams]
    assert score.tokens == 24
    assert score.nats == pytest.approx(sum(want) / 3, rel=1e-9)


def test_an_engine_is_used_again(loaded: txl.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next text of the same reading, but not by one that is read at the same time."""
    made: list[object] = []
    make = txl.language_model.make_reader
    monkeypatch.setattr(txl.language_model, "make_reader", lambda *x: made.append(make(*x)) or made[-1])
    fresh = dataclasses.replace(loaded)

    def text(model: txl.LanguageModel, prompt: str) -> list[bytes]:
        return list(model.stream(prompt, 40, seed=1))

    want = [text(dataclasses.replace(loaded), x) for x in ("0123 follows", "0987 follows")]
    del made[:]
    assert [text(fresh, x) for x in ("0123 follows", "0987 follows", "0123 follows")] == [*want, want[0]]
    assert len(made) == 1
    both = [fresh.stream(x, 40, seed=1) for x in ("0123 follows", "0987 follows")]
    assert list(zip(*both, strict=True)) == list(zip(*want, strict=True))
    assert len(made) == 2
    next(fresh.stream("0123 follows", 40))  # left in the middle
    assert text(fresh, "0987 follows") == want[1]
    assert len(made) == 2
    copied = pickle.loads(pickle.dumps(fresh))
    assert copied._kept == []
    assert text(copied, "0987 follows") == want[1]


def test_a_kept_engine_reads_the_present_parameters(loaded: txl.LanguageModel) -> None:
    model = copy.deepcopy(loaded)
    model.generate("0123 follows", 40, seed=1)
    for p in model.model.parameters():
        p.data.mul_(1.5)
    assert model.generate("0123 follows", 40, seed=1) == copy.deepcopy(model).generate("0123 follows", 40, seed=1)


def test_no_engine_of_another_dtype_is_used(loaded: txl.LanguageModel) -> None:
    model = copy.deepcopy(loaded)
    model.generate("0123 follows", 40, seed=1)
    model.model.double()
    assert model.generate("0123 follows", 40, seed=1) == copy.deepcopy(model).generate("0123 follows", 40, seed=1)
