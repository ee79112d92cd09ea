"""MPT, Pix2Struct's and UDOP's decoders token by token, with a cache, and what they leave to the
original."""

from typing import Any

import pytest
import torch
from layer_helpers import case_of, check
from torch import Tensor

from txl_kernels.integrations import accelerate

DECODERS = ("mpt", "pix2struct", "udop decoder")
REAL = torch.arange(9) >= torch.tensor([[0], [4]])


def cache_of(module: Any, static: bool) -> Any:
    import transformers

    if not static:
        return transformers.DynamicCache(config=module.config)
    return transformers.StaticCache(config=module.config, max_cache_len=14)


def decode(module: Any, static: bool = False) -> list[Tensor]:
    """Return the outputs of a prompt with padding on the left, of two more tokens, and of one."""
    cache = cache_of(module, static)
    x = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(3))
    real = torch.nn.functional.pad(REAL, (0, 3), value=True)
    found = []
    for first, last in ((0, 9), (9, 11), (11, 12)):
        out = module(inputs_embeds=x[:, first:last], attention_mask=real[:, :last].long(), cache=cache, use_cache=True)
        found.append(next(iter(out.values()))[real[:, first:last]])
    return found


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_decoding(name: str, static: bool) -> None:
    module = case_of(name, "none").module
    module.requires_grad_(False)
    check(module, lambda: decode(module, static), tolerance=2e-5)


def test_weights_of_mpt() -> None:
    """The original returns them in every call; here they are computed where they are used."""
    case = case_of("mpt")
    case.module.requires_grad_(False)
    real = torch.arange(45) < torch.tensor([[45], [36], [27]])

    def run() -> list[Tensor]:
        cache, found = cache_of(case.module, False), []
        for first, last in ((0, 40), (40, 45)):
            out = case.module(inputs_embeds=case.x[:, first:last], attention_mask=real[:, :last].long(), cache=cache,
                              output_attentions=True)  # fmt: skip
            found += [x.masked_fill(~real[:, None, first:last, None], 0) for x in out.attentions]
        return found

    report = check(case.module, run, {"attention weights asked for": 4}, tolerance=2e-5)
    case.call(case.module, case.x)
    assert report.fallbacks == {"attention weights asked for": 4}


def test_what_mpt_leaves_to_the_original() -> None:
    case = case_of("mpt", "none")
    attention, x = case.module.blocks[0].attn, case.x
    bias, mask = torch.randn(4, 1, 45), torch.ones(3, 4, 45, 45).triu(1) > 0

    def run() -> list[Tensor]:
        return [attention(x, b, attention_mask=m)[0].detach() for b, m in ((bias, None), (alibi, mask), (None, None))]

    alibi = case.module.build_mpt_alibi_tensor(4, 48)
    check(attention, run, {"biases that are not ALiBi's": 2, "a mask of another kind, or for each head": 1}, 1e-6)


def test_mask_with_columns_to_spare() -> None:
    """Pix2Struct's original cuts them off."""
    case = case_of("pix2struct", "none")
    mask = torch.ones(1, 1, 45, 50) > 0
    case.module.requires_grad_(False)

    def run() -> Tensor:
        return case.module(inputs_embeds=case.x, attention_mask=mask, cache=cache_of(case.module, False)).logits

    check(case.module, run, tolerance=2e-5)


@pytest.mark.filterwarnings("ignore:txl_kernels left")
def test_encoder_of_udop_is_left_alone() -> None:
    import transformers

    config = transformers.UdopConfig(
        vocab_size=12, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, max_2d_position_embeddings=8
    )
    report = accelerate(transformers.UdopForConditionalGeneration(config))
    reasons = [row.reason for row in report.rows]
    assert reasons.count(None) == 2
    assert reasons.count("cross-attention, which has no relative positions") == 2
    assert sum("biases of the boxes' places on the page" in str(reason) for reason in reasons) == 2
