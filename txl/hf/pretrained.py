"""What TransfoXL's models share: reading and writing what Hugging Face's class wrote."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from txl.hf import weights
from txl.hf.configuration import TransfoXLConfig
from txl.model.adaptive import draw
from txl.model.transformer import Trunk, init_module


class TransfoXLPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Reads and writes the weights that Hugging Face's class wrote, under their old names."""

    config_class = TransfoXLConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["Block"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', of a folder or a name on the Hub, safetensors or pickle (read with
        `weights_only`); strict.

        Raises:
            OSError: no weights there, or damaged ones.
            TxlError: a tensor is missing, unknown or of another shape, or the configuration is of
                no such model.
        """
        given = kwargs.pop("state_dict", None)
        if pretrained_model_name_or_path is None:
            state = None if given is None else cls._ours(given, kwargs.get("config"))
            return super().from_pretrained(None, *args, state_dict=state, **kwargs)
        name = str(pretrained_model_name_or_path)
        names = weights.files(kwargs.pop("use_safetensors", None), kwargs.pop("variant", None))
        folder = weights.folder_of(name, kwargs, names)
        config = kwargs.pop("config", None)
        kwargs = {key: value for key, value in kwargs.items() if key not in weights.OF_THE_HUB}
        if not isinstance(config, TransfoXLConfig):
            config, kwargs = TransfoXLConfig.from_pretrained(config or folder, return_unused_kwargs=True, **kwargs)
        state = cls._ours(weights.read(folder, names) if given is None else given, config)
        result = super().from_pretrained(None, *args, config=config, state_dict=state, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        model.name_or_path = model.config.name_or_path = name
        if model.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return result

    @classmethod
    def _ours(cls, given: Mapping[str, Tensor], config: Any) -> Mapping[str, Tensor]:
        if not weights.are_theirs(given):
            return given
        if not isinstance(config, TransfoXLConfig):
            raise ValueError(f"config must be a TransfoXLConfig, got {type(config).__name__}")
        with torch.device("meta"):
            shape = cls(config)
        return weights.to_ours(given, shape, config.model_config())

    def save_pretrained(self, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
        """As transformers', under the names that its own class had."""
        state = self.state_dict() if state_dict is None else state_dict
        if not weights.are_theirs(state):
            state = weights.to_theirs(state, self.config.model_config())
        super().save_pretrained(save_directory, *args, state_dict=state, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Of either names."""
        if weights.are_theirs(state_dict):
            state_dict = weights.to_ours(state_dict, self, self.config.model_config())
        result = super().load_state_dict(state_dict, *args, **kwargs)
        self.tie_weights()
        return result

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """u and v are one pair in all layers, unless `untie_r`."""
        super().tie_weights(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, Trunk):
                module.tie_biases()

    def _init_weights(self, module: nn.Module) -> None:
        config = self.config.model_config()
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)):  # an owner of these alone is never asked
            draw(module, config)
        else:
            init_module(module, config)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Refused, but for the size that it has."""
        if new_num_tokens in (None, self.config.vocab_size):
            return self.get_input_embeddings()
        raise NotImplementedError("the vocabulary's bins have fixed sizes: resize_token_embeddings is not supported")

    def reset_memory_length(self, mem_len: int) -> None:
        """Another mem_len from the next call on, in the configuration, too.

        Raises:
            TxlError: it is below 0, or 0 with same_length.
        """
        changed = copy.deepcopy(self.config)
        changed.mem_len = mem_len
        found = changed.model_config()
        self.config.mem_len = mem_len
        for module in self.modules():
            if isinstance(module, TransfoXLPreTrainedModel):
                module.config.mem_len = mem_len
            elif isinstance(module, Trunk):
                module.config = found
                for block in module.layers:
                    block.attention.window = found.window

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False
