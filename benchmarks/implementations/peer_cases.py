"""Attention modules of other libraries, one for each peer, with the inputs that their own encoder
passes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from implementations import bare_peers as bare

D_MODEL, HEADS, T, B = 64, 4, 45, 3
CHUNK, LEFT = 8, 2


@dataclass
class PeerCase:
    """A module with its input x and a function call(module, x) that returns the output. valid: bool
    mask of the output's first two axes, True where the output is defined."""

    module: nn.Module
    call: Callable[[nn.Module, Tensor], Tensor]
    x: Tensor
    valid: Tensor


def answer(case: PeerCase) -> Tensor:
    """Compute the output without gradients."""
    with torch.no_grad():
        result: Tensor = case.call(case.module, case.x)
    return result


@dataclass(frozen=True)
class Sizes:
    d: int = D_MODEL
    heads: int = HEADS
    T: int = T
    B: int = B

    def lengths(self, masks: str) -> Tensor:
        shares = torch.tensor([1.0, 0.8, 0.6, 0.9]).repeat(self.B)[: self.B]
        return (
            (shares * self.T).long() if masks in ("right", "left", "chunks padded") else torch.full((self.B,), self.T)
        )


def sinusoids(first: int, last: int, d: int) -> Tensor:
    """Return encodings [1, first - last + 1, d] of distances first, .. last in descending order;
    sines and cosines alternate."""
    angle = torch.arange(first, last - 1, -1.0).unsqueeze(1) * torch.exp(torch.arange(0, d, 2.0) * -(math.log(1e4) / d))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).unsqueeze(0)


def seen_by(masks: str, sizes: Sizes) -> tuple[Tensor | None, Tensor]:
    """Return the keys that queries see, bool [B, 1 or T, T] or None for all, and the frames that
    are not padding, bool [B, T]."""
    at, n = torch.arange(sizes.T), sizes.lengths(masks).unsqueeze(1)
    real = at >= sizes.T - n if masks == "left" else at < n
    if masks == "none":
        return None, real
    seen = real.unsqueeze(1)
    if masks.startswith("chunks"):
        own = at // CHUNK
        behind = own.unsqueeze(1) - own
        seen = seen & (behind >= 0) & (behind <= LEFT)
    elif masks == "limited":
        distance = at.unsqueeze(1) - at
        seen = seen & (distance <= 9) & (distance >= -4)
    elif masks == "holes":
        seen = (seen & (at % 7 != 3)).repeat(1, sizes.T, 1)
    return seen, real


def make(name: str, masks: str = "none", dropout: float = 0.0, sizes: Sizes | None = None, **options: Any) -> PeerCase:
    """Make the case of a peer; masks: none, right, left (padding), chunks, chunks padded, limited
    (context), holes."""
    torch.manual_seed(0)
    sizes = sizes or Sizes()
    seen, real = seen_by(masks, sizes)
    x = torch.randn(sizes.B, sizes.T, sizes.d)
    case = MAKERS[name](sizes, seen, real, x, dropout, **options)
    for key, p in case.module.named_parameters():
        if p.dim() == 1 or "bias" in key or key in ("u", "v"):
            nn.init.normal_(p, 0, 0.3)
        elif not p.any() or name.startswith("xlnet"):
            nn.init.normal_(p, 0, 0.05)
    return case


def _square(seen: Tensor | None, sizes: Sizes) -> Tensor | None:
    return None if seen is None else seen.expand(sizes.B, sizes.T, sizes.T)


def _hugging_face(model: str, config: str, module: str, **fixed: Any) -> Callable[..., PeerCase]:
    def maker(
        s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, additive: bool = False
    ) -> PeerCase:
        m = bare.transformers(model)
        prefix = "speech_encoder_" if model.startswith("seamless") else ""
        given = {f"{prefix}attention_heads" if prefix else "num_attention_heads": s.heads,
                 f"{prefix}dropout" if prefix else "attention_dropout": dropout}  # fmt: skip
        settings = getattr(m, config)(hidden_size=s.d, **given, **fixed)
        settings._attn_implementation = "sdpa"
        mask = _square(seen, s)
        mask = None if mask is None else mask.unsqueeze(1)
        if additive and mask is not None:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        encodings = sinusoids(s.T - 1, 1 - s.T, s.d)

        def call(f: nn.Module, x: Tensor) -> Tensor:
            computed = model == "seamless_m4t_v2" or fixed.get("position_embeddings_type") == "relative_key"
            more = {} if computed else {"relative_position_embeddings": encodings.to(x.dtype)}
            own = mask.to(x.dtype) if mask is not None and mask.is_floating_point() else mask
            return f(x, attention_mask=own, **more)[0]

        return PeerCase(getattr(m, module)(settings), call, x, _alive(seen, real))

    return maker


def _alive(seen: Tensor | None, real: Tensor) -> Tensor:
    """Return the frames whose query sees some key; for other frames each library's output is
    different."""
    return torch.ones_like(real) if seen is None else seen.any(-1).expand(real.shape)


def _parakeet(model: str, name: str, config: str) -> Callable[..., PeerCase]:
    def maker(
        s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, groups: int = 1, positions: float = 0.0
    ) -> PeerCase:
        m = bare.transformers(model)
        settings = getattr(m, config)(
            hidden_size=s.d, num_attention_heads=s.heads, num_key_value_heads=s.heads // groups, attention_dropout=dropout,
            attention_bias=False, dropout_positions=positions,
        )  # fmt: skip
        settings._attn_implementation = "sdpa"
        full = _square(seen, s)
        mask = None if full is None else (full & real.unsqueeze(2)).unsqueeze(1)
        encodings = sinusoids(s.T - 1, 1 - s.T, s.d).repeat(s.B, 1, 1)
        if positions:
            encodings = torch.nn.functional.dropout(encodings, positions)

        valid = _alive(seen, real) & (real if mask is not None else torch.ones_like(real))
        module = getattr(m, name)(settings, 0)
        return PeerCase(module, lambda f, x: f(x, encodings.to(x.dtype), attention_mask=mask)[0], x, valid)

    return maker


def _fastspeech2(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float) -> PeerCase:
    m = bare.transformers("fastspeech2_conformer")
    given = {"num_attention_heads": s.heads, "attention_dropout_rate": dropout}
    encodings = sinusoids(s.T - 1, 1 - s.T, s.d)
    mask = None if seen is None else seen[:, :1].float()
    module = m.FastSpeech2ConformerAttention(m.FastSpeech2ConformerConfig(hidden_size=s.d), given)
    return PeerCase(module, lambda f, x: f(x, mask, encodings.to(x.dtype))[0], x, _alive(seen, real))


def _nemo(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, sdpa: bool = False) -> PeerCase:
    more = {"use_pytorch_sdpa": True} if sdpa else {}  # which releases before 2.1 do not have
    module = bare.nemo().RelPositionMultiHeadAttention(s.heads, s.d, dropout, None, None, **more)
    full = _square(seen, s)
    mask = None if full is None else ~(full & real.unsqueeze(2))
    encodings = sinusoids(s.T - 1, 1 - s.T, s.d)
    return PeerCase(module, lambda f, x: f(x, x, x, mask, encodings.to(x.dtype)), x, _alive(seen, real) & real)


def _nemo_local(
    s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, context: tuple[int, int] = (9, 9)
) -> PeerCase:
    module = bare.nemo().RelPositionMultiHeadAttentionLongformer(s.heads, s.d, dropout, None, None, list(context))
    encodings = sinusoids(context[0], -context[1], s.d)
    return PeerCase(module, lambda f, x: f(x, x, x, ~real, encodings.to(x.dtype)), x, real)


def _nemo_transformer(
    s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, norm: bool = False
) -> PeerCase:
    m = bare.nemo_transformer()
    module = m.MultiHeadAttention(m.TransformerEncoderConfig(d_model=s.d, n_heads=s.heads, qkv_bias=True, qk_norm=norm))
    encodings = sinusoids(s.T - 1, 1 - s.T, s.d)
    mask = None
    if seen is not None:
        shown = seen.expand(s.B, s.T, s.T)
        mask = m.create_block_mask(lambda b, h, i, j: shown[b, i, j], B=s.B, H=1, Q_LEN=s.T, KV_LEN=s.T, device="cpu")
    return PeerCase(module, lambda f, x: f(x, mask, encodings.to(x.dtype)), x, _alive(seen, real))


def _granite(model: str, prefix: str) -> Callable[..., PeerCase]:
    def maker(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, context: int = 10) -> PeerCase:
        m = bare.transformers(model)
        config = getattr(m, f"{prefix}EncoderConfig")(
            hidden_dim=s.d, num_heads=s.heads, dim_head=s.d // s.heads, context_size=context, max_pos_emb=2 * context,
            dropout=dropout,
        )  # fmt: skip
        at = torch.arange(context)
        distances = at.unsqueeze(1) - at + 2 * context
        module = getattr(m, f"{prefix}ConformerAttention")(config)
        return PeerCase(module, lambda f, x: f(x, distances), x, torch.ones_like(real))

    return maker


def _granite5(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, context: int = 10) -> PeerCase:
    m = bare.transformers("granite_speech5")
    config = m.GraniteSpeech5EncoderConfig(
        hidden_size=s.d, num_attention_heads=s.heads, num_key_value_heads=s.heads, head_dim=s.d // s.heads,
        context_size=context, max_position_embeddings=2 * context, attention_dropout=dropout,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    at, mask = torch.arange(context), None if seen is None else seen[:, 0].expand(s.B, s.T)
    distances = at.unsqueeze(1) - at + 2 * context
    valid = torch.ones_like(real)
    if mask is not None:  # valid are the blocks with a frame that is not padding
        blocks = torch.nn.functional.pad(mask, (0, -s.T % context)).unflatten(1, (-1, context)).any(-1)
        valid = blocks.repeat_interleave(context, 1)[:, : s.T]
    module = m.GraniteSpeech5EncoderAttention(config, 0)
    return PeerCase(module, lambda f, x: f(x, distances, attention_mask=mask)[0], x, valid)


def _gemma(
    s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, left: int = 10, right: int = 0
) -> PeerCase:
    m = bare.transformers("gemma3n")
    config = m.Gemma3nAudioConfig(
        hidden_size=s.d, conf_num_attention_heads=s.heads, conf_attention_chunk_size=8, conf_attention_logit_cap=1.5,
        conf_attention_context_left=left, conf_attention_context_right=right,
    )  # fmt: skip
    at = torch.arange(s.T)
    distance = at.unsqueeze(1) - at
    shown = (distance < left) & (distance >= -right) & real.unsqueeze(1)
    return PeerCase(m.Gemma3nAudioAttention(config), lambda f, x: f(x, ~real).flatten(-2), x, shown.any(-1))


def _gemma4(
    s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, left: int = 10, right: int = 0
) -> PeerCase:
    m = bare.transformers("gemma4")
    config = m.Gemma4AudioConfig(
        hidden_size=s.d, num_attention_heads=s.heads, attention_chunk_size=left - 1, attention_logit_cap=1.5,
        attention_context_left=left, attention_context_right=right,
    )  # fmt: skip
    at = torch.arange(s.T)
    distance = at.unsqueeze(1) - at
    shown = (distance < left) & (distance >= -right) & real.unsqueeze(1)
    shown = shown if seen is None else shown & seen
    additive = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min).unsqueeze(1)
    mask = m.Gemma4AudioModel._convert_4d_mask_to_blocked_5d(SimpleNamespace(config=config), additive)
    encodings = m.Gemma4AudioRelPositionalEncoding(config)(x)
    call = lambda f, x: f(x, encodings.to(x.dtype), mask)[0]  # noqa: E731
    return PeerCase(m.Gemma4AudioAttention(config, 0), call, x, shown.any(-1))


def _sharpen(encoder: nn.Module) -> None:
    """Enlarge weights: else all keys weigh the same, and gradients cancel."""
    for name, p in encoder.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            nn.init.normal_(p, 0, 6 * p.size(1) ** -0.5)
        elif name.endswith(("rel_attn_embed.weight", "relative_attention_bias.weight")):
            nn.init.normal_(p, 0, 1.0)
        elif name.endswith(("v_proj.weight", "fc1.weight", "fc2.weight", "out_proj.weight")):
            nn.init.normal_(p, 0, p.size(1) ** -0.5)


def _wavlm(
    s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, norm_first: bool = False
) -> PeerCase:
    """Its encoder of three layers, or of one that drops entries of its attention alone."""
    m = bare.transformers("wavlm")
    config = m.WavLMConfig(
        hidden_size=s.d, num_attention_heads=s.heads, num_hidden_layers=1 if dropout else 3, intermediate_size=s.d,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_buckets=16, max_bucket_distance=30,
        attention_dropout=dropout, hidden_dropout=0.0, activation_dropout=0.0, layerdrop=0.0,
    )  # fmt: skip
    encoder = (m.WavLMEncoderStableLayerNorm if norm_first or dropout else m.WavLMEncoder)(config)
    _sharpen(encoder)
    if dropout:
        encoder.layer_norm = encoder.layers[0].final_layer_norm = encoder.layers[0].feed_forward = nn.Identity()
    mask = None if seen is None else real

    def call(f: nn.Module, x: Tensor) -> Tensor:
        return f(x.clone(), attention_mask=mask).last_hidden_state  # it changes its input in place

    return PeerCase(encoder, call, x, _alive(seen, real))


def _beats(package: Callable[[], Any]) -> Callable[..., PeerCase]:
    def maker(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float) -> PeerCase:
        m = package()
        config = SimpleNamespace(
            encoder_embed_dim=s.d, encoder_attention_heads=s.heads, encoder_layers=1 if dropout else 3,
            encoder_ffn_embed_dim=s.d, dropout=0.0, attention_dropout=dropout, activation_dropout=0.0,
            encoder_layerdrop=0.0, activation_fn="relu", layer_norm_first=True, deep_norm=False, conv_pos=4,
            conv_pos_groups=2, relative_position_embedding=True, num_buckets=16, max_distance=30, gru_rel_pos=True,
        )  # fmt: skip
        encoder = m.TransformerEncoder(config)
        encoder.pos_conv = nn.Identity()
        _sharpen(encoder)
        if dropout:
            encoder.layer_norm = encoder.layers[0].final_layer_norm = nn.Identity()
            encoder.layers[0].activation_fn = torch.zeros_like
        mask = None if seen is None else ~real
        return PeerCase(encoder, lambda f, x: f(x.clone(), mask)[0], x, _alive(seen, real))

    return maker


def _mpnet(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float) -> PeerCase:
    m = bare.transformers("mpnet")
    config = m.MPNetConfig(
        hidden_size=s.d, num_attention_heads=s.heads, num_hidden_layers=1 if dropout else 3, intermediate_size=s.d,
        attention_probs_dropout_prob=dropout, hidden_dropout_prob=0.0,
    )  # fmt: skip
    encoder = m.MPNetEncoder(config)
    if dropout:
        layer = encoder.layer[0]
        layer.attention.LayerNorm = layer.intermediate = layer.output.LayerNorm = nn.Identity()

    def call(f: nn.Module, x: Tensor) -> Tensor:
        mask = None
        if seen is not None:
            mask = x.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(x.dtype).min).unsqueeze(1)
        return f(x, mask, return_dict=True).last_hidden_state

    return PeerCase(encoder, call, x, _alive(seen, real))


def _speecht5(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float) -> PeerCase:
    m = bare.transformers("speecht5")
    config = m.SpeechT5Config(
        hidden_size=s.d, encoder_attention_heads=s.heads, encoder_layers=1 if dropout else 2, encoder_ffn_dim=s.d,
        attention_dropout=dropout, hidden_dropout=0.0, activation_dropout=0.0, positional_dropout=0.0,
        encoder_layerdrop=0.0, encoder_max_relative_position=20,
    )  # fmt: skip
    encoder = m.SpeechT5Encoder(config)
    nn.init.normal_(encoder.embed_positions.pe_k.weight)
    if dropout:
        layer = encoder.layers[0]
        layer.layer_norm, layer.feed_forward, layer.final_layer_norm = nn.Identity(), nn.Identity(), nn.Identity()
    mask = None if seen is None else real.long()
    return PeerCase(encoder, lambda f, x: f(x, mask, return_dict=True).last_hidden_state, x, real)


def _mpt(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float) -> PeerCase:
    """Its model, without words."""
    m = bare.transformers("mpt")
    config = m.MptConfig(d_model=s.d, n_heads=s.heads, n_layers=2, max_seq_len=s.T + 3, vocab_size=8, expansion_ratio=1)
    model = m.MptModel(config)
    model.wte = None
    for block in model.blocks:
        block.attn.attn_dropout_p = dropout
    mask = None if seen is None else real if seen.size(1) == 1 else (seen.expand(-1, s.T, -1).tril()).unsqueeze(1)

    def call(f: nn.Module, x: Tensor) -> Tensor:
        return f(inputs_embeds=x, attention_mask=mask, use_cache=False).last_hidden_state

    return PeerCase(model, call, x, real.int().cumsum(1) > 0)


def _t5(name: str, decoder: bool, model: str = "", **fixed: Any) -> Callable[..., PeerCase]:
    """Return a maker of a stack of three layers, or with dropout of its attention alone, so that a
    mean over masks is meaningful."""
    default = "eager" if name in ("SwitchTransformers", "LongT5") else "sdpa"  # transformers' own

    def maker(
        s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, implementation: str = default
    ) -> PeerCase:
        m = bare.transformers(model or name.lower())
        config = getattr(m, f"{name}Config")(
            vocab_size=8, d_model=s.d, d_kv=s.d // s.heads, d_ff=s.d, num_heads=s.heads, num_layers=1 if dropout else 3,
            relative_attention_num_buckets=16, relative_attention_max_distance=30, dropout_rate=0.0, is_decoder=decoder,
            use_cache=False, is_encoder_decoder=False, **fixed,
        )  # fmt: skip
        config._attn_implementation = implementation
        stack = getattr(m, f"{name}Stack")(config)
        if dropout:
            next(iter(stack.block[0].layer[0].children())).dropout = dropout
            stack.block[0].layer[-1], stack.final_layer_norm = nn.Identity(), nn.Identity()
        mask: Any = None
        if seen is not None:
            full = _square(seen, s)
            mask = real if seen.size(1) == 1 else full.unsqueeze(1)

        def call(f: nn.Module, x: Tensor) -> Tensor:
            return f(inputs_embeds=x, attention_mask=mask).last_hidden_state

        alive = _alive(seen, real)
        if decoder and seen is not None and seen.size(1) == 1:
            alive = real.int().cumsum(1) > 0
        return PeerCase(stack, call, x, alive & real if name == "LongT5" and not decoder else alive)

    return maker


def _pix2struct(
    s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, implementation: str = "sdpa"
) -> PeerCase:
    """Its decoder, without cross-attention; with dropout, its attention alone."""
    m = bare.transformers("pix2struct")
    config = m.Pix2StructTextConfig(
        vocab_size=s.d, hidden_size=s.d, d_kv=s.d // s.heads, d_ff=s.d, num_heads=s.heads, num_layers=1 if dropout else 3,
        relative_attention_num_buckets=16, relative_attention_max_distance=30, dropout_rate=0.0, initializer_range=0.05,
    )  # fmt: skip
    config._attn_implementation = implementation
    model = m.Pix2StructTextModel(config)
    if dropout:
        model.layer[0].self_attention.attention.dropout = dropout
        model.layer[0].mlp, model.final_layer_norm = nn.Identity(), nn.Identity()
    for layer in model.layer:
        layer.encoder_decoder_attention = None
    model.embed_tokens, model.lm_head = None, nn.Identity()
    mask = None if seen is None else real if seen.size(1) == 1 else seen.expand(-1, s.T, -1).tril().unsqueeze(1)
    call = lambda f, x: f(inputs_embeds=x, attention_mask=mask).logits  # noqa: E731
    return PeerCase(model, call, x, real.int().cumsum(1) > 0)


def _enformer(
    s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, values: int = 24, positions: float = 0.0
) -> PeerCase:
    module = bare.enformer().Attention(
        s.d, num_rel_pos_features=values * 2, heads=s.heads, dim_key=s.d // s.heads, dim_value=values, dropout=dropout,
        pos_dropout=positions,
    )  # fmt: skip
    return PeerCase(module, lambda f, x: f(x), x, torch.ones_like(real))


def _wenet(package: Callable[[], Any]) -> Callable[..., PeerCase]:
    def maker(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, held: int = 0) -> PeerCase:
        module = package().RelPositionMultiHeadedAttention(s.heads, s.d, dropout)
        keys = held + s.T
        encodings = sinusoids(keys - 1, 1 - keys, s.d)
        cache = torch.randn(s.B, s.heads, held, 2 * s.d // s.heads) if held else torch.zeros(0, 0, 0, 0)
        mask = (
            torch.ones(0, 0, 0, dtype=torch.bool)
            if seen is None
            else torch.nn.functional.pad(seen, (held, 0), value=True)
        )
        return PeerCase(
            module, lambda f, x: f(x, x, x, mask, encodings.to(x.dtype), cache.to(x.dtype))[0], x, _alive(seen, real)
        )

    return maker


def _fireredasr(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float) -> PeerCase:
    module = bare.fireredasr().RelPosMultiHeadAttention(s.heads, s.d, dropout)
    encodings = sinusoids(s.T - 1, 1 - s.T, s.d)
    return PeerCase(module, lambda f, x: f(x, x, x, encodings.to(x.dtype), mask=seen)[0], x, _alive(seen, real))


def _espnet(package: Callable[[], Any], legacy: bool = False, zero_triu: bool = False) -> Callable[..., PeerCase]:
    def maker(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float) -> PeerCase:
        name = "Legacy" * legacy + "RelPositionMultiHeadedAttention"
        module = getattr(package(), name)(s.heads, s.d, dropout, zero_triu)
        encodings = sinusoids(s.T - 1, 0 if legacy else 1 - s.T, s.d)
        return PeerCase(module, lambda f, x: f(x, x, x, encodings.to(x.dtype), seen), x, _alive(seen, real))

    return maker


def _transducer(package: Callable[[], Any], name: str) -> Callable[..., PeerCase]:
    """Return a maker; held: number of frames before the chunk, from a cache filled by streaming;
    simplified: whether a bias replaces the products with encodings."""

    def maker(
        s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, held: int = 0, simplified: bool = False
    ) -> PeerCase:
        module = getattr(package(), name)(s.heads, s.d, dropout, simplified)
        encodings = sinusoids(held + s.T - 1, 1 - s.T, s.d)
        before = torch.randn(s.B, held, s.d)
        padding = torch.cat([torch.zeros(s.B, held, dtype=torch.bool), ~real], 1)
        # The module's chunk mask is shared by all batch rows, so that of a row without padding is
        # used.
        hidden = None if seen is None or seen.size(1) == 1 else ~seen[0]

        def call(f: nn.Module, x: Tensor) -> Tensor:
            keys = torch.cat([before.to(x.dtype), x], 1)
            return f(x, keys, keys, encodings.to(x.dtype), padding, hidden, left_context=held)

        return PeerCase(module, call, x, _alive(seen, real))

    return maker


def _speechbrain(
    s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, vbias: bool = False, weights: bool = False
) -> PeerCase:
    module = bare.speechbrain().RelPosMHAXL(s.d, s.heads, dropout, vbias=vbias)
    encodings = sinusoids(s.T - 1, 1 - s.T, s.d)
    hidden = None if seen is None or seen.size(1) == 1 else ~seen[0]
    padding = None if seen is None else ~real

    def call(f: nn.Module, x: Tensor) -> Tensor:
        out: Any = f(x, x, x, encodings.to(x.dtype), padding, hidden, return_attn_weights=weights)
        return out[0] if weights else out

    return PeerCase(module, call, x, _alive(seen, real))


def _xlnet(
    s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, segments: int = 0, memory: int = 0,
    positions: float = 0.0, all_rows: bool = False,
) -> PeerCase:  # fmt: skip
    m = bare.transformers("xlnet")
    module = m.XLNetRelativeAttention(m.XLNetConfig(d_model=s.d, n_head=s.heads, dropout=dropout, d_inner=s.d))
    shell = SimpleNamespace(d_model=s.d, attn_type="bi", bi_data=False, clamp_len=-1)
    shell.positional_embedding = m.XLNetModel.positional_embedding
    encodings = m.XLNetModel.relative_positional_encoding(shell, s.T, s.T + memory, s.B)
    if positions:
        encodings = torch.nn.functional.dropout(encodings, positions)
    mask = None
    # in the form that its model makes: [q, k, B, 1], 1 for masked pairs, the own token never masked
    if seen is not None:
        full = _square(seen, s)
        assert full is not None
        hidden = (~full).permute(1, 2, 0).float()
        hidden = torch.cat([torch.zeros(s.T, memory, s.B), hidden], 1).unsqueeze(-1)
        own = torch.cat([torch.zeros(s.T, memory), torch.eye(s.T)], 1)[:, :, None, None]
        mask = ((hidden - own) > 0).float()
    matrix = None
    if segments:
        of = torch.arange(s.T).unsqueeze(1) * segments // s.T + torch.zeros(1, s.B, dtype=torch.long)
        earlier = torch.zeros(memory, s.B, dtype=torch.long)
        matrix = torch.nn.functional.one_hot((of.unsqueeze(1) != torch.cat([earlier, of])).long(), 2).float()
    mems = torch.randn(memory, s.B, s.d) if memory else None

    def call(f: nn.Module, x: Tensor) -> Tensor:
        own = [None if y is None else y.to(x.dtype) for y in (mask, encodings, matrix, mems)]
        return f(x, None, own[0], None, own[1], own[2], own[3])[0]

    counts = torch.ones(s.T, s.B) > 0 if all_rows or seen is None else real.T  # outputs at padding go into its memory
    return PeerCase(module, call, x.transpose(0, 1).contiguous(), counts)


def _ding(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, memory: int = 30) -> PeerCase:
    m = bare.ding()
    module = m.AttentionXL(s.d, s.d // s.heads, s.heads, nn.Dropout(dropout) if dropout else nn.Identity())
    u, v = torch.randn(2, s.heads, s.d // s.heads) * 0.3
    mask = torch.ones(s.T, memory + s.T).triu(1 + memory).bool().unsqueeze(-1)
    encodings = m.PositionalEmbedding(s.d)(torch.arange(memory + s.T - 1, -1, -1.0))
    mems = torch.randn(memory, s.B, s.d)

    def call(f: nn.Module, x: Tensor) -> Tensor:
        full = torch.cat([mems.to(x.dtype), x])
        return f(x, encodings.to(x.dtype), full, u.to(x.dtype), v.to(x.dtype), mask)

    return PeerCase(module, call, x.transpose(0, 1).contiguous(), torch.ones(s.T, s.B) > 0)


def _rllib(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float, memory: int = 30) -> PeerCase:
    module = bare.rllib().RelativeMultiHeadAttention(s.d, s.d, s.heads, s.d // s.heads, True, nn.ReLU)
    mems = torch.randn(s.B, memory, s.d)
    return PeerCase(module, lambda f, x: f(x, mems.to(x.dtype)), x, torch.ones_like(real))


class ZipformerAttention(nn.Module):
    """The attention of Zipformer's layer: the module that computes weights, and the three that
    multiply them by values."""

    def __init__(self, m: Any, s: Sizes, dropout: float) -> None:
        super().__init__()
        width = s.d // s.heads
        self.weights = m.RelPositionMultiheadAttentionWeights(s.d, 48, s.heads, width, 4, dropout)
        self.nonlin = m.NonlinAttention(s.d, 3 * s.d // 4)
        self.first, self.second = (m.SelfAttention(s.d, s.heads, 12) for _ in range(2))

    def forward(self, x: Tensor, pos_emb: Tensor, padding: Tensor | None, hidden: Tensor | None) -> Tensor:
        weights = self.weights(x, pos_emb=pos_emb, attn_mask=hidden, key_padding_mask=padding)
        x = x + self.nonlin(x, weights[0:1])
        x = x + self.first(x, weights)
        return x + self.second(x, weights)


def _zipformer(package: Callable[[], Any]) -> Callable[..., PeerCase]:
    def maker(s: Sizes, seen: Tensor | None, real: Tensor, x: Tensor, dropout: float) -> PeerCase:
        m = package()
        module = ZipformerAttention(m, s, dropout)
        for part in module.modules():
            if type(part).__name__ in ("Balancer", "Whiten"):  # their penalties are random
                del part.prob
                part.prob = 0.0
        nn.init.normal_(module.weights.linear_pos.weight, 0, 0.3)
        encodings = m.CompactRelPositionalEncoding(48, 0.15).eval()(x.transpose(0, 1))
        padding = None if seen is None else ~real
        hidden = None if seen is None or seen.size(1) == 1 else ~seen
        if hidden is not None and hidden.size(0) > 1:  # its own masks are the same for all rows
            hidden = hidden[0] if torch.equal(hidden, hidden[:1].expand_as(hidden)) else hidden

        def call(f: nn.Module, x: Tensor) -> Tensor:
            return f(x, encodings.to(x.dtype), padding, hidden)

        return PeerCase(module, call, x.transpose(0, 1).contiguous(), torch.ones(s.T, s.B) > 0)

    return maker


# Makers of stacks of layers, which share biases.
STACKS = ("t5", "t5 decoder", "mt5", "umt5", "umt5 decoder", "switch", "switch decoder", "pop2piano", "longt5 decoder",
          "udop decoder", "pix2struct", "longt5 local", "mpnet", "mpt", "speecht5", "wavlm", "espnet beats",
          "speechbrain beats")  # fmt: skip
MAKERS: dict[str, Callable[..., PeerCase]] = {
    "wav2vec2-conformer": _hugging_face("wav2vec2_conformer", "Wav2Vec2ConformerConfig", "Wav2Vec2ConformerSelfAttention",
                                        position_embeddings_type="relative"),
    "w2v-bert relative": _hugging_face("wav2vec2_bert", "Wav2Vec2BertConfig", "Wav2Vec2BertSelfAttention",
                                       position_embeddings_type="relative"),
    "w2v-bert relative_key": _hugging_face("wav2vec2_bert", "Wav2Vec2BertConfig", "Wav2Vec2BertSelfAttention",
                                           position_embeddings_type="relative_key", left_max_position_embeddings=20,
                                           right_max_position_embeddings=8),
    "seamless": _hugging_face("seamless_m4t", "SeamlessM4TConfig", "SeamlessM4TConformerSelfAttention"),
    "seamless v2": _hugging_face("seamless_m4t_v2", "SeamlessM4Tv2Config", "SeamlessM4Tv2ConformerSelfAttention"),
    "parakeet": _parakeet("parakeet", "ParakeetEncoderAttention", "ParakeetEncoderConfig"),
    "nemotron": _parakeet("nemotron_asr_streaming", "NemotronAsrStreamingEncoderAttention",
                          "NemotronAsrStreamingEncoderConfig"),
    "fastspeech2": _fastspeech2,
    "nemo": _nemo,
    "nemo local": _nemo_local,
    "nemo transformer": _nemo_transformer,
    "granite": _granite("granite_speech", "GraniteSpeech"),
    "granite plus": _granite("granite_speech_plus", "GraniteSpeechPlus"),
    "granite 5": _granite5,
    "gemma": _gemma,
    "gemma 4": _gemma4,
    "t5": _t5("T5", False),
    "t5 decoder": _t5("T5", True),
    "mt5": _t5("MT5", False),
    "umt5": _t5("UMT5", False),
    "umt5 decoder": _t5("UMT5", True),
    "switch": _t5("SwitchTransformers", False, "switch_transformers"),
    "switch decoder": _t5("SwitchTransformers", True, "switch_transformers", num_decoder_layers=3),
    "pop2piano": _t5("Pop2Piano", False),
    "longt5 decoder": _t5("LongT5", True),
    "udop decoder": _t5("Udop", True),
    "pix2struct": _pix2struct,
    "longt5 local": _t5("LongT5", False, encoder_attention_type="local", local_radius=6),
    "mpnet": _mpnet,
    "mpt": _mpt,
    "speecht5": _speecht5,
    "wavlm": _wavlm,
    "espnet beats": _beats(bare.espnet_beats),
    "speechbrain beats": _beats(bare.speechbrain_beats),
    "enformer": _enformer,
    "cosyvoice": _wenet(bare.cosyvoice),
    "fireredasr": _fireredasr,
    "espnet": _espnet(bare.espnet),
    "espnet zero_triu": _espnet(bare.espnet, zero_triu=True),
    "funasr": _espnet(bare.funasr),
    "espnet legacy": _espnet(bare.espnet, legacy=True),
    "funasr legacy": _espnet(bare.funasr, legacy=True),
    "espnet transducer": _transducer(bare.espnet_transducer, "RelPositionMultiHeadedAttention"),
    "funasr chunk": _transducer(bare.funasr, "RelPositionMultiHeadedAttentionChunk"),
    "speechbrain": _speechbrain,
    "xlnet": _xlnet,
    "ding": _ding,
    "rllib": _rllib,
    "zipformer": _zipformer(bare.zipformer),
    "zipenhancer": _zipformer(bare.zipenhancer),
    "modelscope zipenhancer": _zipformer(bare.modelscope),
}  # fmt: skip
