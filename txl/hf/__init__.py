"""TransfoXL for today's transformers: `pip install ".[hf]"`, then `import txl.hf`.

Importing it registers configuration, models and tokenizer with the Auto classes.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError("txl.hf needs transformers >= 5: pip install '.[hf]' in this package's source tree") from error

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"txl.hf needs transformers >= 5, which has no TransfoXL of its own; this is {transformers.__version__}"
    )

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from txl.hf.configuration import TransfoXLConfig
from txl.hf.modeling import (
    TransfoXLCache,
    TransfoXLLMHeadModel,
    TransfoXLLMHeadModelOutput,
    TransfoXLModel,
    TransfoXLModelOutput,
)
from txl.hf.tokenization import TransfoXLTokenizer
from txl.hf.weights import TransfoXLPreTrainedModel

__all__ = [
    "TransfoXLCache",
    "TransfoXLConfig",
    "TransfoXLLMHeadModel",
    "TransfoXLLMHeadModelOutput",
    "TransfoXLModel",
    "TransfoXLModelOutput",
    "TransfoXLPreTrainedModel",
    "TransfoXLTokenizer",
]

AutoConfig.register(TransfoXLConfig.model_type, TransfoXLConfig)
AutoModel.register(TransfoXLConfig, TransfoXLModel)
AutoModelForCausalLM.register(TransfoXLConfig, TransfoXLLMHeadModel)
AutoTokenizer.register(TransfoXLConfig, fast_tokenizer_class=TransfoXLTokenizer)
