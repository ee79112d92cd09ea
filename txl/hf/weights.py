"""The base class of TransfoXL's models: it loads and saves weights under the names of transformers'
own TransfoXL."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from txl.errors import TxlError
from txl.hf.configuration import TransfoXLConfig
from txl.importing import huggingface
from txl.importing.names import original, translate
from txl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, init_module, resize_vocabulary
from txl.model.config import ModelConfig
from txl.model.transformer import Trunk

HEAD = "score."  # prefix of a classifier's head
OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision")


def folder_of(name: str, options: Mapping[str, Any], patterns: Sequence[str]) -> Path:
    """Return a folder, or that of a repository of the Hub after downloading the files of these
    patterns.

    Raises:
        OSError: there is no such folder, and the name is none of a repository.
    """
    folder, below = Path(name), options.get("subfolder") or ""
    if not folder.is_dir():
        hub = {key: value for key, value in options.items() if key in OF_THE_HUB}
        wanted = [f"{below}/{pattern}" if below else pattern for pattern in patterns]
        try:
            folder = Path(snapshot_download(name, allow_patterns=wanted, **hub))
        except HFValidationError as error:
            raise OSError(f"{name}: no such folder, and no name of a repository: {error}") from error
    return folder / below


def _are_theirs(state: Mapping[str, Any]) -> bool:
    """Whether the tensors have transformers' names for TransfoXL."""
    return any("word_emb." in name for name in state)


def _to_ours(given: Mapping[str, Tensor], model: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """Make the model's state_dict from tensors with transformers' names. A classifier's head is
    included only if both sides have one.

    Raises:
        TxlError: a tensor is missing, unknown, of another shape, or differs from the one it is tied
            to.
    """
    shapes, state = {}, model.state_dict()
    head = {name: x for name, x in given.items() if name.startswith(HEAD)}
    given = {name: x for name, x in given.items() if name not in head}
    names: dict[str, list[str]] = {}  # full names of the state by short name; tied biases have one for each layer
    for full, p in state.items():
        if full.startswith(HEAD):
            continue
        name = _short(full)
        if not config.untie_r and "attention." in name and name.endswith("_bias"):
            name = f"blocks.0.attention.{name.rpartition('.')[2]}"
        names.setdefault(name, []).append(full)
        shapes[name] = p.shape
    found = translate(huggingface.unprefixed(given), config, shapes)
    ours = {full: found[name] for name, all_names in names.items() for full in all_names}
    return ours | {name: x for name, x in head.items() if name in state}


def _to_theirs(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Convert a state_dict to transformers' names, tied tensors once; names get the prefix if there
    is a softmax or a classifier's head."""
    short = {_short(name): x for name, x in state.items()}
    found = original(short, config)
    if any(name.startswith(("softmax.", HEAD)) for name in short):
        found = huggingface.prefixed(found)
    found |= {name: x for name, x in state.items() if name.startswith(HEAD)}
    return {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in found.items()}


def _short(name: str) -> str:
    name = name.removeprefix("transformer.").removeprefix("trunk.")
    return "softmax." + name.removeprefix("crit.") if name.startswith("crit.") else name


class TransfoXLPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base class that loads and saves weights under the names of transformers' own TransfoXL."""

    config_class = TransfoXLConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["Block"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, from a folder or a repository of the Hub, with weights
        as safetensors or pickle (of which nothing is executed). All tensors must match.

        Raises:
            OSError: there are no weights, or they are damaged.
            TxlError: a tensor is missing, unknown or of another shape, or `txl` does not support
                the configuration.
        """
        given = kwargs.pop("state_dict", None)
        if pretrained_model_name_or_path is None:
            state = None if given is None else cls._ours(given, kwargs.get("config"))
            return super().from_pretrained(None, *args, state_dict=state, **kwargs)
        name = str(pretrained_model_name_or_path)
        if kwargs.pop("variant", None) is not None:
            raise ValueError("variant must be None: TransfoXL was never saved with one")
        safe = kwargs.pop("use_safetensors", None)
        names = [x for x in huggingface.WEIGHTS if safe is None or x.endswith(".safetensors") == safe]
        for file in names:  # a pickle is downloaded only where there is nothing else
            folder = folder_of(name, kwargs, ("*.json", file.replace(".", "*.")))
            if any(folder.glob(file.replace(".", "*."))):
                break
        if not (folder / "config.json").is_file():
            raise OSError(f"{folder}: holds no config.json")
        config = kwargs.pop("config", None)
        dtypes: dict[str, Any] = {
            key: kwargs.pop(key) for key in ("dtype", "torch_dtype") if key in kwargs
        }  # "auto" is not a value of a configuration
        kwargs = {key: value for key, value in kwargs.items() if key not in (*OF_THE_HUB, "subfolder")}
        if not isinstance(config, TransfoXLConfig):
            config, kwargs = TransfoXLConfig.from_pretrained(config or folder, return_unused_kwargs=True, **kwargs)
        kwargs |= dtypes
        try:
            given = huggingface.tensors(folder, names) if given is None else given
        except TxlError as error:
            raise OSError(f"{folder}: {error}") from error
        state = cls._ours(given, config)
        result = super().from_pretrained(None, *args, config=config, state_dict=state, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        model.name_or_path = model.config.name_or_path = name
        if model.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return result

    @classmethod
    def _ours(cls, given: Mapping[str, Tensor], config: Any) -> Mapping[str, Tensor]:
        if not _are_theirs(given):
            return given
        if not isinstance(config, TransfoXLConfig):
            raise ValueError(f"config must be a TransfoXLConfig, got {type(config).__name__}")
        with torch.device("meta"):
            shape = cls(config)
        return _to_ours(given, shape, config.model_config())

    def save_pretrained(self, save_directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
        """Save as transformers does, under the names of its own TransfoXL class."""
        state = self.state_dict() if state_dict is None else state_dict
        if not _are_theirs(state):
            state = _to_theirs(state, self.config.model_config())
        super().save_pretrained(save_directory, *args, state_dict=state, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load parameters by transformers' names for TransfoXL or by this module's own."""
        if _are_theirs(state_dict):
            state_dict = _to_ours(state_dict, self, self.config.model_config())
        result = super().load_state_dict(state_dict, *args, **kwargs)
        self.tie_weights()
        return result

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Share one pair of biases u and v among all layers, unless `untie_r`."""
        super().tie_weights(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, Trunk):
                module.tie_biases()

    def _init_weights(self, module: nn.Module) -> None:
        init_module(module, self.config.model_config())

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Change the vocabulary's size: tokens are added or removed at the end of the last bin.

        Args:
            new_num_tokens: the new size; None for the present one.
            pad_to_multiple_of: round the size up to a multiple of this; None for no rounding.
            mean_resizing: initialize new embeddings and biases with the mean of the bin's; False to
                draw them as at construction.

        Returns:
            The embedding module.

        Raises:
            ValueError: the last bin would be empty.
        """
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        size += -size % (pad_to_multiple_of or 1)
        if size <= max(self.config.cutoffs, default=0):
            raise ValueError(f"new_num_tokens must be above the last of cutoffs, {self.config.cutoffs}, got {size}")
        if size != self.config.vocab_size:
            self._change(vocab_size=size)
            for module in self.modules():
                if isinstance(module, (AdaptiveEmbedding, AdaptiveSoftmax)):
                    resize_vocabulary(module, self.config.model_config(), mean_resizing)
        embedding: nn.Module = self.get_input_embeddings()
        return embedding

    def reset_memory_length(self, mem_len: int) -> None:
        """Set mem_len, also in the configuration, from the next call on.

        Raises:
            TxlError: mem_len is below 0, or 0 with same_length.
        """
        found = self._change(mem_len=mem_len)
        for module in self.modules():
            if isinstance(module, Trunk):
                for block in module.layers:
                    block.attention.window = found.window

    def _change(self, **fields: Any) -> ModelConfig:
        """Set fields of the configuration in all modules; raise TxlError if the result is
        invalid."""
        changed = copy.deepcopy(self.config)
        for name, value in fields.items():
            setattr(changed, name, value)
        found: ModelConfig = changed.model_config()
        for module in self.modules():
            if isinstance(module, TransfoXLPreTrainedModel):
                for name, value in fields.items():
                    setattr(module.config, name, value)
            elif isinstance(module, Trunk):
                module.config = found
        return found

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False
