"""Transformer-XL language models on txl_kernels: model, data, training, evaluation, generation."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

_lacking = [name for name in ("numpy", "rich", "safetensors", "typer") if find_spec(name) is None]
missing = f'txl needs {", ".join(_lacking)}: pip install "txl-kernels[txl]"' if _lacking else None

if TYPE_CHECKING or missing is None:
    from txl.evaluation.readers import Engine
    from txl.language_model import LanguageModel, load
    from txl.model.config import ModelConfig
    from txl.model.transformer import TransformerXL
else:

    def __getattr__(name: str) -> NoReturn:
        raise ImportError(missing) if name in __all__ else AttributeError(f"module 'txl' has no attribute {name!r}")


__all__ = ["Engine", "LanguageModel", "ModelConfig", "TransformerXL", "load"]
