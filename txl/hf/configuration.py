"""The configuration, with the fields of transformers' config.json for TransfoXL."""

import dataclasses
from typing import Any

from transformers import PretrainedConfig

from txl.importing.huggingface import MODEL_TYPE, OTHER_NAMES, from_theirs
from txl.model.config import ModelConfig


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

    def __init__(
        self,
        vocab_size: int = 267735,
        cutoffs: list[int] | None = None,
        d_model: int = 1024,
        d_embed: int = 1024,
        n_head: int = 16,
        d_head: int = 64,
        d_inner: int = 4096,
        div_val: int = 4,
        pre_lnorm: bool = False,
        n_layer: int = 18,
        mem_len: int = 1600,
        clamp_len: int = 1000,
        same_length: bool = True,
        proj_share_all_but_first: bool = True,
        attn_type: int = 0,
        sample_softmax: int = -1,
        adaptive: bool = True,
        dropout: float = 0.1,
        dropatt: float = 0.0,
        untie_r: bool = True,
        init_std: float = 0.02,
        proj_init_std: float = 0.01,
        layer_norm_epsilon: float = 1e-5,
        eos_token_id: int = 0,
        pad_token_id: int | None = None,
        tie_projs: list[bool] | None = None,
        tie_word_embeddings: bool = True,
        initial_memory: str = "zeros",
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.cutoffs = [20000, 40000, 200000] if cutoffs is None else list(cutoffs)
        self.d_model, self.d_embed, self.n_head, self.d_head, self.d_inner = d_model, d_embed, n_head, d_head, d_inner
        self.div_val, self.pre_lnorm, self.n_layer, self.mem_len = div_val, pre_lnorm, n_layer, mem_len
        self.clamp_len, self.same_length, self.untie_r = clamp_len, same_length, untie_r
        self.proj_share_all_but_first = proj_share_all_but_first
        if tie_projs is None:
            tie_projs = [False] + [proj_share_all_but_first] * len(self.cutoffs)
        self.tie_projs = list(tie_projs)
        self.attn_type, self.sample_softmax, self.adaptive = attn_type, sample_softmax, adaptive
        self.dropout, self.dropatt = dropout, dropatt
        self.init_std, self.proj_init_std, self.layer_norm_epsilon = init_std, proj_init_std, layer_norm_epsilon
        self.initial_memory = initial_memory
        self.eos_token_id, self.pad_token_id = eos_token_id, pad_token_id
        self.is_decoder = True
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def model_config(self) -> ModelConfig:
        """Return the configuration of `txl`'s model.

        Raises:
            TxlError: a field is not supported; the message names it.
        """
        config = from_theirs(self.to_dict())
        return dataclasses.replace(config, init_std=self.init_std, proj_init_std=self.proj_init_std)
