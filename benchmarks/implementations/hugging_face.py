"""transformers' TransfoXL with the weights of a txl model."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.comparison import Unavailable
from txl import TransformerXL


def hugging_face(model: TransformerXL, mem_len: int, same_length: bool = False) -> nn.Module:
    """Make transformers' TransfoXL, without adaptive softmax, from copies of a model's weights.

    Raises:
        Unavailable: transformers is not installed, or has no TransfoXL (removed in 5.0; 4.37.2 has
            it).
    """
    try:
        from transformers import TransfoXLConfig, TransfoXLLMHeadModel
    except ImportError as error:
        raise Unavailable(f"needs transformers with TransfoXL (4.37.2): {error}") from None
    c = model.config
    config = TransfoXLConfig(
        vocab_size=c.vocab_size, cutoffs=[], d_model=c.d_model, d_embed=c.d_model, n_head=c.n_head, d_head=c.d_head,
        d_inner=c.d_inner, n_layer=c.n_layer, mem_len=mem_len, clamp_len=c.clamp_len or -1, same_length=same_length,
        untie_r=c.untie_r, pre_lnorm=c.pre_norm, div_val=1, dropout=c.dropout, dropatt=c.attn_dropout, adaptive=True,
        tie_word_embeddings=True, proj_share_all_but_first=True,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs: nn.Module = TransfoXLLMHeadModel(config)
    state = theirs.state_dict()
    with torch.no_grad():
        for name, ours in their_names(model):
            state[name].copy_(ours)
    theirs.tie_weights()
    return theirs.to(model.device, model.softmax.bias.dtype)


def hugging_face_logits(theirs: Any, tokens: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return logits [B, L, vocab_size] and the memory for the next segment, [M, B, d_model] for
    each layer."""
    out = theirs.transformer(tokens, mems=memory)
    last = theirs.crit.out_layers[0]
    return F.linear(out.last_hidden_state, last.weight, last.bias), out.mems


def their_names(model: TransformerXL) -> list[tuple[str, Tensor]]:
    """List (transformers' name, txl's parameter), each shared parameter once."""
    pairs: list[tuple[str, Tensor]] = [
        ("transformer.word_emb.emb_layers.0.weight", model.embedding.tables[0]),
        ("crit.out_layers.0.bias", model.softmax.bias),
    ]
    for n, block in enumerate(model.layers):
        layer = f"transformer.layers.{n}."
        own = layer + "dec_attn." if model.config.untie_r else "transformer."
        if n == 0 or model.config.untie_r:
            pairs += [
                (own + "r_w_bias", block.attention.content_bias),
                (own + "r_r_bias", block.attention.position_bias),
            ]
        pairs += [
            (layer + "dec_attn.qkv_net.weight", block.attention.qkv.weight),
            (layer + "dec_attn.r_net.weight", block.attention.r.weight),
            (layer + "dec_attn.o_net.weight", block.attention.out.weight),
        ]
        modules = {
            "dec_attn.layer_norm": block.attention_norm,
            "pos_ff.CoreNet.0": block.feed_forward[0],
            "pos_ff.CoreNet.3": block.feed_forward[3],
            "pos_ff.layer_norm": block.feed_forward_norm,
        }
        for name, module in modules.items():
            pairs += [(f"{layer}{name}.{part}", getattr(module, part)) for part in ("weight", "bias")]
    return pairs
