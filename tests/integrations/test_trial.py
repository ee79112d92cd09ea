"""Trials of classes whose source is unknown, as another release's: right ones are taken, wrong ones
never, and nothing else changes."""

import copy
import dataclasses
import pickle
import random
import re
import threading
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layer_helpers import EACH_ADAPTER, both, case_of, check, compare
from releases import FAULTS, release, released
from torch import nn
from torch.nn.utils import parametrize

from implementations import bare_peers
from implementations.peer_cases import PeerCase, Sizes
from txl_kernels.integrations import accelerate, registry, restore, trial
from txl_kernels.integrations.registry import find, path_of

pytestmark = pytest.mark.usefixtures("unknown")

NOT_TRIED = {
    "nemo transformer": "its code depends on a dtype or a device: q.is_cuda",
    "longt5 local": "there is no trial for LongT5Local",
    "umt5": "there is no trial for UMT5",
    "mpt": "there is no trial for MPT",
    "speecht5": "there is no trial for SpeechT5",
    "speechbrain beats": "there is no trial for SpeechBrainBEATs",
    "zipformer": "its code draws random numbers",
}
UNKNOWN = "an argument that its trial did not have, or had in another form"
FAMILIES = (*(name for name in EACH_ADAPTER if name not in NOT_TRIED), "wavlm", "xlnet")


@pytest.fixture
def unknown(registered: None) -> None:
    """Makes the source of every class unknown."""
    for path, peer in registry._peers.items():
        registry._peers[path] = dataclasses.replace(peer, hashes={"another": "0" * 16})


def small(name: str, **options: Any) -> PeerCase:
    return case_of(name, sizes=Sizes(64 if name == "nemo transformer" else 32, 4, 45, 2), **options)


def tried_class(case: PeerCase, encoder: bool = False) -> type:
    """Return the class of a case's first attention that has an adapter; that of MPNet's encoder, if
    so."""
    kinds = [type(m) for m in case.module.modules() if find(path_of(type(m))) is not None]
    return kinds[1 if kinds[0].__name__ == "MPNetEncoder" and not encoder else 0]


@pytest.mark.parametrize("name", FAMILIES)
def test_same_formula_is_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another argument that the adapter does not know, the original answers; XLNet's other
    method is called by its own code alone."""
    case = small(name, **({"weights": True} if name == "speechbrain" else {}))
    changed = {"extra": "gain=None", "after": "out = out if gain is None else out * gain"}
    other = release(tried_class(case, True), tmp_path, monkeypatch, **changed, around=tried_class(case))
    case.module = released(case.module, other)
    original = copy.deepcopy(case.module)
    report = check(case.module, lambda: both(case), weights="none")
    assert all(", tried out as " in row.done for row in report.accelerated)
    if name == "xlnet":
        return
    for module in (*case.module.modules(), *original.modules()):
        if isinstance(module, other):
            module.register_forward_pre_hook(lambda m, args, kwargs: (args, kwargs | {"gain": 0.5}), with_kwargs=True)
    compare(both(case), both(case, original))
    assert f"{UNKNOWN}: gain" in report.fallbacks


@pytest.mark.parametrize("name", NOT_TRIED)
def test_trial_that_cannot_decide(name: str) -> None:
    case = small(name)
    with pytest.warns(UserWarning, match=f"source unknown .*; .*{NOT_TRIED[name]}"):
        assert not accelerate(case.module).accelerated


OFF = "(is|are) off by"
# Faults that need no knowledge of the source: statements before and after a method, and the reason
# why its class is refused. Axis A is that of queries. Those that trials find alike in all families
# are planted in a few.
SHOWING = ("nemo", "parakeet", "t5", "xlnet")
GENERIC: dict[str, tuple[str, str, str]] = {
    "length": ("", "out = out * (1.1 if x.size(A) > 300 else 1.0)", rf"with \d+ frames: the output {OFF}"),
    "great length": ("", "out = out * (1.1 if x.size(A) > 5000 else 1.0)", "may compare lengths with 5000"),
    "dtype": ("", "out = out * (1.1 if x.dtype == torch.bfloat16 else 1.0)", "depends on a dtype or a device: x.dtype"),
    "device": ("", "out = out * (1.1 if x.device.type == 'cuda' else 1.0)", "depends on a dtype or a device: x.device"),
    "training": ("", "out = out * (1.1 if self.training else 1.0)", f"in training mode.*: the output {OFF}"),
    "dropout": ("", "out = torch.nn.functional.dropout(out, self.out_dropout, self.training)", "applies dropout to"),
    "dropout 0": ("", "out = torch.nn.functional.dropout(out, self.no_dropout, self.training)", "applies dropout to"),
    "detached": ("x = x.detach()", "", f"the gradient of its input {OFF}"),
}  # fmt: skip
GRADIENT = f"the gradient of .* {OFF}"
# Parts of the result, beside the first, whose gradients other layers or calls need.
RESULTS = {"t5": 1, "wavlm": 2, "cosyvoice": 1}
# Arguments whose gradients another layer, or the model, needs.
ARGUMENTS = {"t5": "position_bias", "mpnet": "position_bias", "wavlm": "position_bias", "ding": "u", "xlnet": "k_head_r",
             "cosyvoice": "cache", "espnet": "pos_emb"}  # fmt: skip


def faults_of(name: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the changes of a family's source, as arguments of `release`, and the reasons why each
    is refused."""
    axis = "0" if name in ("ding", "xlnet") else "1"
    found: dict[str, Any] = {label: ({"changes": [change]}, OFF) for label, change in FAULTS[name].items()}
    for label, (before, after, why) in GENERIC.items():
        if name not in SHOWING and label not in ("length", "training", "detached"):
            continue
        found[label] = {"before": before, "after": after.replace("A)", f"{axis})")}, why
    if name in RESULTS:
        n = RESULTS[name]
        found[f"detached result {n}"] = (
            {"after": f"result = (*result[:{n}], result[{n}].detach(), *result[{n + 1} :])"},
            GRADIENT,
        )
    if name in ARGUMENTS:
        it = ARGUMENTS[name]
        found[f"detached {it}"] = {"before": f"{it} = None if {it} is None else {it}.detach()"}, GRADIENT
    if name == "mpnet's encoder":
        del found["detached"]  # its result does not depend on the values of x
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_another_formula_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(name.removesuffix("'s encoder"))
    kind = tried_class(case, name.endswith("encoder"))
    wrong = {}
    for label, (change, why) in faults_of(name).items():
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = release(kind, tmp_path, patch, **change)
            module = released(case.module, other)
            chosen = [n for n, m in module.named_modules() if type(m) is other]
            chosen = chosen[1 if "position_bias" in label and len(chosen) > 1 else 0]
            attention: Any = module.get_submodule(chosen)
            attention.out_dropout, attention.no_dropout = 0.2, 0.0
            selection: Any = {"include": chosen} if chosen else {"exclude": "layer"} if "mpnet" in name else {}
            report = accelerate(module, weights="none", **selection)
        done = next(row.done for row in report.rows if row.name == chosen)
        if not re.search(why, done):
            wrong[label] = done
    assert not wrong, "\n".join(f"@@@ {name}: {a}: {b}" for a, b in wrong.items())


# Faults that one family shows as well as all: changes of its source, and the reason.
DTYPE = "depends on a dtype or a device"
SUBTLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "one frame": ("nemo", {"after": "out = out * (1.1 if x.size(1) == 1 else 1.0)"}, "with a length of 1: "),
    "several rows": ("nemo", {"after": "out = out * (1.1 if x.size(0) > 2 else 1.0)"}, OFF),
    "one row": ("nemo", {"after": "out = out * (1.1 if x.size(0) == 1 else 1.0)"}, OFF),
    "even length": ("nemo", {"after": "out = out * (1.1 if x.size(1) % 2 == 0 else 1.0)"}, OFF),
    "no padding": ("nemo", {"after": "out = out * (1.1 if mask is not None and not mask.any() else 1.0)"}, OFF),
    "left padding": ("espnet", {"after": "out = out * (1.0 if mask is None or mask[-1, 0, 0] else 1.1)"}, OFF),
    "mask of all queries": ("espnet", {"after": "out = out * (1.0 if mask is None or mask.size(1) > 1 else 1.1)"}, OFF),
    "capped scores": ("espnet", {"changes": [("scores = (matrix_ac + matrix_bd)",
                      "scores = torch.clamp(matrix_ac + matrix_bd, -50, 50)")]}, f"with large values: the output {OFF}"),
    "dropout of another mode": ("nemo", {"changes": [("self.dropout(attn)",
                                "F.dropout(attn, self.dropout.p, self.training)")]}, "dropout modules alone.*its dropout"),
    "no gradients": ("nemo", {"after": "out = out * (1.0 if torch.is_grad_enabled() else 1.1)"}, OFF),
    "inference": ("nemo", {"after": "out = out * (1.1 if torch.is_inference_mode_enabled() else 1.0)"}, DTYPE),
    "environment": ("nemo", {"before": "import os", "after": "out = out * float(os.environ.get('GAIN', 1))"}, DTYPE),
    "dtype of another name": ("nemo", {"before": "kind = x.dtype", "after": "out = out * (kind not in ())"}, DTYPE),
    "dtype looked up": ("nemo", {"after": "out = out * {torch.half: 1.1}.get(x.dtype, 1.0)"}, DTYPE),
    "size of elements": ("nemo", {"after": "out = out * (1.1 if x.element_size() == 2 else 1.0)"}, DTYPE),
    "name of the type": ("nemo", {"after": "out = out * (1.1 if x.type() == 'torch.HalfTensor' else 1.0)"}, DTYPE),
    "logarithm": ("nemo", {"after": "out = out * (1.1 if math.log(x.size(1)) > 8 else 1.0)"}, "may compare lengths with"),
    "count of calls": ("nemo", {"after": "self.calls = getattr(self, 'calls', 0) + 1"}, "it keeps calls from a call"),
    "sum of calls": ("nemo", {"after": "self.total = out.detach().sum()"}, "it keeps total from a call"),
}  # fmt: skip


@pytest.mark.parametrize("label", SUBTLE)
def test_subtle_fault_is_refused(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change, why = SUBTLE[label]
    case = small(name)
    module = released(case.module, release(tried_class(case), tmp_path, monkeypatch, **change))
    with pytest.warns(UserWarning, match=f"source unknown .*; .*{why}"):
        assert not accelerate(module).accelerated


def test_buffers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a checkpoint may be others than at first, and a layer's others than the last's."""
    case = small("nemo")
    other = release(tried_class(case), tmp_path, monkeypatch, after="out = out * self.gain")
    for persistent, taken in ((True, [False, False]), (False, [True, False])):
        model = nn.ModuleList(released(case.module, other) for _ in range(2))
        for n, layer in enumerate(model):
            layer.register_buffer("gain", torch.ones(()) + n, persistent=persistent)
        with pytest.warns(UserWarning, match=OFF):
            report = accelerate(model)
        assert [row.reason is None for row in report.rows] == taken


# What a trial must leave as it was.


def state(module: nn.Module) -> Any:
    """Return everything that a module holds, and the generators' states, to be compared."""
    held = [
        (name, sorted((k, repr(v)) for k, v in vars(part).items() if k[0] != "_" or k.endswith("hooks")),
         vars(getattr(part, "config", None) or nn.Identity()).__repr__())
        for name, part in module.named_modules()
    ]  # fmt: skip
    tensors = [
        (n, x.numpy(force=True).tobytes(), x.requires_grad, x._version, x.grad)
        for n, x in module.state_dict(keep_vars=True).items()
    ]
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return held, tensors, torch.get_rng_state().tolist(), random.getstate(), (kind, keys.tolist(), *rest)


@pytest.mark.parametrize("name", ["parakeet", "fireredasr", "t5"])
def test_nothing_else_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(name, dropout=0.1)
    case.module.train()
    called = []
    for part in case.module.modules():
        part.register_forward_hook(lambda *_: called.append("forward"))
        part.register_forward_pre_hook(lambda *_: called.append("pre"))
        part.register_full_backward_hook(lambda *_: called.append("backward"))
        part.register_state_dict_pre_hook(lambda *_: called.append("state_dict"))
        part.register_load_state_dict_post_hook(lambda *_: called.append("load_state_dict"))
    next(case.module.parameters()).requires_grad_(False)
    seen = []

    def look() -> None:
        default = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
        seen.append(
            (*default, torch.is_autocast_enabled("cuda"), torch.nn.functional.dropout(torch.ones(8), 1.0).sum().item())
        )

    run = trial.run

    def watched(*args: Any) -> Any:
        result = run(*args)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return result

    monkeypatch.setattr(trial, "run", watched)
    before, threads = state(case.module), torch.get_num_threads()
    called.clear()
    result = [row.done for row in accelerate(case.module, weights="none", strict=True).rows]
    assert not called
    restore(case.module)
    called.clear()
    assert state(case.module) == before
    assert all(", tried out as " in done for done in result)
    assert set(seen) == {(torch.float32, torch.device("cpu"), True, False, 0.0)}
    assert torch.get_num_threads() == threads


def meta(module: nn.Module) -> None:
    module.to("meta")


def parametrized(module: nn.Module) -> None:
    parametrize.register_parametrization(module.linear_q, "weight", nn.Identity())


def int8(module: nn.Module) -> None:
    module.linear_q.weight = nn.Parameter(module.linear_q.weight.data.to(torch.int8), requires_grad=False)


def quantized(module: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(module, Int8WeightOnlyConfig())


def inference(module: nn.Module) -> None:
    with torch.inference_mode():
        module.linear_q.weight = nn.Parameter(module.linear_q.weight.clone(), requires_grad=False)


def offloaded(module: nn.Module) -> None:
    from accelerate import cpu_offload

    cpu_offload(module, execution_device=torch.device("cpu"))


def held(module: nn.Module) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(module.linear_q, ModelHook())


def replaced(module: nn.Module) -> None:
    module.forward_qkv = lambda *args: type(module).forward_qkv(module, *args)


UNTRIED: dict[Any, str] = {
    meta: "a trial needs parameters, which are on the meta device",
    parametrized: "a trial does not copy parametrized modules",
    int8: "a trial does not copy parameters of torch.int8",
    quantized: "a trial does not copy tensors of the class ",
    inference: "a trial does not copy inference tensors",
    offloaded: "a trial does not copy modules whose forward is wrapped",
    held: "a trial does not copy modules whose forward is wrapped",
    replaced: "its forward_qkv was replaced on the instance",
}


@pytest.mark.parametrize("change", UNTRIED, ids=lambda f: f.__name__)
def test_module_that_is_not_tried(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = small("nemo").module
    change(module)
    monkeypatch.setattr(trial, "_tried", None)
    with pytest.warns(UserWarning, match=f"source unknown .*; {UNTRIED[change]}"):
        assert not accelerate(module).accelerated


def count_trials(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return a list to which each trial's module is added from now on; none is known yet."""
    tried, run = [], trial._tried
    monkeypatch.setattr(trial, "_verdicts", weakref.WeakKeyDictionary())
    monkeypatch.setattr(trial, "_tried", lambda module, *args: tried.append(module) or run(module, *args))
    return tried


def test_equal_layers_share_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, first = count_trials(monkeypatch), small("nemo").module
    model = nn.ModuleList(copy.deepcopy(first) for _ in range(24))
    for layer in model:
        nn.init.normal_(layer.linear_q.weight)
    assert len(accelerate(model, strict=True).accelerated) == 24
    assert tried == [model[0]]
    first.s_d_k *= 1.1
    with pytest.warns(UserWarning, match=OFF):
        assert not accelerate(first).accelerated
    assert tried == [model[0], first]


def test_layers_with_other_attributes_have_trials_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's first layer has a table, and the others share its biases."""
    tried, case = count_trials(monkeypatch), small("t5")
    assert len(accelerate(case.module, strict=True).accelerated) == 3
    assert [module.has_relative_attention_bias for module in tried] == [True, False]


def first_of(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def test_calls_of_other_kinds_run_the_original() -> None:
    x, table, keys = torch.randn(2, 20, 32), torch.randn(1, 39, 32), torch.randn(2, 20, 32)
    hidden = torch.zeros(2, 20, 20, dtype=torch.bool)
    hidden[1, :, 15:] = True
    shown, both_rows = ~hidden.unsqueeze(1), table.expand(2, -1, -1)
    calls: dict[str, list[tuple[str, Any, Any]]] = {
        "nemo": [
            ("", (x, x, x, hidden, table), {}),
            ("key", (x, keys, keys, hidden, table), {}),
            ("cache", (x, x, x, None, torch.randn(1, 51, 32), torch.randn(2, 6, 32)), {}),
        ],
        "parakeet": [
            ("", (x, both_rows), {"attention_mask": shown}),
            ("attention_mask", (x, both_rows), {"attention_mask": shown.long()}),
            ("attention_mask", (x, both_rows), {"attention_mask": shown[1, 0]}),
            ("anything", (x, both_rows), {"anything": 1}),
        ],
    }
    for name, arguments in calls.items():
        module: Any = small(name).module
        module.cache_drop_size = 0
        original = copy.deepcopy(module)
        accelerate(module, strict=True)
        for unknown, args, kwargs in arguments:
            module.fallbacks.clear()
            with torch.no_grad():
                compare(first_of(module(*args, **kwargs)), first_of(original(*args, **kwargs)))
            assert module.fallbacks == ({f"{UNKNOWN}: {unknown}": 1} if unknown else {})


def test_another_attention_implementation_than_the_trials() -> None:
    case = small("parakeet", masks="none")
    want = both(case)
    report = accelerate(case.module, strict=True)
    case.module.config._attn_implementation = "eager"
    compare(both(case), want)
    assert report.fallbacks == {"another attention implementation than in its trial": 1}


def test_weights_that_callers_cannot_ask_for() -> None:
    """A caller may want the weights that an attention returns in every call."""
    m = bare_peers.transformers("wav2vec2_conformer")
    config = m.Wav2Vec2ConformerConfig(hidden_size=32, num_attention_heads=4, position_embeddings_type="relative")
    config._attn_implementation = "eager"

    class Earlier(m.Wav2Vec2ConformerSelfAttention):  # type: ignore[misc,name-defined]
        def forward(
            self, hidden_states: Any, attention_mask: Any = None, relative_position_embeddings: Any = None
        ) -> Any:
            return super().forward(hidden_states, attention_mask, relative_position_embeddings)

    module = m.Wav2Vec2ConformerSelfAttention(config).eval()
    assert accelerate(copy.deepcopy(module), strict=True)
    module.__class__ = Earlier  # of this module: no model of transformers has it
    with pytest.warns(UserWarning, match="callers cannot say whether they want them"):
        assert not accelerate(module, verify=True).accelerated


def test_module_without_a_part_that_the_adapter_reads() -> None:
    """Inkling 2's layers of 5.23 have no table of their own, for example."""
    module = small("nemo").module
    del module.dropout
    with pytest.warns(UserWarning, match=r"it is not like nemo\..*dropout"):
        assert not accelerate(module).accelerated


def test_attributes_that_refer_to_each_other() -> None:
    module = small("nemo").module
    module.shared = types.SimpleNamespace()
    module.shared.itself = module.shared
    with pytest.warns(UserWarning, match=r"it cannot be tried: RecursionError"):
        assert not accelerate(module).accelerated


def test_copies_and_compiled_calls_of_a_tried_class() -> None:
    case = small("nemo")
    with torch.no_grad():
        want = case.call(case.module, case.x)
        report = accelerate(case.module, strict=True)
        compiled = torch.compile(lambda x: case.call(case.module, x), fullgraph=True, backend="aot_eager")
        copies = (copy.deepcopy(case.module), pickle.loads(pickle.dumps(case.module)))
        for out in (compiled(case.x), *(case.call(module, case.x) for module in copies)):
            torch.testing.assert_close(out[case.valid], want[case.valid], atol=2e-6, rtol=1e-5)
    assert not any(module.fallbacks for module in (case.module, *copies))
    assert ", tried out as " in report.accelerated[0].done
