"""Transformer-XL language models on txl_kernels: model, data, training, evaluation, generation."""

from txl.config import ModelConfig
from txl.engine import Engine
from txl.model import TransformerXL

__all__ = ["Engine", "ModelConfig", "TransformerXL"]
