"""Transformer-XL language models on txl_kernels: model, data, training, evaluation, generation."""

from typing import TYPE_CHECKING, Any

from txl.evaluation.readers import Engine
from txl.model.config import ModelConfig
from txl.model.transformer import TransformerXL

if TYPE_CHECKING:
    from txl.language_model import LanguageModel, load

__all__ = ["Engine", "LanguageModel", "ModelConfig", "TransformerXL", "load"]


def __getattr__(name: str) -> Any:
    # Imported lazily: checkpoints and texts take a tenth of a second to import.
    if name in ("LanguageModel", "load"):
        from txl import language_model

        return getattr(language_model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
