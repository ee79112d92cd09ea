"""The original TensorFlow code's checkpoints, as examples/tensorflow_checkpoint.py wrote them."""

import re
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.importing import pickles
from txl.importing.names import Foreign, Lengths, ties
from txl.model.config import ModelConfig

_PREFIX, _EMBED, _SOFTMAX = "transformer/", "adaptive_embed/", "adaptive_softmax/"
_OPTIMIZERS = re.compile(r".*/Adam(_\d+)?|beta[12]_power(_\d+)?|global_step")
_NORM_EPS = 1e-12
_LAYER = {  # TensorFlow's name: PyTorch's, and whether it is transposed
    "rel_attn/qkv/kernel": ("dec_attn.qkv_net.weight", True),
    "rel_attn/r/kernel": ("dec_attn.r_net.weight", True),
    "rel_attn/o/kernel": ("dec_attn.o_net.weight", True),
    "rel_attn/LayerNorm/gamma": ("dec_attn.layer_norm.weight", False),
    "rel_attn/LayerNorm/beta": ("dec_attn.layer_norm.bias", False),
    "ff/layer_1/kernel": ("pos_ff.CoreNet.0.weight", True),
    "ff/layer_1/bias": ("pos_ff.CoreNet.0.bias", False),
    "ff/layer_2/kernel": ("pos_ff.CoreNet.3.weight", True),
    "ff/layer_2/bias": ("pos_ff.CoreNet.3.bias", False),
    "ff/LayerNorm/gamma": ("pos_ff.layer_norm.weight", False),
    "ff/LayerNorm/beta": ("pos_ff.layer_norm.bias", False),
}


def read(path: Path, lengths: Lengths) -> Foreign:
    """Read a checkpoint. Its memory begins with zeros; same_length becomes a window of mem_len + 1
    keys.

    Raises:
        TxlError, or others: it is damaged, not of this model, or mem_len is not given.
    """
    held = {name: x for name, x in pickles.tensors(path).items() if not _OPTIMIZERS.fullmatch(name)}
    unknown = [name for name in held if not name.startswith(_PREFIX)]
    if unknown:
        raise TxlError(f"unknown tensors: {', '.join(sorted(unknown)[:3])}")
    if lengths.mem_len is None:
        raise TxlError("a TensorFlow checkpoint does not say how long its memory is: give --mem-len")
    given = {name.removeprefix(_PREFIX): x for name, x in held.items()}
    config = _config({name: tuple(x.shape) for name, x in given.items()}, lengths)
    return Foreign(config, _renamed(given, config), lengths.segment or max(lengths.mem_len, 1), None)


def _config(shapes: dict[str, tuple[int, ...]], lengths: Lengths) -> ModelConfig:
    """Derive the configuration from the shapes of the tensors."""
    n_layer = len({name.split("/")[0] for name in shapes if name.startswith("layer_")})
    d_model, d_inner = shapes["layer_0/ff/layer_1/kernel"]
    *untied, n_head, d_head = shapes["r_w_bias"]
    div_val, (table, *_) = 1, [shapes.get(f"{_EMBED}lookup_table", ())]
    if table:
        rows = _each(shapes, f"{_SOFTMAX}cutoff_{{}}/b") or [(table[0],)]
        d_embed = table[1]
    else:
        rows = _each(shapes, f"{_EMBED}cutoff_{{}}/lookup_table")
        d_embed = rows[0][1]
        div_val = rows[0][1] // rows[1][1] if len(rows) > 1 else 2
    ends = tuple(accumulate(x[0] for x in rows))
    proj_same_dim = div_val == 1 or d_embed != d_model or f"{_EMBED}cutoff_0/proj_W" in shapes
    needed = [
        width != d_model or (div_val > 1 and proj_same_dim)
        for width in (d_embed // div_val**i for i in range(len(ends)))
    ]
    tied = [need and f"{_SOFTMAX}cutoff_{i}/proj" not in shapes for i, need in enumerate(needed)]
    return ModelConfig(
        vocab_size=ends[-1],
        n_layer=n_layer,
        d_model=d_model,
        n_head=n_head,
        d_head=d_head,
        d_inner=d_inner,
        mem_len=lengths.mem_len or 0,
        window=(lengths.mem_len or 0) + 1 if lengths.same_length else None,
        clamp_len=lengths.clamp_len,
        untie_r=bool(untied),
        norm_eps=_NORM_EPS,
        initial_memory="zeros",
        cutoffs=ends[:-1],
        div_val=div_val,
        d_embed=d_embed,
        tie_projs=ties(tied),
        proj_same_dim=proj_same_dim,
    )


def _each(shapes: dict[str, tuple[int, ...]], name: str) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors whose name has 0, 1, .. in its place, up to the first that
    is missing."""
    found: list[tuple[int, ...]] = []
    while name.format(len(found)) in shapes:
        found.append(shapes[name.format(len(found))])
    return found


def _renamed(given: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename tensors to the original PyTorch names; unknown names are kept, and reported later."""
    names = {f"{_EMBED}lookup_table": ("word_emb.emb_layers.0.weight", False),
             f"{_EMBED}proj_W": ("word_emb.emb_projs.0", True),
             f"{_SOFTMAX}bias": ("crit.out_layers.0.bias", False),
             f"{_SOFTMAX}cutoff_0/cluster_W": ("crit.cluster_weight", False),
             f"{_SOFTMAX}cutoff_0/cluster_b": ("crit.cluster_bias", False)}  # fmt: skip
    for i in range(len(config.cutoffs) + 1):
        names[f"{_EMBED}cutoff_{i}/lookup_table"] = (f"word_emb.emb_layers.{i}.weight", False)
        names[f"{_EMBED}cutoff_{i}/proj_W"] = (f"word_emb.emb_projs.{i}", True)
        names[f"{_SOFTMAX}cutoff_{i}/b"] = (f"crit.out_layers.{i}.bias", False)
        names[f"{_SOFTMAX}cutoff_{i}/proj"] = (f"crit.out_projs.{i}", True)
    for n in range(config.n_layer):
        names |= {f"layer_{n}/{a}": (f"layers.{n}.{b}", turned) for a, (b, turned) in _LAYER.items()}
    found: dict[str, Tensor] = {}
    for name, x in given.items():
        theirs, turned = names.get(name, (name, False))
        if turned and x.dim() != 2:
            raise TxlError(f"{name} must be a matrix, got shape {list(x.shape)}")
        found[theirs] = x.t() if turned else x
    biases = [f"crit.out_layers.{i}.bias" for i in range(len(config.cutoffs) + 1)]
    if config.div_val == 1 and len(biases) > 1 and all(x in found for x in biases):
        found[biases[0]] = torch.cat([found.pop(x).flatten() for x in biases])
    if config.untie_r:
        for name in ("r_w_bias", "r_r_bias"):
            for n, x in enumerate(found.pop(name, ())):
                found[f"layers.{n}.dec_attn.{name}"] = x
    return found
