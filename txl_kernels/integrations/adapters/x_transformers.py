"""x-transformers: its core attention (`Attend`) with T5's biases, ALiBi, the biases of a network of
the distance, or Inkling's term.

The modules of positions return an object in place of biases of all pairs, which `Attend` reads. All
else of the package's `Attention`, such as projections, norms, gates, rotations and caches, stays
the original's.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_kernels.integrations.adapters.lazy_tensor import LazyTensor
from txl_kernels.integrations.attention import attend, bounds_or_reason, dropout_of
from txl_kernels.integrations.peer import STATE, Accelerated, Peer
from txl_kernels.integrations.source import module_of

# The attributes of Attend that the kernels take, whatever their values are. Those that are not
# named here must be None or False, as all of Attend's other options are by default.
_TAKEN = (
    "scale", "causal", "create_causal_mask", "attn_fn", "dropout", "attn_dropout", "head_learned_sink", "head_attn_sink",
    "softclamp_logits", "logit_softclamp_value", "flash", "sdp_context_manager", STATE,
)  # fmt: skip
_OF_MODULES = frozenset(vars(nn.Module()))


class RelativeBias(LazyTensor):
    """An object in place of biases of all pairs.

    Attributes:
        terms: the settings of `attend` that describe them.
        pairs: the numbers of queries and keys.
    """

    def __init__(self, compute: Callable[[], Tensor], terms: dict[str, Any], pairs: tuple[int, int]) -> None:
        super().__init__(compute, next(x.device for x in terms.values() if isinstance(x, Tensor)))
        self.terms, self.pairs = terms, pairs

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.pad and isinstance(args[0], cls) and not any(args[1]):
            return args[0]
        return super().__torch_function__(function, types, args, kwargs)


class Biases(Accelerated):
    """The base class of adapters of modules that compute biases of all pairs."""

    def stand_in(self: Any, terms: dict[str, Any], pairs: tuple[int, int], *args: Any) -> RelativeBias:
        """Return an object for the result of the original with these arguments."""
        return RelativeBias(lambda: self.fall_back("biases of all pairs are needed", *args), terms, pairs)


class FixedBiases(Biases):
    """Biases of the distance alone, of i queries and j keys; the queries are at the last i keys."""

    def forward(self: Any, i: int, j: int) -> RelativeBias | str:
        some = next(itertools.chain(self.parameters(), self.buffers()))
        why = self.why_not_kernel(some)
        if why is not None:
            return why  # type: ignore[no-any-return]
        terms = {"r_bias": self.biases(torch.arange(1 - i, j, device=some.device)), "zero_row": i - 1}
        return self.stand_in(terms, (i, j), i, j)  # type: ignore[no-any-return]

    def biases(self: Any, distances: Tensor) -> Tensor:
        """Return the biases [H, T] of distances [T], positive for keys before their query."""
        raise NotImplementedError


class T5Biases(FixedBiases):
    needs = ("relative_attention_bias", "num_buckets", "max_distance", "scale")

    def biases(self: Any, distances: Tensor) -> Tensor:
        buckets = self._relative_position_bucket(
            -distances, causal=self.causal, num_buckets=self.num_buckets, max_distance=self.max_distance
        )
        biases: Tensor = self.relative_attention_bias(buckets).t() * self.scale
        return biases


class ALiBi(FixedBiases):
    needs = ("slopes", "total_heads")

    def biases(self: Any, distances: Tensor) -> Tensor:
        biases = -distances.abs() * self.slopes.flatten().unsqueeze(1)
        return F.pad(biases, (0, 0, 0, self.total_heads - biases.size(0)))


class DynamicBiases(FixedBiases):
    needs = ("mlp", "log_distance")

    def biases(self: Any, distances: Tensor) -> Tensor:
        x = distances.float().unsqueeze(-1)
        if self.log_distance:
            x = x.sign() * torch.log(x.abs() + 1)
        for layer in self.mlp:
            x = layer(x)
        return x.t()


class InklingBiases(Biases):
    """Inkling's term: position queries multiply a table of distances, which all heads share."""

    needs = ("to_distance_weights", "distance_bank", "max_dist")

    def forward(self: Any, x: Tensor, seq_len_k: int | None = None) -> RelativeBias | str:
        why = self.why_not_kernel(x)
        if why is not None:
            return why  # type: ignore[no-any-return]
        q_pos = self.to_distance_weights(x)
        terms = {"r": self.distance_bank.t().unsqueeze(0), "q_pos": q_pos, "zero_row": 0, "outside": "zero"}
        keys = x.size(1) if seq_len_k is None else seq_len_k
        return self.stand_in(terms, (x.size(1), keys), x, seq_len_k)  # type: ignore[no-any-return]


def _of_pairs(name: str) -> property:
    """Return an attribute of intermediates that is computed when it is read, from "inputs" where
    the attribute is None."""

    def get(self: Any) -> Any:
        state = vars(self)
        if state.get(name) is None and "inputs" in state:
            module, args, kwargs = state.pop("inputs")
            found = module.fall_back("attention weights asked for", *args, **kwargs)[1]
            state |= {x: getattr(found, x) for x in _OF_PAIRS}
        return state.get(name)

    def put(self: Any, value: Any) -> None:
        vars(self)[name] = value

    return property(get, put)


_OF_PAIRS = ("qk_similarities", "pre_softmax_attn", "post_softmax_attn")


class Attend(Accelerated):
    """The core of the package's attention.

    The scores and weights in its intermediates, which TransformerWrapper reads if it is asked for
    attention maps or a z-loss, are computed by the original when they are read.
    """

    skips = ("attn_dropout",)
    needs = ("attn_fn", "attn_dropout", "create_causal_mask", "softclamp_logits", "head_attn_sink")
    intermediates: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Prepare an accelerated class: that of its intermediates, a subclass of the original's."""
        super().__init_subclass__(**kwargs)
        kind = module_of(cls.original).Intermediates
        cls.intermediates = type(kind.__name__, (kind,), {name: _of_pairs(name) for name in _OF_PAIRS})

    def forward(
        self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, attn_bias: Any = None,
        prev_attn: Any = None, attn_delta: Any = None, row_mask: Any = None, flash_pack_seq_kwargs: Any = None,
        causal: bool | None = None,
    ) -> tuple[Tensor, Any] | str:  # fmt: skip
        dropout_p = float(self.dropout) * self.training if self.flash else dropout_of(self.attn_dropout)
        why = self.why_not_kernel(q, dropout_p) or _why_not_bias(attn_bias, q, k)
        if prev_attn is not None or attn_delta is not None or flash_pack_seq_kwargs is not None:
            why = "scores or weights of another layer, or packed sequences"
        elif mask is not None and mask.dim() == 4 and mask.size(1) != 1:
            why = why or "a mask for each head"
        bounds = bounds_or_reason(why, mask, _visible, keys=k.size(-2))
        if isinstance(bounds, str):
            return bounds
        if causal is None or self.flash:  # its flash attention does not read the argument
            causal = self.causal
        groups, terms = k.size(1), dict(attn_bias.terms)
        for name, axis in (("r_bias", 0), ("q_pos", 1)):
            if name in terms:
                terms[name] = _in_groups(terms[name], groups, axis).to(q.dtype)
        r = terms.pop("r", None)
        r = None if r is None else r.to(q.dtype).contiguous()
        of_queries, of_keys, values = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (_in_groups(q, groups, 1), k, v)
        )
        out = attend(
            of_queries, of_keys, values, r, None, None, bounds, **terms, scale=self.scale, position_scale=1.0, causal=causal,
            window=self.setting("window"), dropout_p=dropout_p,
            softcap=self.logit_softclamp_value if self.softclamp_logits else 0.0,
            sink=None if self.head_attn_sink is None else _in_groups(self.head_attn_sink, groups, 0),
        )  # fmt: skip
        intermediates = self.intermediates()
        if not self.flash and self.setting("weights") == "fallback":
            intermediates.inputs = (self, (q, k, v, mask, attn_bias), {"causal": causal})
        return _in_groups(out, q.size(1) // groups, 1), intermediates


def _why_not_bias(bias: Any, q: Tensor, k: Tensor) -> str | None:
    """Return the reason why the kernels do not take a call's biases, or None."""
    if bias is None:
        return "no relative positions"
    if not isinstance(bias, RelativeBias):
        return "biases of all pairs"
    if k.dim() != 4 or q.size(1) % k.size(1) or k.size(2) < q.size(2):
        return "keys of another shape"
    return None if bias.pairs == (q.size(2), k.size(2)) else "biases of other keys than the call's"


def _in_groups(x: Tensor, groups: int, axis: int) -> Tensor:
    """Return x with heads in another order: query head h reads head h % groups of keys in the
    package, and h // (H / groups) in the kernels. With H / groups in place of groups, return the
    package's order again."""
    if groups in (1, x.size(axis)):
        return x
    moved: Tensor = x.unflatten(axis, (-1, groups)).transpose(axis, axis + 1)
    return moved.flatten(axis, axis + 1)


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dim() == 2 else mask[:, 0]


def _why_not(module: Any, ancestors: Sequence[nn.Module]) -> str | None:
    """Return the reason why the kernels do not compute what an Attend asks for, or None."""
    if any(getattr(x, "residual_attn", False) for x in ancestors):
        return "the next layer adds its scores (residual_attn)"
    softmax = module.attn_fn
    keywords = dict(getattr(softmax, "keywords", {}))
    if getattr(softmax, "func", None) is not F.softmax or keywords.pop("dtype", None) not in (None, torch.float32):
        return "its weights are not those of a softmax"
    if softmax.args or keywords != {"dim": -1}:
        return "its softmax is over queries"
    if not (module.scale is None or isinstance(module.scale, float | int)):
        return "its scale is not a number"
    options = {**vars(module), **module._parameters, **module._buffers, **module._modules}
    for name, value in options.items():
        if name not in _TAKEN and name not in _OF_MODULES and value is not None and value is not False:
            return f"its option {name}"
    return None


def _without_positions(module: Any, ancestors: Sequence[nn.Module]) -> str | None:
    """Return a reason unless an Attend is that of a self-attention with relative positions."""
    if getattr(ancestors[-1] if ancestors else None, "rel_proj_pos_bias", None) is not None:
        return None
    stack: Any = next((x for x in reversed(ancestors) if hasattr(x, "rel_pos")), None)
    if stack is None or stack.rel_pos is None:
        return "no relative positions"
    layers = zip(stack.layers, stack.layer_types, strict=True)
    own = any(module is x for (_, layer, _), kind in layers if kind == "a" for x in layer.modules())
    return None if own else "cross-attention, which has no relative positions"


def _peer(name: str, kind: str, adapter: type[Accelerated], found: str, **checks: Any) -> Peer:
    return Peer(name, f"x_transformers.{kind}", adapter, "x-transformers", {"2.31.10": found}, **checks)


PEERS = (
    _peer("XTransformersAttend", "attend.Attend", Attend, "e88e1ddacdf128d7", why_not_module=_why_not,
          why_nothing_to_do=_without_positions),
    _peer("XTransformersT5", "x_transformers.RelativePositionBias", T5Biases, "b97452c8b8266cc0"),
    _peer("XTransformersALiBi", "x_transformers.AlibiPositionalBias", ALiBi, "050de0a553c9959a"),
    _peer("XTransformersDynamic", "x_transformers.DynamicPositionBias", DynamicBiases, "576b5c8103978e11"),
    _peer("XTransformersInkling", "x_transformers.RelativeProjPositionalBias", InklingBiases, "6fbbbd7f358e6187"),
)  # fmt: skip
