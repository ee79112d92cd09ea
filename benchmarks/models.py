"""Whole models that do the same work as ours, each on the weights of the same `TransformerXL`, and their checks."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from agreement import require
from contestants import compiler
from original import original_absolute_qkbh
from original_model import OriginalTransformerXL
from race import Unavailable
from torch import Tensor, nn

from txl import Engine, ModelConfig, TransformerXL
from txl.vanilla import VanillaTransformer

ENWIK8_BASE = ModelConfig(vocab_size=204)
ENWIK8_LARGE = ModelConfig(vocab_size=204, n_layer=24, d_model=1024, d_head=128, d_inner=3072, dropout=0.15)
_SMALL = ModelConfig(vocab_size=50, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, dropout=0.0)
_MOST = {torch.float32: 1e-5, torch.bfloat16: 4e-2}  # after two layers


class Evaluator(Protocol):
    """Reads a text segment by segment: tokens [B, L] to the logits [B, L, vocab_size] of the tokens that follow.

    Every token sees exactly the last attn_len positions, itself included.
    """

    def __call__(self, tokens: Tensor) -> Tensor: ...

    def remember(self, states: Tensor) -> None:
        """Goes on as if states [B, M, d_model] had been every layer's hidden states so far."""


# make(model, batch, attn_len, max_segment)
MakeEvaluator = Callable[[TransformerXL, int, int, int], Evaluator]


class CachedEvaluator(Engine):
    """Ours."""

    @torch.inference_mode()
    def remember(self, states: Tensor) -> None:
        for block, cache in zip(self.model.layers, self.caches, strict=True):
            cache.clear()
            block.attention.fill_cache(cache, block.attention_input(states))


class OriginalEvaluator:
    """The original algorithm: memory of hidden states, everything projected anew for each segment."""

    def __init__(self, model: TransformerXL, batch: int, attn_len: int, max_segment: int) -> None:
        self.model = OriginalTransformerXL(model, attn_len - 1, attn_len).eval()
        self.memory: list[Tensor] | None = None

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        logits, self.memory = self.model(tokens, self.memory)
        return logits

    def remember(self, states: Tensor) -> None:
        kept = states[:, -self.model.mem_len :].transpose(0, 1).contiguous()
        self.memory = [kept] * len(self.model.model.layers)


class HuggingFaceEvaluator:
    """transformers' TransfoXL with the same weights; same_length, so that a token sees mem_len keys."""

    def __init__(self, model: TransformerXL, batch: int, attn_len: int, max_segment: int) -> None:
        self.model = hugging_face(model, mem_len=attn_len, same_length=True).eval()
        empty = model.embedding.weight.new_zeros(0, batch, model.config.d_model)  # None would be zeros, attended
        self.memory: list[Tensor] = [empty] * model.config.n_layer

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        logits, self.memory = hugging_face_logits(self.model, tokens, self.memory)
        return logits

    def remember(self, states: Tensor) -> None:
        self.memory = [states.transpose(0, 1).contiguous()] * len(self.memory)


EVALUATORS: dict[str, MakeEvaluator] = {
    "ours, cached keys and values": CachedEvaluator,
    "Transformer-XL, original algorithm": OriginalEvaluator,
    "Transformer-XL, Hugging Face": HuggingFaceEvaluator,
}


def hugging_face(model: TransformerXL, mem_len: int, same_length: bool = False) -> nn.Module:
    """Their TransfoXL, without adaptive softmax, with copies of our weights.

    Raises:
        Unavailable: transformers is not installed, or has no TransfoXL any more (gone from 5.0; 4.37.2 has it).
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
    return theirs.to(model.output_bias.device, model.output_bias.dtype)


def hugging_face_logits(theirs: Any, tokens: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, L, vocab_size] and the memory that follows, [M, B, d_model] a layer."""
    out = theirs.transformer(tokens, mems=memory)
    last = theirs.crit.out_layers[0]
    return F.linear(out.last_hidden_state, last.weight, last.bias), out.mems


def their_names(model: TransformerXL) -> list[tuple[str, Tensor]]:
    """Our parameters under Hugging Face's names."""
    pairs: list[tuple[str, Tensor]] = [
        ("transformer.word_emb.emb_layers.0.weight", model.embedding.weight),
        ("crit.out_layers.0.bias", model.output_bias),
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


def vanilla(model: TransformerXL, how: str) -> Callable[[Tensor], Tensor]:
    """A vanilla model of the same sizes, untrained: predict(window [B, W]) -> logits [B, vocab_size].

    how: "eager": scores built in full in the original's layout; "flash": torch's fused attention; "compiled": that,
    each layer under torch.compile; "last": that, and the last layer computes only what the last token needs.
    """
    torch.manual_seed(1)
    # Weights that any dtype holds, so that models of two dtypes are the same.
    it = VanillaTransformer(model.config).bfloat16().to(model.output_bias.device, model.output_bias.dtype).eval()
    if how == "eager":
        for block in it.layers:
            block.attend = _eager_attend
    if how in ("compiled", "last"):
        compiler()
        for block in it.layers:
            block.compile(dynamic=True)
    it.last_layer_in_full = how != "last"
    predict: Callable[[Tensor], Tensor] = torch.inference_mode()(it.predict)
    return predict


def _eager_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    return original_absolute_qkbh(q, k, v).permute(1, 2, 0, 3)


@functools.cache
def _small(dtype: torch.dtype, device: torch.device) -> tuple[TransformerXL, TransformerXL, Tensor]:
    """A small model of lively weights, the same in float64 on the reference backend, and a text [2, 60]."""
    torch.manual_seed(0)
    model, exact = (TransformerXL(_SMALL) for _ in range(2))
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.2)
    model = model.to(dtype)
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(_SMALL.vocab_size, (2, 60)).to(device)
    return model.to(device), exact.to(device).double(), tokens


def check_evaluator(make: MakeEvaluator, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses what gives other logits than one float64 pass over the whole text in which a token sees attn_len keys."""
    model, exact, tokens = _small(dtype, device)
    attn_len, segment = 23, 12
    evaluator = make(model, 2, attn_len, segment)
    got = torch.cat([evaluator(part) for part in tokens.split(segment, 1)], 1)
    assert got.shape == (*tokens.shape, _SMALL.vocab_size)
    for block in exact.layers:
        block.attention.window = attn_len
    with torch.inference_mode():
        require(got, exact(tokens)[0], "logits", _MOST[dtype])


def check_vanilla(how: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses a vanilla model whose logits differ from the eager one's in float64."""
    model, exact, tokens = _small(dtype, device)
    require(vanilla(model, how)(tokens), vanilla(exact, "eager")(tokens), "logits", _MOST[dtype])
