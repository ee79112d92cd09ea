"""Steps of an engine in CUDA graphs: a static cache equals one that grows, and what a graph
replays equals what Python would have run (by a recorder; on a device: test_engine_device.py)."""

import copy

import pytest
import torch
from model_helpers import small_model
from recorder import recorded
from torch import Tensor

from txl import Engine, graphs
from txl.errors import TxlError
from txl.evaluation.generate import Sampling, generate
from txl.model import adaptive
from txl_kernels import KeyValueCache, checks

OPTIONS = [
    {},
    {"pre_norm": True, "untie_r": True},
    {"clamp_len": 3},
    {"initial_memory": "zeros"},
    {"encoding": "shaw", "table_len": 5},
    {"encoding": "shaw-released", "table_len": 5},
]
CLOSE = {"rtol": 0, "atol": 1e-12}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Engines whose tensors a recorded graph may read."""
    known: list[Engine] = []

    def static() -> list[Tensor]:
        return [x for engine in known for x in tensors_of(engine)]

    monkeypatch.setattr(graphs, "is_capturable", lambda device: True)
    monkeypatch.setattr(graphs, "capture", recorded(static))
    # Values that a GPU's calls do not read.
    monkeypatch.setattr(checks, "check_bound_values", lambda call: None)
    monkeypatch.setattr(adaptive, "check_targets", lambda targets, vocab_size: None)
    return known


def tensors_of(engine: Engine) -> list[Tensor]:
    found = [*engine.model.parameters(), *engine.model.buffers(), engine.caches[0].start]
    for cache in engine.caches:
        found += [*cache.memory, cache.r]
    return [x for x in found if x is not None]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("batch", "attn_len"), [(1, 9), (3, 5), (2, 1)])
def test_a_static_cache_equals_one_that_grows(
    options: dict[str, object], batch: int, attn_len: int, engines: list[Engine]
) -> None:
    """While it fills, when it is full, and with segments longer than it."""
    model = small_model(**options)
    static, grows = Engine(model, batch, attn_len, 12), Engine(model, batch, attn_len, 12, graph=False)
    for _ in range(2):
        for length in (3, 1, 1, 12, 7, 1, 12, 12, 2):
            tokens = torch.randint(31, (batch, length))
            torch.testing.assert_close(static(tokens), grows(tokens), **CLOSE)
        static.reset()
        grows.reset()


def test_full_caches_give_the_same_bits(engines: list[Engine]) -> None:
    model = small_model(initial_memory="zeros").float()
    static, grows = Engine(model, 2, 9, 8), Engine(model, 2, 9, 8, graph=False)
    for length in (8, 8, 1, 5, 1, 8):
        tokens = torch.randint(31, (2, length))
        assert torch.equal(static(tokens), grows(tokens))


def test_rows_that_begin_anew_see_nothing_older(engines: list[Engine]) -> None:
    model = small_model()
    engine, alone = Engine(model, 3, 9, 4), Engine(model, 1, 9, 4, graph=False)
    for _ in range(4):
        engine(torch.randint(31, (3, 4)))
    for cache in engine.caches:
        cache.reset(torch.tensor([False, True, False]))
    for _ in range(3):
        tokens = torch.randint(31, (3, 4))
        torch.testing.assert_close(engine(tokens)[1:2], alone(tokens[1:2]), **CLOSE)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_replayed_steps_equal_eager_ones(options: dict[str, object], engines: list[Engine]) -> None:
    """Segments and single tokens in turns, as evaluation and generation read them."""
    model = small_model(**options)
    replayed, eager = Engine(model, 2, 9, 6), Engine(model, 2, 9, 6, graph=False)
    engines.append(replayed)
    for n in range(graphs.WARM_UP + 8):
        tokens, targets = torch.randint(31, (2, 6)), torch.randint(31, (2, 6))
        torch.testing.assert_close(replayed.nll(tokens, targets), eager.nll(tokens, targets), **CLOSE)
        torch.testing.assert_close(replayed.feed(tokens[:, :1]), eager.feed(tokens[:, :1]), **CLOSE)
        if n == graphs.WARM_UP + 5:
            replayed.reset()
            eager.reset()
    assert len(replayed._graphs._graphs) == 2  # each kind meets one buffer here: two steps a round
    for _ in range(3):  # the other buffer
        tokens = torch.randint(31, (2, 1))
        torch.testing.assert_close(replayed.feed(tokens), eager.feed(tokens), **CLOSE)
    assert len(replayed._graphs._graphs) == 3


def test_generated_texts_are_the_same(engines: list[Engine]) -> None:
    model = small_model()
    found = []
    for graph in (True, False):
        engine = Engine(model, 1, 9, 4, graph=graph)
        engines.append(engine)
        drawn = generate(engine, torch.ones(1, 7, dtype=torch.long), 40, Sampling(), torch.Generator().manual_seed(1))
        found.append(torch.cat(list(drawn)).tolist())
    assert found[0] == found[1]


def test_a_growing_cache_cannot_be_replayed(engines: list[Engine]) -> None:
    """The recorder notices what a graph would do: the places of a KeyValueCache are of the
    host."""
    model = small_model()
    replayed, eager = Engine(model, 1, 9, 4, graph=False), Engine(model, 1, 9, 4, graph=False)
    for engine in (replayed, eager):
        for _ in range(5):
            engine(torch.ones(1, 4, dtype=torch.long))
    static = torch.ones(1, 4, dtype=torch.long)
    caches = [x for cache in replayed.caches for x in (cache._keys, cache._values, cache.r)]
    capture = recorded(lambda: [*model.parameters(), *caches])
    with torch.inference_mode():
        result, replay = capture(replayed._logits, (static,), model.device)
    for _ in range(3):
        tokens = torch.randint(31, (1, 4))
        static.copy_(tokens)
        replay()
        want = eager(tokens)
    assert not torch.allclose(result, want, rtol=1e-3)


def test_a_value_read_on_the_host_is_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="_local_scalar_dense reads a value on the host"):
        recorded(list)(lambda x: x + float(x.sum()), (x,), x.device)
    with pytest.raises(RuntimeError, match="from outside"):
        recorded(list)(lambda y: y + x, (torch.ones(3),), x.device)


def test_replaced_parameters_are_an_error(engines: list[Engine]) -> None:
    model = small_model()
    engine = Engine(model, 1, 9, 4)
    engines.append(engine)
    tokens = torch.ones(1, 4, dtype=torch.long)
    for _ in range(graphs.WARM_UP + 1):
        engine(tokens)
    model.load_state_dict(model.state_dict() | {"softmax.bias": model.softmax.bias + 1}, assign=True)
    with pytest.raises(TxlError, match="make a new Engine"):
        engine(tokens)


@pytest.mark.parametrize(("change", "reason"), [
    (lambda model: model.layers[0].register_forward_hook(lambda *_: None), "blocks.0 has hooks"),
    (lambda model: model.layers[0].register_full_backward_hook(lambda *_: None), "blocks.0 has hooks"),
    (lambda model: model.softmax.bias.register_hook(lambda grad: grad), "a parameter has hooks"),
    (lambda model: setattr(model.layers[0].attention.out, "forward", torch.nn.Linear.forward), "another forward"),
    (lambda model: setattr(model.layers[0].feed_forward, "0", type("Lora", (torch.nn.Linear,), {})(16, 32)), "Lora"),
    (lambda model: model.softmax.half(), "several devices, dtypes"),
])  # fmt: skip
def test_models_with_code_of_others_run_without(change: object, reason: str, engines: list[Engine]) -> None:
    model = small_model()
    change(model)
    assert reason in graphs.why_not(model)
    assert type(Engine(model, 1, 9, 4).caches[0]) is KeyValueCache
    with pytest.raises(TxlError, match="graph must be None or False"):
        Engine(model, 1, 9, 4, graph=True)


def test_hooks_that_are_registered_later_act(engines: list[Engine]) -> None:
    """At a step whose graph exists already, and at one that would be captured; until removed."""
    model = small_model()
    engine, eager = Engine(model, 1, 9, 4), Engine(model, 1, 9, 4, graph=False)
    engines.append(engine)
    tokens = torch.randint(31, (1, 4))
    calls: list[object] = []
    for n in range(16):
        if n in (4, 12):
            hook = model.layers[1].feed_forward.register_forward_hook(lambda m, given, out: calls.append(m) or 2 * out)
        if n in (6, 14):
            hook.remove()
        torch.testing.assert_close(engine(tokens), eager(tokens), **CLOSE)
    assert len(calls) == 2 * 4


def test_a_hook_of_all_modules_is_seen() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert graphs.why_not(small_model()) == "a hook acts on all modules"
    finally:
        handle.remove()


def test_several_bins_and_the_variable_turn_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "several bins" in graphs.why_not(small_model(cutoffs=(10, 20)))
    assert graphs.why_not(small_model()) is None
    monkeypatch.setenv("TXL_CUDA_GRAPHS", "off")
    assert graphs.why_not(small_model()) == "TXL_CUDA_GRAPHS=off"


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(TxlError, match="not on a CUDA device"):
        Engine(small_model(), 1, 9, 4, graph=True)
    assert type(Engine(small_model(), 1, 9, 4).caches[0]) is KeyValueCache


def test_an_engine_is_copied(engines: list[Engine]) -> None:
    engine = Engine(small_model(), 1, 9, 4)
    tokens = torch.randint(31, (1, 4))
    engine(tokens)
    other = copy.deepcopy(engine)
    torch.testing.assert_close(other(tokens), engine(tokens), **CLOSE)
