"""Small whole models of other libraries with random weights, and arguments with padding."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from implementations import bare_peers

LENGTHS = (60, 41, 24)  # frames or tokens of each batch row
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
TWO = SIZES | {"num_hidden_layers": 2}
CONVOLUTIONS = {
    "conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (4, 2), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
W2V_BERT = TWO | {
    "feature_projection_input_dim": 10, "left_max_position_embeddings": 12, "right_max_position_embeddings": 5,
    "mask_time_prob": 0.0, "layerdrop": 0.0, "conformer_conv_dropout": 0.0,
}  # fmt: skip
WAVLM = SIZES | CONVOLUTIONS | {"num_hidden_layers": 3, "num_buckets": 20, "max_bucket_distance": 30}
SEAMLESS = {  # with an adapter, whose attention has no relative positions
    "hidden_size": 32, "speech_encoder_layers": 2, "speech_encoder_attention_heads": 2, "num_adapter_layers": 1,
    "speech_encoder_intermediate_size": 32, "feature_projection_input_dim": 16, "add_adapter": True,
}  # fmt: skip


class Kind(NamedTuple):
    """A model of transformers: its folder, the prefix of its classes, that of its model and of its
    configuration, the sizes, and its input.

    width: of an input of features; 0 for samples, None for tokens. scale: samples or features for
    each unit of LENGTHS. layers: attention modules that are accelerated. names: those of its input
    and mask.
    """

    folder: str
    config: str
    model: str
    sizes: dict[str, Any]
    width: int | None = None
    scale: int = 1
    layers: int = 2
    names: tuple[str, str] = ("input_features", "attention_mask")


KINDS: dict[str, Kind] = {
    "Wav2Vec2-Conformer": Kind("wav2vec2_conformer", "Wav2Vec2ConformerConfig", "Wav2Vec2ConformerModel",
                               TWO | CONVOLUTIONS | {"position_embeddings_type": "relative"}, 0, 8),
    "w2v-BERT relative": Kind("wav2vec2_bert", "Wav2Vec2BertConfig", "Wav2Vec2BertModel",
                              W2V_BERT | {"position_embeddings_type": "relative"}, 10),
    "w2v-BERT relative_key": Kind("wav2vec2_bert", "Wav2Vec2BertConfig", "Wav2Vec2BertModel",
                                  W2V_BERT | {"position_embeddings_type": "relative_key"}, 10),
    "Parakeet": Kind("parakeet", "ParakeetEncoderConfig", "ParakeetEncoder",
                     TWO | {"num_mel_bins": 16, "subsampling_conv_channels": 8, "layerdrop": 0.0}, 16),
    "SeamlessM4T": Kind("seamless_m4t", "SeamlessM4TConfig", "SeamlessM4TSpeechEncoder", SEAMLESS, 16),
    "SeamlessM4Tv2": Kind("seamless_m4t_v2", "SeamlessM4Tv2Config", "SeamlessM4Tv2SpeechEncoder", SEAMLESS, 16),
    "WavLM": Kind("wavlm", "WavLMConfig", "WavLMModel", WAVLM, 0, 8, 3),
    "WavLM, norm first": Kind("wavlm", "WavLMConfig", "WavLMModel", WAVLM | {"do_stable_layer_norm": True}, 0, 8, 3),
    "MPNet": Kind("mpnet", "MPNetConfig", "MPNetModel", SIZES | {"num_hidden_layers": 3, "vocab_size": 40}, layers=4),
    "T5": Kind("t5", "T5Config", "T5EncoderModel",
               {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "XLNet": Kind("xlnet", "XLNetConfig", "XLNetLMHeadModel",
                  {"vocab_size": 40, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 32, "mem_len": 16, "dropout": 0}),
    "Gemma 3n": Kind("gemma3n", "Gemma3nAudioConfig", "Gemma3nAudioEncoder",
                     {"hidden_size": 32, "conf_num_attention_heads": 4, "conf_num_hidden_layers": 2,
                      "conf_attention_context_left": 9, "conf_attention_chunk_size": 8, "sscp_conv_channel_size": (8, 4),
                      "input_feat_size": 32}, 32, 3, names=("audio_mel", "audio_mel_mask")),
    "Gemma 4": Kind("gemma4", "Gemma4AudioConfig", "Gemma4AudioModel",
                    {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "output_proj_dims": 16,
                     "subsampling_conv_channels": (8, 4), "attention_chunk_size": 8, "attention_context_left": 9}, 8, 3),
    "Nemotron": Kind("nemotron_asr_streaming", "NemotronAsrStreamingEncoderConfig", "NemotronAsrStreamingEncoder",
                     TWO | {"num_mel_bins": 32, "subsampling_conv_channels": 8, "sliding_window": 29,
                            "default_num_lookahead_tokens": 3}, 32),
}  # fmt: skip
ENCODERS = tuple(KINDS)[:6]  # those with several attention implementations


def model_of(name: str, seed: int = 0, **options: Any) -> Any:
    kind = KINDS[name]
    m = bare_peers.transformers(kind.folder)
    torch.manual_seed(seed)
    return randomized(getattr(m, kind.model)(getattr(m, kind.config)(**kind.sizes | options)))


def randomized(model: nn.Module) -> Any:
    """Return a model in evaluation mode, with biases and norms that matter."""
    for name, p in model.named_parameters():
        if p.device.type != "meta" and (p.dim() == 1 or "bias" in name or not p.any()):
            nn.init.normal_(p, 1.0 if "norm" in name and "weight" in name else 0.0, 0.2)
    return model.eval()


def arguments_of(name: str) -> dict[str, Tensor]:
    """Return the input of a model and its mask of padding on the right."""
    kind = KINDS[name]
    lengths = torch.tensor(LENGTHS) * kind.scale
    shape = (len(LENGTHS), int(lengths[0]))
    generator = torch.Generator("cpu").manual_seed(1)
    if kind.width is None:
        names, x = ("input_ids", "attention_mask"), torch.randint(4, 40, shape, generator=generator)
    else:
        names, x = kind.names, torch.randn(*shape, *[kind.width] * bool(kind.width), generator=generator)
        names = names if kind.width else ("input_values", "attention_mask")
    real = torch.arange(shape[1]) < lengths.unsqueeze(1)
    mask = ~real if name == "Gemma 3n" else real if name == "Gemma 4" else real.long()
    return dict(zip(names, (x, mask), strict=True))


def valid_parts(out: Tensor) -> list[Tensor]:
    """Return the frames of each batch row of out [B, T, d] that no padding reaches."""
    return [out[b, : max(out.size(1) * n // max(LENGTHS) - 2, 1)] for b, n in enumerate(LENGTHS)]
