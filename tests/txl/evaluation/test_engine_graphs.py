"""Steps of an engine in CUDA graphs: a static cache equals one that grows, and what a graph
replays equals what Python would have run (by a recorder; on a device: test_engine_device.py)."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from model_helpers import small_model
from recorder import recorded
from torch import Tensor

from txl import Engine, TransformerXL, graphs
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
# torch 2.6 does not tell whether hooks of saved tensors are active.
TELLS_HOOKS = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="torch 2.6"
)
CLOSE = {"rtol": 0, "atol": 1e-12}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Engines whose tensors a recorded graph may read."""
    known: list[Engine] = []

    def static() -> list[Tensor]:
        return [x for engine in known for x in tensors_of(engine)]

    monkeypatch.setattr(graphs, "WARM_UP", 4)  # steps
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
    for n in range(graphs.WARM_UP + 6):
        tokens, targets = torch.randint(31, (2, 6)), torch.randint(31, (2, 6))
        torch.testing.assert_close(replayed.nll(tokens, targets), eager.nll(tokens, targets), **CLOSE)
        torch.testing.assert_close(replayed.feed(tokens[:, :1]), eager.feed(tokens[:, :1]), **CLOSE)
        if n == graphs.WARM_UP + 3:
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
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.0")
        assert graphs.why_not(small_model()) == "torch is built for ROCm, where none has run yet"
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


def two_engines(engines: list[Engine], **options: object) -> tuple[Engine, Engine]:
    """Return an engine in graphs and an eager one, of one model."""
    model = small_model(**options)
    replayed, eager = Engine(model, 2, 9, 6), Engine(model, 2, 9, 6, graph=False)
    engines.append(replayed)
    return replayed, eager


def read_both(replayed: Engine, eager: Engine, steps: int, length: int = 6) -> None:
    """Read segments with both engines, and compare losses."""
    for _ in range(steps):
        tokens, targets = torch.randint(31, (2, length)), torch.randint(31, (2, length))
        torch.testing.assert_close(replayed.nll(tokens, targets), eager.nll(tokens, targets), **CLOSE)


def captured(engine: Engine) -> int:
    return len(engine._graphs._graphs)


def replace_module(engine: Engine) -> None:
    engine.model.layers[1].feed_forward = torch.nn.Identity()


def change_class(engine: Engine) -> None:
    engine.model.layers[1].feed_forward[1].__class__ = torch.nn.Tanh


def change_option(engine: Engine) -> None:
    engine.model.layers[1].attention_norm.eps = 1.0


def replace_parameters(engine: Engine) -> None:
    engine.model.load_state_dict({name: x + 1 for name, x in engine.model.state_dict().items()}, assign=True)


def replace_storage(engine: Engine) -> None:
    for p in engine.model.parameters():
        p.data = p.data * 0.9


def change_in_place(engine: Engine) -> None:
    with torch.no_grad():
        for p in engine.model.parameters():
            p.mul_(0.9)


def set_window(engine: Engine) -> None:
    for cache in engine.caches:
        cache.window = 4


@pytest.mark.parametrize(("change", "untie_r"), [
    (replace_module, False), (change_class, False), (change_option, False), (replace_parameters, False),
    (replace_parameters, True), (replace_storage, False), (change_in_place, False), (change_in_place, True),
    (set_window, False),
])  # fmt: skip
def test_what_changes_after_the_capture_acts(
    change: Callable[[Engine], None], untie_r: bool, engines: list[Engine]
) -> None:
    """In the middle of a text: old keys remain, and so do graphs where values alone have
    changed."""
    replayed, eager = two_engines(engines, untie_r=untie_r)
    read_both(replayed, eager, 8)
    assert captured(replayed) == 2
    change(replayed)
    if change is set_window:
        change(eager)
    read_both(replayed, eager, 1)
    assert captured(replayed) == (2 if change is change_in_place else 0)
    read_both(replayed, eager, 8)
    assert captured(replayed) == 2


def test_reset_computes_tables_of_parameters_that_no_version_tells_of(engines: list[Engine]) -> None:
    """Replayed updates, for example, change parameters without a version."""
    replayed, eager = two_engines(engines)
    read_both(replayed, eager, 8)
    for p in replayed.model.parameters():
        p.data.mul_(0.9)
    replayed.reset()
    read_both(replayed, Engine(replayed.model, 2, 9, 6, graph=False), 12)


def test_training_mode_is_seen(engines: list[Engine]) -> None:
    replayed, _ = two_engines(engines, attn_dropout=0.5)
    for _ in range(12):
        replayed(torch.randint(31, (2, 6)))
    replayed.model.train()
    with pytest.raises(RuntimeError, match="cache is for evaluation"):
        replayed(torch.randint(31, (2, 6)))


def test_a_replaced_forward_acts(engines: list[Engine]) -> None:
    replayed, eager = two_engines(engines)
    read_both(replayed, eager, 8)
    replayed.model.layers[1].feed_forward.forward = lambda x: 2 * x
    read_both(replayed, eager, 8)
    assert captured(replayed) == 0


def test_targets_of_another_shape_are_an_error(engines: list[Engine]) -> None:
    replayed, eager = two_engines(engines)
    read_both(replayed, eager, 8)
    for engine in (replayed, eager):
        with pytest.raises(ValueError, match="targets"):
            engine.nll(torch.randint(31, (2, 6)), torch.randint(31, (1, 6)))
        engine.reset()
    read_both(replayed, eager, 4)


def test_an_interrupted_replay_is_an_error_until_reset(engines: list[Engine]) -> None:
    replayed, eager = two_engines(engines)
    read_both(replayed, eager, 8)
    (graph,) = (x for (_, turn), x in replayed._graphs._graphs.items() if turn == replayed.caches[0].turn)
    replay, tokens = graph.replay, torch.randint(31, (2, 6))

    def interrupted() -> None:
        replay()
        raise KeyboardInterrupt

    graph.replay = interrupted
    with pytest.raises(KeyboardInterrupt):
        replayed.nll(tokens, tokens)
    graph.replay = replay
    for length in (6, 3):
        with pytest.raises(RuntimeError, match="cache is not whole"):
            replayed(tokens[:, :length])
    replayed.reset()
    eager.reset()
    read_both(replayed, eager, 4)


@contextlib.contextmanager
def failing(engine: Engine, length: int, layer: int) -> Iterator[None]:
    """A context in which segments of a length are interrupted in one layer's attention."""
    attention = engine.model.layers[layer].attention
    kind, forward = type(attention), type(attention).forward

    def interrupted(self: Any, x: Tensor, *others: Any, **options: Any) -> Tensor:
        if self is attention and x.size(1) == length:
            raise KeyboardInterrupt
        return forward(self, x, *others, **options)

    kind.forward = interrupted
    try:
        yield
    finally:
        kind.forward = forward


def test_reset_after_a_step_that_failed_in_its_second_layer(engines: list[Engine]) -> None:
    """The layers' buffers are in step again."""
    replayed, eager = two_engines(engines)
    read_both(replayed, eager, 13)
    with failing(replayed, 3, 1), pytest.raises(KeyboardInterrupt):
        replayed(torch.randint(31, (2, 3)))
    replayed.reset()
    eager.reset()
    for length in (6, 3, 6, 2, 6, 6, 1):
        read_both(replayed, eager, 1, length)


def test_a_prompt_that_failed_after_replays_is_an_error_until_reset(engines: list[Engine]) -> None:
    replayed, eager = two_engines(engines)
    for _ in range(12):
        tokens = torch.randint(31, (2, 6))
        torch.testing.assert_close(replayed.feed(tokens), eager.feed(tokens), **CLOSE)
    for engine in (replayed, eager):
        with failing(engine, 3, 0), pytest.raises(KeyboardInterrupt):
            engine.feed(torch.randint(31, (2, 15)))
        with pytest.raises(RuntimeError, match="cache is not whole"):
            engine.feed(torch.randint(31, (2, 15)))
        engine.reset()
    read_both(replayed, eager, 3)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("context", [
    Calls, deterministic, lambda: torch.autograd.set_detect_anomaly(True), lambda: torch.autocast("cpu"),
    pytest.param(lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), marks=TELLS_HOOKS),
], ids=["dispatch", "deterministic", "anomaly", "autocast", "saved tensors"])  # fmt: skip
def test_settings_that_are_taken_back_cost_no_graph(
    context: Callable[[], Any], engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within them Python runs the model."""
    calls, embed = [], TransformerXL.embed
    monkeypatch.setattr(TransformerXL, "embed", lambda self, x: calls.append(x.size(1)) or embed(self, x))
    replayed, eager = two_engines(engines)
    read_both(replayed, eager, 8)
    kept = dict(replayed._graphs._graphs)
    del calls[:]
    with context():
        for _ in range(3):
            tokens = torch.randint(31, (2, 6))
            replayed(tokens), eager(tokens)
    assert len(calls) == 6
    read_both(replayed, eager, 2)
    assert len(calls) == 8
    assert replayed._graphs._graphs == kept


def test_hooks_elsewhere_cost_no_graph(engines: list[Engine]) -> None:
    replayed, eager = two_engines(engines)
    other = torch.nn.Linear(2, 2)
    for _ in range(14):
        handle = other.register_forward_hook(lambda *_: None)
        read_both(replayed, eager, 1)
        handle.remove()
    assert captured(replayed) == 2
    assert replayed._graphs._steps._drops == 0


def test_after_a_failed_capture_steps_go_on(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replayed, eager = two_engines(engines)
    captures, capture = [], graphs.capture

    def fails(*arguments: Any) -> Any:
        captures.append(capture(*arguments))
        if len(captures) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return captures[-1]

    monkeypatch.setattr(graphs, "capture", fails)
    read_both(replayed, eager, 14)
    assert (len(captures), captured(replayed)) == (2, 0)
    assert [x.getMessage() for x in caplog.records] == [
        "evaluation goes on without CUDA graphs: a capture failed with OutOfMemoryError: CUDA out of memory"
    ]


def test_a_model_that_is_changed_again_and_again_stays_eager(
    engines: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    replayed, eager = two_engines(engines)
    for n in range(graphs.MAX_DROPS + 2):
        read_both(replayed, eager, 8)
        assert captured(replayed) == (2 if n <= graphs.MAX_DROPS else 0)
        replayed.model.layers[0].attention_norm.eps = float(n + 1)
    assert [x.getMessage() for x in caplog.records] == [
        "evaluation goes on without CUDA graphs: the model was changed too often"
    ]


def test_equal_values_are_no_change(engines: list[Engine]) -> None:
    replayed, eager = two_engines(engines)
    for n in range(12):
        replayed.model.layers[0].attention_norm.eps = float(f"{n}e-30") + 1e-5  # another object
        read_both(replayed, eager, 1)
    assert captured(replayed) == 2


def test_captures_of_two_threads_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch captures one graph at a time. Graphs of an engine share memory."""
    running, log, pools = threading.Semaphore(1), [], []

    @contextlib.contextmanager
    def graph(*_: Any, pool: Any, **__: Any) -> Iterator[None]:
        log.append(running.acquire(blocking=False))
        pools.append(pool)
        yield
        threading.Event().wait(0.02)
        running.release()

    @contextlib.contextmanager
    def context(x: Any) -> Iterator[None]:
        yield

    for name, value in {"CUDAGraph": mock.Mock, "graph": graph, "device": context, "stream": context}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    x = torch.ones(2)
    threads = [threading.Thread(target=graphs.capture, args=(torch.neg, (x,), x.device)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log == [True] * 4
    for pool in ([], []):  # of two engines
        with graphs.sharing_memory(pool):
            for _ in range(2):
                graphs.capture(torch.neg, (x,), x.device)
    assert pools[:4] == [None] * 4
    assert pools[4] is pools[5] is not pools[6] is pools[7]
