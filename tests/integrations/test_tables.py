"""T5's buckets and ALiBi's slopes against transformers' own."""

import pytest
import torch

from txl_kernels import alibi_slopes, t5_buckets


@pytest.mark.parametrize("buckets", [32, 20])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("max_distance", [128, 40])
def test_t5(buckets: int, bidirectional: bool, max_distance: int) -> None:
    """The bias of queries and keys, and the gradient of its table."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=16, num_heads=4, d_kv=4, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance, is_decoder=not bidirectional,
    )  # fmt: skip
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    L = 300
    at = torch.arange(L)
    want = theirs.compute_bias(L, L)[0]  # [H, L, L]
    table = theirs.relative_attention_bias.weight
    bias = t5_buckets(table, torch.arange(1 - L, L), bidirectional=bidirectional, max_distance=max_distance)
    got = bias[:, at[:, None] - at[None, :] + L - 1]
    assert torch.equal(got, want)
    weight = torch.randn(want.shape)
    gradients = [torch.autograd.grad((x * weight).sum(), table)[0] for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16, 20])
def test_alibi(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    want = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # [H, 1, 2]: slope times position
    torch.testing.assert_close(alibi_slopes(heads), want[:, 0, 1], rtol=1e-6, atol=0)
