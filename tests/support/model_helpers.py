"""Small models for the tests of `txl`."""

import torch

from txl import ModelConfig, TransformerXL


def small_config(**options: object) -> ModelConfig:
    sizes = {"vocab_size": 31, "n_layer": 2, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "mem_len": 8}
    return ModelConfig(**(sizes | {"dropout": 0.0} | options))


def small_model(**options: object) -> TransformerXL:
    torch.manual_seed(0)
    model = TransformerXL(small_config(**options)).double().eval()
    for p in model.parameters():  # far from the tiny initial values, so that attention matters
        torch.nn.init.normal_(p, 0.0, 0.3)
    return model
