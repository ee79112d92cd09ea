"""Translation between txl's parameters and those of the paper's PyTorch code and its
descendants."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.model.adaptive import needs_projection, table_shapes
from txl.model.config import ModelConfig
from txl.text.vocabulary import Vocabulary

_MOST_GROWTH = 4  # bound on growth: float16 becomes float32, and shared projections can become separate
_IGNORED = ("pos_emb.inv_freq",)  # computed, not learned
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
        flipped_clusters: whether the rows of cluster_weight and cluster_bias are in reverse order.
        segment: tokens of a training segment.
        vocabulary: function that reads the vocabulary; None if there is none.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    flipped_clusters: bool
    segment: int
    vocabulary: Callable[[], Vocabulary] | None


def ties(tied: Sequence[bool], what: str) -> Ties:
    """Return `ModelConfig.tie_projs` for flags, one for each bin, that say whether the softmax
    shares the embedding's projection.

    Raises:
        TxlError: `tie_projs` has no value for this pattern; the message begins with `what`.
    """
    tied = list(tied)
    tail = [False] + [True] * (len(tied) - 1)
    kinds: dict[Ties, list[bool]] = {"none": [False] * len(tied), "all": [True] * len(tied), "tail": tail}
    for kind, flags in kinds.items():
        if flags == tied:
            return kind
    raise TxlError(f"{what}: tie_projs must be none, all, or all but the first, got {tied}")


def window(same_length: object, keys: int, what: str) -> int | None:
    """Return the number of keys a token sees if the model was trained with same_length; None for
    all.

    keys: mem_len, or mem_len + 1, depending on the code.
    """
    if not same_length:
        return None
    if keys < 1:
        raise TxlError(f"{what}: same_length needs a memory, got mem_len 0")
    return keys


class Part(NamedTuple):
    """The source of one of txl's parameters.

    Attributes:
        theirs: a name in the other code, or several whose rows are concatenated.
        flipped: whether rows are in reverse order.
    """

    theirs: tuple[str, ...]
    flipped: bool = False


def parts(config: ModelConfig, flipped_clusters: bool) -> tuple[dict[str, Part], dict[str, str]]:
    """Return the source of each txl parameter, and for tied parameters the other code's repeated
    names with the names they repeat.

    flipped_clusters: whether clusters are in reverse order, as in the original's and NVIDIA's code.
    """
    found: dict[str, Part] = {}
    repeated: dict[str, str] = {}
    bins, tables = len(config.embed_widths), len(table_shapes(config))
    projected = [needs_projection(config, width) for width in config.embed_widths]
    for i in range(tables):
        found[f"embedding.tables.{i}"] = Part((f"word_emb.emb_layers.{i}.weight",))
        if projected[i]:
            found[f"embedding.projections.{i}"] = Part((f"word_emb.emb_projs.{i}",))
        own = f"crit.out_layers.{i}.weight"
        if config.tie_weight:
            repeated[own] = f"word_emb.emb_layers.{i}.weight"
        else:
            found[f"softmax.own_tables.{i}"] = Part((own,))
    for i in range(bins):
        if not projected[i]:
            continue
        own = f"crit.out_projs.{i}"
        if config.ties_projection(i):
            repeated[own] = f"word_emb.emb_projs.{0 if config.div_val == 1 else i}"
        else:
            found[f"softmax.own_projections.{i}"] = Part((own,))
    found["softmax.bias"] = Part(tuple(f"crit.out_layers.{i}.bias" for i in range(tables)))
    if bins > 1:
        found["softmax.cluster_weight"] = Part(("crit.cluster_weight",), flipped_clusters)
        found["softmax.cluster_bias"] = Part(("crit.cluster_bias",), flipped_clusters)
    for n in range(config.n_layer):
        found |= _layer(n, config)
        if not config.untie_r:  # a single pair, which has a name in every layer too
            repeated |= {f"layers.{n}.dec_attn.{name}": name for name in ("r_w_bias", "r_r_bias")}
    return found, repeated


def _layer(n: int, config: ModelConfig) -> dict[str, Part]:
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
    found = {ours + a: Part((theirs + b,)) for a, b in names.items()}
    if config.untie_r or n == 0:
        own = f"{theirs}dec_attn." if config.untie_r else ""
        found[f"{ours}attention.content_bias"] = Part((f"{own}r_w_bias",))
        found[f"{ours}attention.position_bias"] = Part((f"{own}r_r_bias",))
    return found


def translate(
    given: Mapping[str, Tensor],
    config: ModelConfig,
    shapes: Mapping[str, torch.Size],
    flipped_clusters: bool,
    what: str,
    softmax: bool = True,
) -> dict[str, Tensor]:
    """Make txl's parameters, float32, from the other code's.

    Args:
        given: the other code's tensors, with prefixes removed.
        shapes: shapes of txl's parameters.
        softmax: False to leave out the softmax's parameters.

    Raises:
        TxlError: a tensor is missing, unknown, of another shape or not floating point, or differs
            from the one it should repeat; the message begins with `what`.
    """
    named, repeated = parts(config, flipped_clusters)
    if not softmax:
        given = {name: x for name, x in given.items() if not name.startswith("crit.")}
        named = _without_softmax(named)
    wanted = {name for part in named.values() for name in part.theirs}
    given = {first: given[name] for name, first in repeated.items() if name in given} | dict(given)
    unknown = sorted(name for name in given if name not in wanted and name not in repeated and name not in _IGNORED)
    if unknown:
        raise TxlError(f"{what}: unknown tensors: {_some(unknown)}")
    missing = sorted(wanted - set(given))
    if missing:
        raise TxlError(f"{what}: missing tensors: {_some(missing)}")
    for name, x in given.items():
        check_plain(x, f"{what}: {_some([name])}")
    for name, first in repeated.items():
        if name in given and not torch.equal(given[name], given[first]):
            raise TxlError(f"{what}: {name} should repeat {first} and differs from it")
    for name, part in named.items():
        _check([given[x] for x in part.theirs], shapes[name], f"{what}: {_some(list(part.theirs))}")
    _refuse_growth(given.values(), shapes.values(), what)
    found: dict[str, Tensor] = {}
    for name, part in named.items():
        x = torch.cat([given[theirs].float() for theirs in part.theirs])
        found[name] = x.flip(0) if part.flipped else x
    return found


def _without_softmax(named: Mapping[str, Part]) -> dict[str, Part]:
    return {name: part for name, part in named.items() if not name.startswith("softmax.")}


def original(parameters: Mapping[str, Tensor], config: ModelConfig, softmax: bool = True) -> dict[str, Tensor]:
    """Make the other code's parameters from txl's, the inverse of `translate`; clusters are in
    natural order, and no tensor is repeated."""
    named, _ = parts(config, flipped_clusters=False)
    found: dict[str, Tensor] = {}
    rows = [count for count, _ in table_shapes(config)]
    for name, part in (named if softmax else _without_softmax(named)).items():
        x = parameters[name]
        pieces = x.split(rows) if len(part.theirs) > 1 else (x,)
        found |= dict(zip(part.theirs, pieces, strict=True))
    return found


def check_plain(x: Tensor, what: str) -> None:
    """Raise TxlError unless the tensor is dense, in memory, and has no more elements than bytes of
    storage."""
    if x.layout != torch.strided or x.is_nested or x.is_quantized or x.device.type == "meta":
        raise TxlError(f"{what} is no dense tensor")
    if x.numel() * x.element_size() > x.untyped_storage().nbytes():
        raise TxlError(f"{what} of shape {list(x.shape)} has only {x.untyped_storage().nbytes():,} bytes")


def _check(tensors: Sequence[Tensor], shape: torch.Size, what: str) -> None:
    """Raise TxlError if the tensors are not floating point, or their concatenation has another
    shape."""
    first = tensors[0]
    if not all(x.is_floating_point() for x in tensors):
        raise TxlError(f"{what} must hold floats, got {', '.join(sorted({str(x.dtype) for x in tensors}))}")
    if any(x.dim() == 0 or x.shape[1:] != first.shape[1:] for x in tensors):
        raise TxlError(f"{what} do not follow each other: shapes {[list(x.shape) for x in tensors]}")
    have = [sum(x.size(0) for x in tensors), *first.shape[1:]]
    if have != list(shape):
        raise TxlError(f"{what} has shape {have}, the configuration needs {list(shape)}")


def _refuse_growth(given: Iterable[Tensor], shapes: Iterable[torch.Size], what: str) -> None:
    """Raise TxlError if the parameters need much more memory than the file has, as with views that
    repeat a small tensor."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in given}
    held, needed = sum(storages.values()), 4 * sum(shape.numel() for shape in shapes)
    if needed > _MOST_GROWTH * held:
        raise TxlError(f"{what}: the configuration needs {needed:,} bytes, the tensors are {held:,}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    shown = (name if name.isprintable() and len(name) < 200 else repr(name[:200]) for name in names[:3])
    return ", ".join(shown) + more
