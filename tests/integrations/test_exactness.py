"""The error of each accelerated layer against its original in float64 is at most twice the error of
the original in float32."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from layer_helpers import both, case_of, in_float64
from torch import Tensor

from txl_kernels.integrations import accelerate, restore

# FlexAttention's, on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
MASKS = ("none", "right", "left", "chunks", "chunks padded", "limited")
ALL_MASKS = ("wav2vec2-conformer", "w2v-bert relative_key", "parakeet", "nemotron", "nemo", "espnet", "espnet legacy",
             "cosyvoice", "fireredasr", "nemo transformer", "xlnet", "t5")  # fmt: skip
# Layers with the adapter of one above.
SHARING = ("w2v-bert relative", "seamless", "seamless v2", "espnet zero_triu", "funasr", "funasr legacy")
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, masks, {}) for name in ALL_MASKS for masks in MASKS),
    *((name, masks, {}) for name in SHARING for masks in ("right", "limited")),
    *(("zipformer", masks, {}) for masks in MASKS),
    *((name, m, {}) for name in ("zipenhancer", "modelscope zipenhancer") for m in MASKS[:3]),
    *((name, masks, {}) for name in ("espnet transducer", "funasr chunk", "speechbrain") for masks in MASKS
      if masks != "chunks padded"),
    *((name, m, {"held": 20}) for name in ("espnet transducer", "funasr chunk", "cosyvoice") for m in MASKS[:2]),
    *((name, m, {"held": n, "simplified": True}) for name in ("espnet transducer", "funasr chunk")
      for m in ("none", "right", "chunks") for n in (0, 20) if (m, n) != ("chunks", 20)),
    *(("nemo local", m, {"context": c}) for m in MASKS[:2] for c in ((9, 9), (9, 4), (3, 8), (64, 64))),
    ("nemo transformer", "right", {"norm": True}),
    *((name, "none", {"context": n}) for name in ("granite", "granite plus") for n in (10, 9, 64)),
    *(("granite 5", m, {"context": n}) for m in MASKS[:3] for n in (10, 45, 64)),
    *((name, m, {"implementation": way}) for name in ("t5 decoder", "mt5") for m in MASKS[:3] for way in ("sdpa", "eager")),
    ("t5", "left", {"implementation": "eager"}),
    *(("umt5", masks, {}) for masks in MASKS),
    *((name, m, {}) for name in ("umt5 decoder", "switch", "switch decoder", "pop2piano", "longt5 decoder", "longt5 local",
                                 "wavlm", "espnet beats", "speechbrain beats") for m in MASKS[:3]),
    *(("wavlm", m, {"norm_first": True}) for m in MASKS[:2]),
    *(("mpnet", masks, {}) for masks in MASKS),
    *(("gemma", m, {"right": n}) for m in MASKS[:3] for n in (0, 3)),
    ("gemma", "right", {"left": 1}),
    *(("gemma 4", m, {"right": n}) for m in (*MASKS[:3], "limited") for n in (0, 1)),
    ("gemma 4", "right", {"left": 3, "right": 3}),
    *(("enformer", "none", {"values": n}) for n in (24, 9)),
    ("enformer", "none", {"positions": 0.2}),
    *(("fastspeech2", masks, {}) for masks in MASKS[:3]),
    *((name, "none", {}) for name in ("ding", "rllib")),
    *((name, "right", {"additive": True}) for name in ("wav2vec2-conformer", "w2v-bert relative_key", "seamless v2")),
    ("parakeet", "right", {"groups": 2}),
    ("parakeet", "right", {"positions": 0.3}),
    ("nemo", "right", {"sdpa": True}),
    ("nemo", "limited", {"sdpa": True}),
    ("speechbrain", "right", {"vbias": True}),
    *(("xlnet", m, {"segments": n, "memory": memory}) for m in ("none", "left") for n in (0, 3) for memory in (0, 20)),
    ("xlnet", "none", {"positions": 0.3, "segments": 2}),
    ("xlnet", "left", {"all_rows": True, "memory": 20}),
    ("xlnet", "left", {"all_rows": True, "segments": 3}),
]  # fmt: skip
IDS = [" ".join([name, masks, *(f"{k}={v}" for k, v in more.items())]) for name, masks, more in CASES]


# Layers whose keys hardly differ when they are initialized, so that the dS of a query, which sum to
# 0, nearly cancel in dq. The kernels subtract dout . out from each dP: its rounding, the same for
# all keys, does not cancel, as eager's does.
NEARLY_EQUAL_KEYS = ("mpnet", "wavlm", "espnet beats", "speechbrain beats")


def error(got: Tensor, exact: Tensor, scale: float) -> float:
    return float((got - exact).abs().max()) / scale


@pytest.mark.parametrize(("name", "masks", "more"), CASES, ids=IDS)
def test_error_in_float32(name: str, masks: str, more: dict[str, Any]) -> None:
    case = case_of(name, masks, **more)
    with in_float64(name):
        exact = both(case, copy.deepcopy(case.module).double(), torch.float64)
    with in_float64(name) if name == "nemo transformer" else contextlib.nullcontext():
        own = both(case)
    report = accelerate(case.module, strict=True, weights="none" if name == "fireredasr" else "fallback")
    ours = both(case)
    assert not report.fallbacks, str(report)
    assert own.keys() == exact.keys() == ours.keys()
    largest = max(float(x.abs().max()) for x in exact.values())
    for key, truth in exact.items():
        scale = float(truth.abs().max())
        if scale < 1e-9 * largest:  # 0 but for rounding: the gradient of a bias of keys
            scale = largest
        if name in NEARLY_EQUAL_KEYS:  # a gradient that is small because its terms cancel
            scale = max(scale, largest / 100)
        allowed = (8 if name in NEARLY_EQUAL_KEYS else 2) * error(own[key], truth, scale) + 2e-6
        assert error(ours[key], truth, scale) <= allowed, key


WITHOUT_DROPOUT = ("fireredasr", "nemo transformer", "gemma")  # of attention weights
DROPPING = (*(name for name in ALL_MASKS if name not in WITHOUT_DROPOUT), "fastspeech2", "espnet transducer", "funasr chunk",
            "speechbrain", "ding", "nemo local", "enformer", "t5 decoder", "umt5", "longt5 local", "mpnet",
            "wavlm", "speechbrain beats")  # fmt: skip


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_in_training(name: str) -> None:
    """Dropout drops other entries than the original: the mean over seeds is the output without
    dropout."""
    case = case_of(name, "none", dropout=0.3)
    run = torch.no_grad()(lambda: case.call(case.module, case.x))
    accelerate(case.module, strict=True)
    kept = run()
    case.module.train()
    drawn = torch.stack([run() for _ in range(100)])
    torch.manual_seed(1)
    first = run()
    torch.manual_seed(1)
    assert torch.equal(first, run())
    restore(case.module)
    theirs = torch.stack([run() for _ in range(100)])
    if name != "xlnet":  # it normalizes after it dropped
        noise = drawn.std(0) / 100**0.5
        assert float(((drawn.mean(0) - kept).abs() / (noise + 1e-4)).mean()) < 1.5
    ratio = drawn.std(0).mean() / theirs.std(0).mean()
    assert 0.9 < float(ratio) < 1.1


@pytest.mark.parametrize("name", ["wav2vec2-conformer", "nemo", "espnet", "zipformer"])
def test_bfloat16(name: str) -> None:
    case = case_of(name)
    exact = both(case, copy.deepcopy(case.module).double(), torch.float64)["out"]
    half = copy.deepcopy(case.module).bfloat16()
    own = both(case, half, torch.bfloat16)["out"]
    accelerate(half, strict=True)
    ours = both(case, half, torch.bfloat16)["out"]
    assert float((ours - exact).norm()) <= 1.2 * float((own - exact).norm())


@pytest.mark.parametrize("name", ["parakeet", "nemo", "zipformer"])
def test_autocast(name: str) -> None:
    case = case_of(name)
    exact = both(case, copy.deepcopy(case.module).double(), torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        own = both(case)
        report = accelerate(case.module, strict=True)
        ours = both(case)
    assert not report.fallbacks
    for key, truth in exact.items():
        if truth.norm() > 1e-9:  # the gradient of a bias of keys is 0 but for rounding
            allowed = 1.2 if key == "out" else 2
            assert float((ours[key] - truth).norm()) <= allowed * float((own[key] - truth).norm()), key
