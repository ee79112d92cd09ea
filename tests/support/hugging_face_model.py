"""Hugging Face's TransfoXL with random weights."""

import warnings
from typing import Any

import torch

PLAIN = {
    "cutoffs": [], "d_embed": 24, "div_val": 1, "clamp_len": -1, "same_length": False, "untie_r": False, "pre_lnorm": False,
    "dropout": 0.0, "dropatt": 0.0, "adaptive": True, "tie_word_embeddings": True, "proj_share_all_but_first": True,
}  # fmt: skip
SIZES = {"vocab_size": 50, "n_layer": 3, "d_model": 24, "n_head": 3, "d_head": 8, "d_inner": 40, "mem_len": 10}


def transfo_xl(**options: Any) -> torch.nn.Module:
    """Return a model in evaluation mode, without bins unless `options` of its configuration add
    them."""
    import transformers

    torch.manual_seed(0)
    config = transformers.TransfoXLConfig(**SIZES | PLAIN | options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: torch.nn.Module = transformers.TransfoXLLMHeadModel(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3)
    model.tie_weights()
    return model
