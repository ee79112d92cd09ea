"""Small models of Inkling, Inkling 2 and its loop variant, with tokens and masks."""

from typing import Any

import torch
from torch import Tensor

from implementations.peer_cases import PeerCase

NAMES = ("Inkling", "Inkling2", "Inkling2Loop")
L, WINDOW = 19, 6
TOKENS = torch.randint(1, 40, (2, L), generator=torch.Generator().manual_seed(1))
LEFT, RIGHT, HOLES = (torch.ones(2, L, dtype=torch.long) for _ in range(3))
LEFT[1, :7] = RIGHT[1, -7:] = HOLES[1, 5:8] = 0
PACKED = torch.tensor([[*range(5), *range(9), *range(5)], [*range(2), *range(17)]])


def model_of(name: str, implementation: str = "eager", **more: Any) -> Any:
    """Return a small causal language model, whose log scaling begins within its sequences."""
    import transformers

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": 40, "unpadded_vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 2, "swa_head_dim": 4, "d_rel": 5, "rel_extent": 7, "sliding_window_size": WINDOW,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2, "log_scaling_n_floor": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "attn_implementation": implementation,
        "pad_token_id": 0, "eos_token_id": None, "initializer_range": 0.3,
    }  # fmt: skip
    if name == "Inkling":
        options |= {"n_shared_experts": 1, "intermediate_size": 24, "mlp_layer_types": ["dense", "sparse"] * 2}
    else:
        options |= {"n_layers_per_attn_res_block": 2}
    if name == "Inkling2Loop":
        options |= {
            "num_hidden_layers": 6, "layer_types": ["hybrid_sliding", "hybrid"] * 3, "loop_layer_index_start": 2,
            "loop_layer_index_end": 4, "loop_num_passes": 2, "loop_gate_rank": 5,
        }  # fmt: skip
    config = getattr(transformers, f"{name}TextConfig")(**(options | more))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for p in model.parameters():  # those of the residuals' attention, for example, are zeros
        if p.device.type != "meta" and not p.any():
            torch.nn.init.normal_(p, 0, 0.3)
    return model


def case_of(name: str) -> PeerCase:
    """Return a model, called with embeddings and padding on the left."""
    model = model_of(name)
    x = model.get_input_embeddings()(TOKENS).detach()
    given = {"attention_mask": LEFT, "use_cache": False}
    return PeerCase(model, lambda f, x: f(inputs_embeds=x, **given).logits, x, LEFT.bool())


def causal_mask(additive: bool = True, hole: bool = False, ahead: int = 0) -> Tensor:
    """Return a mask [2, 1, L, L] with a window of 9 keys, for all layers."""
    at = torch.arange(L)
    seen = (at <= at[:, None] + ahead) & (at > at[:, None] - 9)
    if hole:
        seen = seen & ((at != 5) | (at[:, None] == 5))
    seen = seen.expand(2, 1, L, L)
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min) if additive else seen


GIVEN: dict[str, dict[str, Any]] = {
    "whole": {},
    "left padding": {"attention_mask": LEFT},
    "right padding": {"attention_mask": RIGHT},
    "packed rows": {"position_ids": PACKED, "use_cache": False},
    "one packed row": {"position_ids": PACKED[:1], "use_cache": False},
    "additive mask": {"attention_mask": causal_mask()},
    "keys ahead": {"attention_mask": causal_mask(ahead=3)},
}


def valid(given: dict[str, Any]) -> Tensor:
    mask = given.get("attention_mask")
    return mask.bool() if mask is not None and mask.dim() == 2 else torch.ones(2, L, dtype=torch.bool)


def logits_and_gradients(model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """Return the logits of tokens that are not padding, and the gradients of all parameters."""
    logits = model(TOKENS, **given).logits[valid(given)]
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    named = dict(model.named_parameters())
    found = torch.autograd.grad((logits * weight.to(logits)).sum(), list(named.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(named, found, strict=True) if g is not None}
    assert any(name.endswith(("rel_logits_proj.proj", "relative_position_bias.proj")) for name in gradients)
    return {"logits": logits.detach(), **gradients}


def logits(model: Any, **given: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(TOKENS, **given).logits[valid(given)]
    return result
