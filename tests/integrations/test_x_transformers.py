"""x-transformers whole: outputs, gradients, generation, and what is left to the original."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_helpers import check, compare
from torch import Tensor

from implementations import bare_peers
from txl_kernels.integrations import accelerate

PADDED = torch.arange(20) < torch.tensor([20, 13, 8]).unsqueeze(1)
X = torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(0))
INKLING = {"attn_use_rel_proj_pos_bias": True, "attn_rel_proj_max_dist": 9, "attn_rel_proj_num_distance_basis": 4}
T5 = {"rel_pos_bias": True, "rel_pos_num_buckets": 8, "rel_pos_max_distance": 12}
POSITIONS: dict[str, dict[str, Any]] = {
    "T5": T5,
    "ALiBi": {"alibi_pos_bias": True},
    "ALiBi of some heads, flash": {"alibi_pos_bias": True, "alibi_num_heads": 3, "attn_flash": True},
    "ALiBi, one head of keys": {"alibi_pos_bias": True, "attn_one_kv_head": True},
    "Inkling": INKLING,
    "Inkling, grouped, sink, softcap": INKLING
    | {
        "attn_kv_heads": 2,
        "attn_head_learned_sink": True,
        "attn_softclamp_logits": True,
        "attn_logit_softclamp_value": 2.0,
    },
    "T5, grouped, norms, gates, limited": T5
    | {"attn_kv_heads": 2, "attn_qk_norm": True, "attn_gate_values": True, "attn_max_attend_past": 5},
}


def model_of(causal: bool = False, cross: bool = False, depth: int = 2, **options: Any) -> Any:
    m = bare_peers.x_transformers()
    torch.manual_seed(0)
    kind = m.Decoder if causal else m.Encoder
    model = kind(dim=32, depth=depth, heads=4, attn_dim_head=8, verbose=False, cross_attend=cross, **options).eval()
    for name, p in model.named_parameters():
        if p.dim() == 1 or any(x in name for x in ("bank", "bias", "to_q", "to_k", "to_out")):
            torch.nn.init.normal_(p, 0, 0.3)
    return model


def results(model: Any, x: Tensor = X, **given: Any) -> dict[str, Tensor]:
    """Return the output and all gradients of a fixed functional of it."""
    x = x.clone().requires_grad_()
    out = model(x, **given)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    named = {"x": x, **dict(model.named_parameters())}
    found = torch.autograd.grad((out * weight).sum(), list(named.values()), allow_unused=True)
    return {"out": out.detach(), **{n: g for n, g in zip(named, found, strict=True) if g is not None}}


@pytest.mark.parametrize(("causal", "padded"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("name", POSITIONS)
def test_outputs_and_gradients(name: str, causal: bool, padded: bool) -> None:
    given = {"mask": PADDED} if padded else {}
    model = model_of(causal, **POSITIONS[name])
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if hasattr(module, "attn_fn"):  # else its softmax is in float32
            module.attn_fn = functools.partial(F.softmax, dim=-1)
    truth, own = results(exact, X.double(), **given), results(model, **given)
    report = accelerate(model, strict=True)
    assert len(report.accelerated) == (4 if "Inkling" in name else 3)
    ours = results(model, **given)
    assert not report.fallbacks
    assert ours.keys() == own.keys()
    for key, want in truth.items():
        allowed = 2 * float((own[key] - want).abs().max()) + 1e-5 * float(want.abs().max())
        assert float((ours[key] - want).abs().max()) <= allowed, key


@pytest.mark.parametrize("log", [False, True])
def test_network_of_distances(log: bool) -> None:
    """Its original does not run in float64."""
    model = model_of(dynamic_pos_bias=True, dynamic_pos_bias_log_distance=log, dynamic_pos_bias_norm=True)
    model.rel_pos.mlp[-1].bias = None  # else its gradient is 0
    check(model, lambda: results(model, mask=PADDED))


@pytest.mark.parametrize("name", ["T5", "ALiBi of some heads, flash", "Inkling"])
def test_generation_and_memory(name: str) -> None:
    """Token by token with a cache, from prompts padded on the left, and with memory of a segment
    before."""
    m = bare_peers.x_transformers()
    layers = model_of(True, **POSITIONS[name])
    model = m.TransformerWrapper(num_tokens=30, max_seq_len=64, max_mem_len=8, attn_layers=layers).eval()
    prompt = torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(2))
    starts = torch.tensor([0, 3])

    def run() -> list[Tensor]:
        logits, cache = model(prompt, return_intermediates=True, seq_start_pos=starts)
        steps = [logits[:, -1]]
        tokens = prompt
        for _ in range(4):
            tokens = torch.cat([tokens, steps[-1].argmax(-1, keepdim=True)], 1)
            logits, cache = model(tokens, cache=cache, return_intermediates=True, seq_start_pos=starts)
            steps.append(logits[:, -1])
        _, mems = model(prompt, return_mems=True)
        return [*steps, model(prompt.flip(1), mems=mems)]

    with torch.no_grad():
        check(model, run, tolerance=2e-5)


@pytest.mark.parametrize("name", ["T5", "Inkling, grouped, sink, softcap"])
def test_weights_are_computed_where_they_are_read(name: str) -> None:
    m = bare_peers.x_transformers()
    model = m.TransformerWrapper(num_tokens=30, max_seq_len=64, attn_layers=model_of(True, **POSITIONS[name])).eval()
    tokens = torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(2))

    def run() -> list[Tensor]:
        _, weights = model(tokens, return_attn=True)
        _, inner = model(tokens, return_attn_z_loss=True, return_intermediates=True)
        return [x.detach() for x in (*weights, inner.attn_z_loss)]

    counts = {"attention weights asked for": 4, "biases of all pairs are needed": 4}
    report = check(model, run, counts, tolerance=2e-5)
    model(tokens)
    assert report.fallbacks == counts
    accelerate(model, weights="none")
    assert model(tokens, return_attn=True)[1] == [None, None]


HOLES = PADDED & (torch.arange(20) != 4)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "holes": (T5, {"mask": HOLES}, "a mask with holes"),
    "heads": (T5, {"attn_mask": torch.ones(4, 20, 20).tril() > 0}, "a mask for each head"),
    "positions": ({"alibi_pos_bias": True}, {"pos": torch.arange(0, 40, 2)}, "biases of all pairs"),
    "both": (INKLING | T5, {}, "biases of all pairs"),
    "keys of a memory": (T5 | {"attn_num_mem_kv": 2}, {}, "biases of all pairs"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_the_original_answers(name: str) -> None:
    options, given, reason = CALLS[name]
    model = model_of(**options)
    want = results(model, **given)
    report = accelerate(model, strict=True)
    compare(results(model, **given), want, 1e-5)
    assert report.fallbacks.pop(reason) == 2
    assert set(report.fallbacks) <= {reason, "biases of all pairs are needed"}


@pytest.mark.parametrize("part", ["rel_pos", "layers.0.1.attend"])
def test_part_of_a_stack(part: str) -> None:
    """An object in place of biases is a tensor of them wherever it is not read by our code."""
    model = model_of(True, **T5)
    want = results(model, mask=PADDED)
    accelerate(model, include=part)
    compare(results(model, mask=PADDED), want, 1e-5)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "talking heads": ({"attn_pre_talking_heads": True}, "its option pre_softmax_talking_heads"),
    "scaled by scores": ({"attn_pre_scale_post_talking_heads": True}, "its option pre_scale_post_talking_heads"),
    "sigmoid": ({"attn_sigmoid": True}, "its weights are not those of a softmax"),
    "top k": ({"attn_sparse_topk": 3}, "its weights are not those of a softmax"),
    "hard": ({"attn_hard": True}, "its weights are not those of a softmax"),
    "gumbel": ({"attn_gumbel_softmax": True}, "its weights are not those of a softmax"),
    "own": ({"attn_custom_attn_fn": torch.tanh}, "its weights are not those of a softmax"),
    "l2": ({"attn_l2_distance": True}, "its option l2_distance"),
    "zero key": ({"attn_add_zero_kv": True}, "its option add_zero_kv"),
    "signed": ({"attn_cog_signed": True}, "its option cog_signed"),
    "selective": ({"attn_selective": True}, "its option selective"),
    "CoPE": ({"attn_use_cope": True}, "its option cope"),
    "residual": ({"residual_attn": True}, "the next layer adds its scores (residual_attn)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.filterwarnings("ignore:txl_kernels left")
def test_options_that_are_refused(name: str) -> None:
    options, reason = OPTIONS[name]
    model = model_of(True, **T5, **options)
    torch.manual_seed(1)
    want = model(X)
    report = accelerate(model)
    assert {row.reason for row in report.left_alone} == {reason}
    torch.manual_seed(1)
    assert torch.equal(model(X), want)


@pytest.mark.filterwarnings("ignore:txl_kernels left")
def test_unknown_option_is_refused() -> None:
    model = model_of(**T5)
    for attend in (model.layers[0][1].attend, model.layers[2][1].attend):
        attend.temperature = 0.7
    assert {row.reason for row in accelerate(model).left_alone} == {"its option temperature"}


def test_no_relative_positions() -> None:
    """Cross-attention, and stacks without relative positions."""
    reasons = [row.reason for row in accelerate(model_of(True, cross=True, **T5), strict=True).rows]
    assert sorted(map(str, reasons)) == ["None"] * 3 + ["cross-attention, which has no relative positions"] * 2
    with pytest.raises(ValueError, match="no relative positions"):
        accelerate(model_of(rotary_pos_emb=True), strict=True)


def test_compiled_without_graph_breaks() -> None:
    model = model_of(True, depth=1, only_attn=True, **T5)
    want = model(X, mask=PADDED)
    accelerate(model, strict=True)
    got = torch.compile(model, backend="eager", fullgraph=True)(X, mask=PADDED)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flash", [False, True])
def test_dropout(flash: bool) -> None:
    """Weights are dropped in training alone, and the mean over draws is the output without."""
    model = model_of(alibi_pos_bias=True, attn_flash=flash, attn_dropout=0.2)
    attention = model.layers[0][1]
    report = accelerate(model, strict=True)
    model.requires_grad_(False)
    want = attention(X, rel_pos=model.rel_pos)
    model.train()
    found = torch.stack([attention(X, rel_pos=model.rel_pos) for _ in range(60)])
    assert not torch.allclose(found[0], found[1])
    error = (found.mean(0) - want).abs() / (found.std(0) / 60**0.5 + 1e-6)
    assert float(error.mean()) < 1.5
    attention.attend.dropout, attention.attend.attn_dropout.p = 1.0, 1.0
    attention(X, rel_pos=model.rel_pos)
    assert report.fallbacks["everything is dropped"] == 1
