"""Small T5 and its copies, encoder and decoder, with random weights and tokens."""

from typing import Any

import torch

TOKENS = torch.tensor([[5, 9, 3, 7, 2, 8, 4, 1], [6, 3, 9, 1, 0, 0, 0, 0]])
GIVEN = {"input_ids": TOKENS, "attention_mask": (TOKENS != 0).long()}
LABELS = torch.tensor([[4, 2, 7, 6, 1], [3, 3, 1, -100, -100]])
MORE: dict[str, dict[str, Any]] = {
    "LongT5": {"encoder_attention_type": "local", "local_radius": 2},
    "SwitchTransformers": {"num_decoder_layers": 3, "router_jitter_noise": 0.0, "num_experts": 2},
}


def model_of(name: str = "T5", implementation: str = "sdpa") -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=12, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=3, relative_attention_num_buckets=8,
        relative_attention_max_distance=12, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=11,
        attn_implementation=implementation, **MORE.get(name, {}),
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for key, p in model.named_parameters():
        if "relative_attention_bias" in key or "shared" in key:  # small: else a token follows itself
            torch.nn.init.normal_(p, 0, 0.02 if "shared" in key else 1.0)
    return model
