"""The configuration, with the fields of transformers' config.json for TransfoXL."""

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from txl.importing.huggingface import MODEL_TYPE, OTHER_NAMES, from_theirs
from txl.model.config import ModelConfig

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 267735, "cutoffs": (20000, 40000, 200000), "d_model": 1024, "d_embed": 1024, "n_head": 16, "d_head": 64,
    "d_inner": 4096, "div_val": 4, "pre_lnorm": False, "n_layer": 18, "mem_len": 1600, "clamp_len": 1000,
    "same_length": True, "proj_share_all_but_first": True, "attn_type": 0, "sample_softmax": -1, "adaptive": True,
    "dropout": 0.1, "dropatt": 0.0, "untie_r": True, "init_std": 0.02, "proj_init_std": 0.01, "layer_norm_epsilon": 1e-5,
    "eos_token_id": 0, "pad_token_id": None, "tie_projs": None, "tie_word_embeddings": True, "initial_memory": "zeros",
    "is_decoder": True,
}  # fmt: skip


class TransfoXLConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes and options of a TransfoXL model; defaults are those of the released WikiText-103 one.

    Args:
        vocab_size, cutoffs, d_model, d_embed, n_head, d_head, d_inner, div_val, n_layer: sizes.
        pre_lnorm: apply layer norms before attention and feed-forward net instead of after.
        mem_len: number of hidden states in memory.
        clamp_len: distances above it are encoded as clamp_len; -1 for no limit.
        same_length: whether each token sees exactly mem_len keys.
        proj_share_all_but_first, tie_projs: bins whose softmax shares the embedding's projection;
            tie_projs, one flag for each bin, has precedence.
        untie_r: biases u and v are separate in each layer.
        dropout, dropatt, layer_norm_epsilon, tie_word_embeddings, eos_token_id, pad_token_id: as in
            other models of transformers.
        init_std, proj_init_std: standard deviations of the initial parameters.
        initial_memory: "zeros", as in transformers' own class, or "empty".
        attn_type, adaptive, sample_softmax: accepted for old files; only 0, either value, and -1
            are valid.

    Raises:
        TxlError: raised by `model_config` for a configuration that `txl` does not support.
    """

    model_type = MODEL_TYPE
    prefix = ""  # no prefix for prompts in pipelines, which prepend a Russian story for TransfoXL by default
    keys_to_ignore_at_inference = ["losses", "mems", "cache", "past_key_values"]  # noqa: RUF012
    attribute_map = OTHER_NAMES

    def __init__(self, vocab_size: int = _DEFAULTS["vocab_size"], **fields: Any) -> None:
        given = _DEFAULTS | fields | {"vocab_size": vocab_size}
        given["cutoffs"] = list(_DEFAULTS["cutoffs"] if given["cutoffs"] is None else given["cutoffs"])
        shared = given["tie_projs"]
        if shared is None:
            shared = [False] + [given["proj_share_all_but_first"]] * len(given["cutoffs"])
        given["tie_projs"] = list(shared)
        super().__init__(**given)

    def model_config(self) -> ModelConfig:
        """Return the configuration of `txl`'s model.

        Raises:
            TxlError: a field is not supported; the message names it.
        """
        config = from_theirs(self.to_dict())
        return dataclasses.replace(config, init_std=self.init_std, proj_init_std=self.proj_init_std)
