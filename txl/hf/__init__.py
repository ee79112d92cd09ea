"""TransfoXL for current transformers: `pip install ".[hf]"`, then `import txl.hf`.

Importing it registers configuration, models and tokenizer with the Auto classes.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from txl.hf.configuration import TransfoXLConfig
from txl.hf.modeling import TransfoXLForSequenceClassification, TransfoXLLMHeadModel, TransfoXLModel
from txl.hf.outputs import TransfoXLCache, TransfoXLLMHeadModelOutput, TransfoXLModelOutput
from txl.hf.tokenization import TransfoXLTokenizer
from txl.hf.weights import TransfoXLPreTrainedModel

__all__ = [
    "TransfoXLCache",
    "TransfoXLConfig",
    "TransfoXLForSequenceClassification",
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
AutoModelForSequenceClassification.register(TransfoXLConfig, TransfoXLForSequenceClassification)
AutoTokenizer.register(TransfoXLConfig, fast_tokenizer_class=TransfoXLTokenizer)
# Pipelines find a model's task by its class name, and Trainer decides by it whether label smoothing
# shifts labels.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TransfoXLConfig.model_type] = TransfoXLLMHeadModel.__name__
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[TransfoXLConfig.model_type] = (
    TransfoXLForSequenceClassification.__name__
)
