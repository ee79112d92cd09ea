"""Translation between txl's parameters and those of the paper's PyTorch code and its
descendants."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.model.adaptive import needs_projection, table_shapes
from txl.model.config import ModelConfig

_MAX_GROWTH = 4  # bound on growth: float16 becomes float32, and shared projections can become separate
_COMPUTED = "pos_emb.inv_freq"  # a buffer, not learned
Ties = Literal["none", "tail", "all"]


class Lengths(NamedTuple):
    """Lengths that a TensorFlow checkpoint does not store.

    Attributes:
        mem_len, clamp_len, same_length: the flags of its scripts; clamp_len is None for no limit.
        segment: tokens of a training segment (tgt_len); None for mem_len.
    """

    mem_len: int | None = None
    segment: int | None = None
    clamp_len: int | None = None
    same_length: bool = False


class Foreign(NamedTuple):
    """A checkpoint of other code, as read.

    Attributes:
        tensors: tensors by the names of the original PyTorch code.
        segment: tokens of a training segment.
        vocabulary: the unpickled vocabulary that is in the checkpoint itself, or None.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    segment: int
    vocabulary: Any


def number(x: Any) -> Any:
    """Return a number of a pickle, and for any other object its type's name: nested ones can take
    unlimited time to print."""
    return x if type(x) in (bool, int, float) else type(x).__name__


def ties(tied: Sequence[bool]) -> Ties:
    """Return `ModelConfig.tie_projs` for flags, one for each bin, that say whether the softmax
    shares the embedding's projection.

    Raises:
        TxlError: `tie_projs` has no value for this pattern.
    """
    tied = list(tied)
    tail = [False] + [True] * (len(tied) - 1)
    kinds: dict[Ties, list[bool]] = {"none": [False] * len(tied), "all": [True] * len(tied), "tail": tail}
    for kind, flags in kinds.items():
        if flags == tied:
            return kind
    raise TxlError(f"tie_projs must be none, all, or all but the first, got {tied!s:.100}")


def parts(config: ModelConfig) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the source of each txl parameter: a name in the other code, or several whose rows are
    concatenated; and for tied parameters the other code's repeated names with the names they
    repeat."""
    found: dict[str, tuple[str, ...]] = {}
    repeated: dict[str, str] = {}
    bins, tables = len(config.embed_widths), len(table_shapes(config))
    projected = [needs_projection(config, width) for width in config.embed_widths]
    for i in range(tables):
        found[f"embedding.tables.{i}"] = (f"word_emb.emb_layers.{i}.weight",)
        if projected[i]:
            found[f"embedding.projections.{i}"] = (f"word_emb.emb_projs.{i}",)
        own = f"crit.out_layers.{i}.weight"
        if config.tie_weight:
            repeated[own] = f"word_emb.emb_layers.{i}.weight"
        else:
            found[f"softmax.own_tables.{i}"] = (own,)
    for i in range(bins):
        if not projected[i]:
            continue
        own = f"crit.out_projs.{i}"
        if config.ties_projection(i):
            repeated[own] = f"word_emb.emb_projs.{0 if config.div_val == 1 else i}"
        else:
            found[f"softmax.own_projections.{i}"] = (own,)
    found["softmax.bias"] = tuple(f"crit.out_layers.{i}.bias" for i in range(tables))
    if bins > 1:
        found["softmax.cluster_weight"] = ("crit.cluster_weight",)
        found["softmax.cluster_bias"] = ("crit.cluster_bias",)
    for n in range(config.n_layer):
        found |= _layer(n, config)
        if not config.untie_r:  # a single pair, which has a name in every layer too
            repeated |= {f"layers.{n}.dec_attn.{name}": name for name in ("r_w_bias", "r_r_bias")}
    return found, repeated


def _layer(n: int, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    ours, theirs = f"blocks.{n}.", f"layers.{n}."
    names = {
        "attention.qkv.weight": "dec_attn.qkv_net.weight",
        "attention.r.weight": "dec_attn.r_net.weight",
        "attention.out.weight": "dec_attn.o_net.weight",
    }
    modules = {
        "attention_norm": "dec_attn.layer_norm",
        "feed_forward.0": "pos_ff.CoreNet.0",
        "feed_forward.3": "pos_ff.CoreNet.3",
        "feed_forward_norm": "pos_ff.layer_norm",
    }
    names |= {f"{a}.{kind}": f"{b}.{kind}" for a, b in modules.items() for kind in ("weight", "bias")}
    found: dict[str, tuple[str, ...]] = {ours + a: (theirs + b,) for a, b in names.items()}
    if config.untie_r or n == 0:
        own = f"{theirs}dec_attn." if config.untie_r else ""
        found[f"{ours}attention.content_bias"] = (f"{own}r_w_bias",)
        found[f"{ours}attention.position_bias"] = (f"{own}r_r_bias",)
    return found


def translate(given: Mapping[str, Tensor], config: ModelConfig, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Make txl's parameters from the other code's.

    Args:
        given: the other code's tensors, with prefixes removed.
        shapes: shapes of the parameters to make, such as all of a trunk or of a model.

    Raises:
        TxlError: a tensor is missing, unknown, of another shape or not floating point, or differs
            from the one it should repeat.
    """
    named, repeated = parts(config)
    unknown = sorted(given.keys() - {x for theirs in named.values() for x in theirs} - repeated.keys() - {_COMPUTED})
    if unknown:
        raise TxlError(f"unknown tensors: {_some(unknown)}")
    named = {name: theirs for name, theirs in named.items() if name in shapes}
    given = {first: given[name] for name, first in repeated.items() if name in given} | dict(given)
    missing = sorted({x for theirs in named.values() for x in theirs} - given.keys())
    if missing:
        raise TxlError(f"missing tensors: {_some(missing)}")
    for name, first in repeated.items():
        if name in given and not torch.equal(given[name], given[first]):
            raise TxlError(f"{name} should repeat {first} and differs from it")
    for name, theirs in named.items():
        _check([given[x] for x in theirs], shapes[name], _some(list(theirs)))
    _refuse_growth(given.values(), shapes.values())
    return {name: torch.cat([given[x] for x in theirs]) for name, theirs in named.items()}


def original(parameters: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Make the other code's parameters from those of txl that are given, the inverse of
    `translate`; no tensor is repeated."""
    found: dict[str, Tensor] = {}
    rows = [count for count, _ in table_shapes(config)]
    for name, theirs in parts(config)[0].items():
        if name in parameters:
            x = parameters[name]
            found |= dict(zip(theirs, x.split(rows) if len(theirs) > 1 else (x,), strict=True))
    return found


def _check(tensors: Sequence[Tensor], shape: torch.Size, what: str) -> None:
    """Raise TxlError if the tensors are not floating point, or their concatenation has another
    shape."""
    if not all(x.is_floating_point() for x in tensors):
        raise TxlError(f"{what} must hold floats, got {', '.join(sorted({str(x.dtype) for x in tensors}))}")
    rest = any(x.dim() != len(shape) or x.shape[1:] != shape[1:] for x in tensors)
    if rest or sum(x.size(0) for x in tensors) != shape[0]:
        have = " + ".join(str(list(x.shape)) for x in tensors)
        raise TxlError(f"{what} has shape {have:.200}, the configuration needs {list(shape)}")


def _refuse_growth(given: Iterable[Tensor], shapes: Iterable[torch.Size]) -> None:
    """Raise TxlError if the parameters need much more memory than the file has, as with views that
    repeat a small tensor."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in given}
    held, needed = sum(storages.values()), 4 * sum(shape.numel() for shape in shapes)
    if needed > _MAX_GROWTH * held:
        raise TxlError(f"the configuration needs {needed:,} bytes, the tensors are {held:,}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    shown = (name if name.isprintable() and len(name) < 200 else repr(name[:200]) for name in names[:3])
    return ", ".join(shown) + more
