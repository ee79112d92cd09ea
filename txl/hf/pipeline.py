"""transformers' text-generation pipeline, which decodes what is new alone, for words without the
spaces between them."""

from typing import Any

from transformers import TextGenerationPipeline

from txl.hf.tokenization import TransfoXLTokenizer


class TransfoXLTextGenerationPipeline(TextGenerationPipeline):  # type: ignore[misc]
    """transformers' own, with a space between a prompt and the first word after it where the
    tokenizer is a `TransfoXLTokenizer` of words."""

    def postprocess(self, model_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        prompt = model_outputs["prompt_text"]
        words = isinstance(self.tokenizer, TransfoXLTokenizer) and self.tokenizer.of_words
        if words and isinstance(prompt, str) and prompt and not prompt[-1].isspace():
            model_outputs = dict(model_outputs) | {"prompt_text": prompt + " "}
        return super().postprocess(model_outputs, *args, **kwargs)
