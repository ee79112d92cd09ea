"""LearnedRelativeAttention with the weights of transformers' Inkling against Inkling's attention
without its short convolutions."""

from typing import Any

import pytest
import torch

from txl_kernels import LearnedRelativeAttention

B, L, WIDTH, HEADS, KV_HEADS, D, EXTENT, WINDOW = 2, 23, 32, 4, 2, 8, 6, 9


def inkling(kind: str) -> Any:
    """Return Inkling's attention in float64 without short convolutions and log scaling."""
    from transformers.models.inkling import modeling_inkling

    config = modeling_inkling.InklingTextConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=D, swa_head_dim=D,
        swa_num_attention_heads=HEADS, swa_num_key_value_heads=KV_HEADS, d_rel=5, rel_extent=EXTENT,
        sliding_window_size=WINDOW, num_hidden_layers=1, layer_types=[kind], log_scaling_n_floor=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    theirs = modeling_inkling.InklingAttention(config, 0).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    for convolution in (theirs.k_sconv, theirs.v_sconv):
        convolution.forward = lambda x, **options: x
    return theirs


@pytest.mark.parametrize("kind", ["hybrid", "hybrid_sliding"])
def test_equals_inklings_attention(kind: str) -> None:
    theirs, sliding = inkling(kind), kind == "hybrid_sliding"
    ours = LearnedRelativeAttention(
        WIDTH, HEADS, D, n_kv_head=KV_HEADS, extent=WINDOW if sliding else EXTENT, position_width=5, qk_norm=True,
        scale=1 / D, window=WINDOW if sliding else None, dtype=torch.float64,
    ).eval()  # fmt: skip
    ours.q_norm.eps = ours.k_norm.eps = theirs.q_norm.variance_epsilon
    rows = [theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]
    same = {
        "p.weight": theirs.r_proj.weight, "out.weight": theirs.o_proj.weight, "q_norm.weight": theirs.q_norm.weight,
        "k_norm.weight": theirs.k_norm.weight,
    }  # fmt: skip
    table = theirs.rel_logits_proj.proj
    ours.load_state_dict({**same, "qkv.weight": torch.cat(rows), "table": table.T})
    x, weight = torch.randn(2, B, L, WIDTH, dtype=torch.float64)
    x.requires_grad_()
    distance = torch.arange(L)[:, None] - torch.arange(L)
    seen = (distance >= 0) & (distance < (WINDOW if sliding else L))
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    found = ours(x)
    torch.testing.assert_close(found, theirs(x, mask[None, None])[0], rtol=1e-5, atol=1e-5)  # its norms are in float32
    theirs.q_norm.forward, theirs.k_norm.forward = ours.q_norm.forward, ours.k_norm.forward  # in float64
    want = theirs(x, mask[None, None])[0]
    torch.testing.assert_close(found, want)
    leaves = [name for name in same if "norm" not in name]  # both sides have the same norms now
    inputs = [x, ours.qkv.weight, ours.table, *(ours.get_parameter(name) for name in leaves)]
    gradients = torch.autograd.grad((found * weight).sum(), inputs)
    dx, dq, dk, dv, dtable, *others = torch.autograd.grad(
        (want * weight).sum(), [x, *rows, table, *(same[name] for name in leaves)]
    )
    torch.testing.assert_close(list(gradients), [dx, torch.cat([dq, dk, dv]), dtable.T, *others])
