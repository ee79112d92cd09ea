"""Steps of an engine in CUDA graphs: a static cache equals one that grows, and a replay equals the
steps that Python issues (by a recorder; on a device: test_engine_device.py)."""

import copy

import pytest
import torch
from model_helpers import small_model
from recorder import recorded
from torch import Tensor

from txl import Engine, graphs
from txl.errors import TxlError
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
    """A list of engines whose tensors a recorded graph may read."""
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
def test_static_cache_equals_one_that_grows(
    options: dict[str, object], batch: int, attn_len: int, engines: list[Engine]
) -> None:
    """While the cache fills, when it is full, and with segments longer than it."""
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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_replayed_steps_equal_eager_ones(options: dict[str, object], engines: list[Engine]) -> None:
    """Segments and single tokens in turns, as in evaluation and generation."""
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


def test_host_reads_are_refused() -> None:
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
def test_models_with_foreign_code_run_without_graphs(change: object, reason: str, engines: list[Engine]) -> None:
    model = small_model()
    change(model)
    assert reason in graphs.why_not(model)
    assert type(Engine(model, 1, 9, 4).caches[0]) is KeyValueCache
    with pytest.raises(TxlError, match="graph must be None or False"):
        Engine(model, 1, 9, 4, graph=True)


def test_hooks_registered_later_run(engines: list[Engine]) -> None:
    """At a step whose graph exists, and at one that would be captured, until they are removed."""
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


def test_global_hooks_run_without_graphs() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert graphs.why_not(small_model()) == "a hook acts on all modules"
    finally:
        handle.remove()


def test_several_bins_and_the_variable_disable_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "several bins" in graphs.why_not(small_model(cutoffs=(10, 20)))
    assert graphs.why_not(small_model()) is None
    monkeypatch.setenv("TXL_CUDA_GRAPHS", "off")
    assert graphs.why_not(small_model()) == "TXL_CUDA_GRAPHS=off"


def test_cpu_has_no_graphs() -> None:
    with pytest.raises(TxlError, match="not on a CUDA device"):
        Engine(small_model(), 1, 9, 4, graph=True)
    assert type(Engine(small_model(), 1, 9, 4).caches[0]) is KeyValueCache


def test_copy_of_an_engine(engines: list[Engine]) -> None:
    engine = Engine(small_model(), 1, 9, 4)
    tokens = torch.randint(31, (1, 4))
    engine(tokens)
    other = copy.deepcopy(engine)
    torch.testing.assert_close(other(tokens), engine(tokens), **CLOSE)
