"""Our parameters as Hugging Face's TransfoXL calls them."""

from torch import Tensor

from txl import TransformerXL


def their_names(model: TransformerXL) -> list[tuple[str, Tensor]]:
    """(their name, our parameter), each shared parameter once."""
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
