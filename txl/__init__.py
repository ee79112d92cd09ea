"""Transformer-XL language models on txl_kernels: model, data, training, evaluation, generation."""

from txl.evaluation.readers import Engine
from txl.language_model import LanguageModel, load
from txl.model.config import ModelConfig
from txl.model.transformer import TransformerXL

__all__ = ["Engine", "LanguageModel", "ModelConfig", "TransformerXL", "load"]
