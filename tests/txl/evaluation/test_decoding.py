"""Recorded steps of generation are those of the engine: on a CPU, by replaying their operators. How
torch is asked for CUDA graphs; on a device: test_decoding_device.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import small_model
from replay import WAITING, Log, Replays

from txl import Engine, LanguageModel, TransformerXL
from txl.errors import TxlError
from txl.evaluation import decoding
from txl.evaluation.decoding import CudaGraphs, DecodingEngine, can_be_captured, generation_engine
from txl.evaluation.generate import Sampling, generate
from txl.text.vocabulary import ByteVocabulary

ATTN_LEN, LAP, PROMPT = 9, 4, 3
CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # a key more or less is a hundred times that
BINS: dict[str, Any] = {"cutoffs": (10, 20)}
MODELS: list[dict[str, Any]] = [
    {},
    {"untie_r": True, "pre_norm": True, "final_norm": True},
    {"clamp_len": 3},
    {"initial_memory": "zeros"},
    {"encoding": "shaw", "table_len": 5},
    {"encoding": "shaw-released", "table_len": 5},
    BINS,
    BINS | {"div_val": 2},
]


def model(**options: Any) -> TransformerXL:
    """In float32, of which the kernels take calls."""
    return small_model(**options).float()


def engines(batch: int, attn_len: int = ATTN_LEN, **options: Any) -> tuple[Engine, DecodingEngine, Replays]:
    """The engine, one that records its steps, and what records them."""
    network, recorder = model(**options), Replays()
    recording = DecodingEngine(network, batch, attn_len, 6, recorder=recorder, lap=LAP)
    return Engine(network, batch, attn_len, 6), recording, recorder


def assert_same(recording: Engine, engine: Engine, tokens: torch.Tensor) -> None:
    """Of each call's logits. tokens: [calls, B, L]."""
    for part in tokens:
        torch.testing.assert_close(recording.feed(part), engine.feed(part), **CLOSE)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_equals_the_engine_over_laps(options: dict[str, Any], batch: int) -> None:
    """From a cache that is hardly filled to one that is full for laps; then a segment, steps again,
    and another text."""
    engine, recording, recorder = engines(batch, **options)
    for _ in range(2):
        assert_same(recording, engine, torch.randint(31, (1, batch, PROMPT)))
        assert_same(recording, engine, torch.randint(31, (8 * LAP, batch, 1)))
        assert_same(recording, engine, torch.randint(31, (1, batch, 5)))
        assert_same(recording, engine, torch.randint(31, (2 * LAP + 1, batch, 1)))
        recording.reset()
        engine.reset()
    assert recorder.prepared <= 2 * LAP
    assert len(recorder.logs) <= 2 * LAP
    assert recorder.replayed > 14 * LAP


@pytest.mark.parametrize("attn_len", [1, 2, 100])
def test_attention_lengths(attn_len: int) -> None:
    """Of no memory, of one state, and of more than the text has."""
    engine, recording, recorder = engines(2, attn_len)
    assert_same(recording, engine, torch.randint(31, (40, 2, 1)))
    assert recorder.replayed >= 40 - 4 * LAP


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.9, top_k=8), Sampling(1.0, top_p=0.9)], ids=str)
@pytest.mark.parametrize("options", [{}, BINS | {"div_val": 2}], ids=str)
def test_generates_the_same_tokens(options: dict[str, Any], sampling: Sampling) -> None:
    texts = []
    *both, recorder = engines(3, **options)
    for engine in both:
        prompt = torch.arange(12).view(3, 4)
        texts.append(torch.stack(list(generate(engine, prompt, 60, sampling, torch.Generator().manual_seed(1)))))
    assert torch.equal(*texts)
    assert recorder.replayed > 30


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_a_place_is_the_same_calls_each_time(options: dict[str, Any]) -> None:
    """On the same addresses, with the same numbers; none waits for a device or depends on
    values."""
    _, recording, recorder = engines(2, **options)
    visits = []
    for _ in range(2):
        recording._repeats = dict.fromkeys(recording._repeats)  # to be recorded again
        recorder.logs.clear()
        recording.reset()
        for token in torch.randint(31, (6 * LAP, 2, 1)):
            recording.feed(token)
        visits.append([log.description() for log in recorder.logs])
        for log in recorder.logs:
            assert not [name for name in log.names if name in WAITING]
            assert "rel_attention" in log.names
    first, second = visits
    assert first[-LAP:] == second[-LAP:]
    assert len({str(x) for x in first}) == len(first)  # each place has its own


def test_a_step_of_the_engine_itself_cannot_be_replayed() -> None:
    """Its cache moves on in Python: this proof would see it."""
    engine, other, _ = engines(1)
    tokens = torch.randint(31, (ATTN_LEN + 2, 1, 1))
    assert_same(other, engine, tokens[:-2])
    static = tokens[-2].clone()
    with torch.inference_mode(), Log() as log:
        out = engine.feed(static)
    torch.testing.assert_close(out, other.feed(static), **CLOSE)
    static.copy_(tokens[-1])
    with torch.inference_mode():
        log.replay()
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(out, other.feed(static), **CLOSE)


def test_what_steps_do_not_take_is_the_engine() -> None:
    """A row that was reset by itself; autocast; a batch of another size, which it refuses."""
    engine, recording, recorder = engines(2)
    rows = torch.tensor([True, False])
    assert_same(recording, engine, torch.randint(31, (5, 2, 1)))
    before = recorder.prepared
    for one in (engine, recording):
        for cache in one.caches:
            cache.reset(rows)
    assert_same(recording, engine, torch.randint(31, (ATTN_LEN - 1, 2, 1)))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(recording, engine, torch.randint(31, (2, 2, 1)))
    with pytest.raises(ValueError, match=r"x must have the cache's batch 2, got shape \[1, 1, 16\]"):
        recording.feed(torch.zeros(1, 1, dtype=torch.long))
    assert recorder.prepared == before
    assert_same(recording, engine, torch.randint(31, (5, 2, 1)))
    assert recorder.prepared > before


def test_logits_are_the_callers() -> None:
    _, recording, _ = engines(1)
    for token in torch.randint(31, (6 * LAP, 1, 1)):
        logits = recording.feed(token)
        before = logits.clone()
        recording.feed(token)
        assert torch.equal(logits, before)


def test_any_bin_embeds_as_its_own() -> None:
    for options in ({}, BINS, BINS | {"div_val": 2}, BINS | {"div_val": 4, "d_embed": 16}):
        embedding, tokens = model(**options).embedding, torch.arange(31).view(1, -1)
        torch.testing.assert_close(embedding.of_any_bin(tokens), embedding(tokens))


def test_where_graphs_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    network = model()
    assert not can_be_captured(network)
    assert type(generation_engine(network, 1, 9, 6)) is Engine
    monkeypatch.setattr(TransformerXL, "device", torch.device("cuda"))
    for name in ("triton", "cuda", "reference"):  # which reads `start` on the host
        monkeypatch.setattr(decoding, "choose_unasked", lambda *_, name=name, **kind: name)
        assert can_be_captured(network) == (name != "reference")
    network.layers[0].attention.backend = "triton"
    assert not can_be_captured(network)
    network.layers[1].attention.backend = "triton"
    assert can_be_captured(network)
    assert not can_be_captured(model(encoding="sinusoid"))
    monkeypatch.setenv("TXL_CUDA_GRAPHS", "0")
    monkeypatch.setattr(Engine, "__init__", lambda *_: None)
    assert type(generation_engine(network, 1, 9, 6)) is Engine


def test_a_language_model_generates_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Replays()
    letters = ByteVocabulary(b"\n abcdefghijklmnopqrstuvwxyz.,;")
    language_model = LanguageModel(model(), letters, attn_len=ATTN_LEN, segment=6, path=Path())
    want = language_model.generate("abc", 50, seed=1)
    monkeypatch.setattr(
        "txl.language_model.generation_engine", lambda *sizes: DecodingEngine(*sizes, recorder=recorder, lap=LAP)
    )
    assert language_model.generate("abc", 50, seed=1) == want
    assert recorder.replayed


Asked = list[tuple[Any, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What is asked of a torch.cuda that does nothing else."""
    calls: Asked = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            calls.append((self.name, "waits for", other.name))

    class Graph:
        def capture_begin(self, pool: str, capture_error_mode: str) -> None:
            calls.append(("begin", pool, capture_error_mode))

        def capture_end(self) -> None:
            calls.append(("end",))

        def replay(self) -> None:
            calls.append(("replay",))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        calls.append(("on", stream.name))
        yield
        calls.append(("off", stream.name))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    return calls


def test_a_step_is_prepared_and_captured_on_one_stream(asked: Asked) -> None:
    graphs = CudaGraphs(torch.device("cuda"))
    graphs.prepare(lambda: asked.append(("step",)))
    run = [("side", "waits for", "main"), ("on", "side"), ("step",), ("off", "side"), ("main", "waits for", "side")]
    assert asked == run
    asked.clear()
    for _ in range(2):  # in one pool
        repeat = graphs.record(lambda: asked.append(("step",)))
        assert asked == [("on", "side"), ("begin", "pool", "thread_local"), ("step",), ("end",), ("off", "side")]
        asked.clear()
    repeat()
    assert asked == [("replay",)]


def test_a_failed_capture_ends_and_says_what_to_do(asked: Asked) -> None:
    graphs = CudaGraphs(torch.device("cuda"))

    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(TxlError, match=r"could not be captured .* out of memory; TXL_CUDA_GRAPHS=0 generates without"):
        graphs.record(step)
    assert ("end",) in asked
