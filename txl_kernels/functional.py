"""Attention as functions. `rel_attention` checks its arguments, chooses a backend and runs it;
`rel_attention_weights` returns the softmax weights."""

import functools
import inspect
import math
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from txl_kernels import checks, composed, operators, torch_state
from txl_kernels.backends import reference
from txl_kernels.call import INPUT, INPUTS, Call, changed, inputs_of
from txl_kernels.checks import KeyValuePair, Outside, Window, autocast_dtype, memory_pair, span
from txl_kernels.composed import Chunk
from txl_kernels.prepare import check_special, choose, prepare
from txl_kernels.seed import seeded

_PACKED = "packed sequences in one batch row, with start and end of bounds_from_cu_seqlens"
_NO_TABLE = "position_bias must be None where r is None: it multiplies rows of r"


@overload
def rel_attention(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor | None, content_bias: Tensor | None = ..., position_bias: Tensor | None = ...,
    memory: KeyValuePair | None = ..., *, q_pos: Tensor | None = ..., causal: bool = ..., window: Window = ...,
    chunk: Chunk = ..., prefix: int = ..., start: Tensor | None = ..., end: Tensor | None = ..., zero_row: int = ...,
    r_descending: bool = ..., outside: Outside = ..., r_bias: Tensor | None = ..., scale: float | None = ...,
    position_scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: Tensor | None = ..., return_lse: Literal[False] = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def rel_attention(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor | None, content_bias: Tensor | None = ..., position_bias: Tensor | None = ...,
    memory: KeyValuePair | None = ..., *, q_pos: Tensor | None = ..., causal: bool = ..., window: Window = ...,
    chunk: Chunk = ..., prefix: int = ..., start: Tensor | None = ..., end: Tensor | None = ..., zero_row: int = ...,
    r_descending: bool = ..., outside: Outside = ..., r_bias: Tensor | None = ..., scale: float | None = ...,
    position_scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: Tensor | None = ..., return_lse: Literal[True], backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def rel_attention(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor | None, content_bias: Tensor | None = ..., position_bias: Tensor | None = ...,
    memory: KeyValuePair | None = ..., *, q_pos: Tensor | None = ..., causal: bool = ..., window: Window = ...,
    chunk: Chunk = ..., prefix: int = ..., start: Tensor | None = ..., end: Tensor | None = ..., zero_row: int = ...,
    r_descending: bool = ..., outside: Outside = ..., r_bias: Tensor | None = ..., scale: float | None = ...,
    position_scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: Tensor | None = ..., return_lse: bool = ..., backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def rel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor | None,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    memory: KeyValuePair | None = None,
    *,
    q_pos: Tensor | None = None,
    causal: bool = True,
    window: Window = None,
    chunk: Chunk = None,
    prefix: int = 0,
    start: Tensor | None = None,
    end: Tensor | None = None,
    zero_row: int = 0,
    r_descending: bool = False,
    outside: Outside = "refuse",
    r_bias: Tensor | None = None,
    scale: float | None = None,
    position_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Transformer-XL's relative-position attention (Dai et al. 2019, section 3.3) over a segment
    and its memory.

    Query i stands at key position M + i; key j of the S = M + L keys, memory first, is at distance
    d = M + i - j:

        score[i, j] = scale * (q_i + content_bias) . k_j
                      + position_scale * ((q_pos_i + position_bias) . r[zero_row + d]
                                          + r_bias[zero_row + d])
        score[i, j] = softcap * tanh(score[i, j] / softcap)                      where softcap > 0
        out_i = sum_j dropout(softmax_j(score[i, j])) v_j

    q_pos defaults to q. With q_pos the formula also covers Inkling's attention, whose learned term
    of the distance has its own queries.

    Each query's weights sum to 1 (with a `sink` to less), in forward and backward, for finite
    scores of any size (up to 2e38 in "triton"; "cuda" gives NaN gradients where |lse| > 45,426).
    Kernels sum values times weights of at most 1 before they divide, so values must stay below
    3.4e38 / (M + L).

    Only the backend "reference" stores anything of size L x S. The result is differentiable in all
    tensors except `start`, `end` and the seed.

    Args:
        q, k, v: q [B, H, L, D]; k and v [B, Hkv, L, D], all of one floating dtype. As for all
            tensors here, any strides are accepted if the last axis is contiguous: [L, B, H, D]
            storage viewed by `permute(1, 2, 0, 3)` is not copied. v may have another width than q
            and k; out has v's. H is a multiple of Hkv: query head h reads head h // (H / Hkv) of
            keys and values, as scaled_dot_product_attention does with enable_gqa=True. The kernels
            repeat nothing in memory.
        r: [H, T, D], the projected encodings W_kR R; row `zero_row + d` belongs to distance d. A
            row is required for every distance at which a query sees a key, unless `outside` says
            otherwise. A table that begins at a negative distance needs `zero_row` also where
            causal=True: with [H, 2 * L - 1, D] and no `zero_row` nothing raises, and each distance
            reads the row of another. [1, T, D] is a table that all heads share; [B, H, T, D] has a
            table for each batch row and runs as one call for each. None if `r_bias` is the only
            positional term: no product of queries and r is computed.
        content_bias, position_bias: [H, D], u and v of the paper; None for zeros. position_bias
            must be None where r is None.
        memory: None, or the keys and values of the M positions before the segment, (k_mem [B, Hkv,
            M, D], v_mem [B, Hkv, M, D of v]).
        q_pos: None for q, or [B, H, L, Dp], the queries of r (position queries). r and
            position_bias then have rows of width Dp, which need not be D.
        causal: True if a query sees no key after its own position.
        window: None; or an integer, the number of most recent keys that a query sees, its own
            included (distances 0 to window - 1); or (left, right), the numbers of keys before and
            after its own (distances -right to left), each None for no limit.
        chunk: None, or (size, left) for an encoder that streams in chunks of `size` positions, the
            first of which begins with the segment. A query sees all of its own chunk and the `left`
            chunks before it (None: all chunks before it). Requires causal=False.
        prefix: the number of first keys, counted from the memory's start, that every query sees,
            whatever the other arguments hide.
        start, end: None, or int32 tensors with values in [0, M + L] that broadcast to [B, L]. A
            query sees only those of the keys start <= j < end that `causal` and `window` leave
            visible. A tensor of one axis is ambiguous where B = L and raises: pass [B, 1] or [1,
            L]. A query that sees no key has out 0, lse -inf and zero gradients. Values out of range
            raise ValueError (a compiled "reference" call raises only for distances without a row in
            r). "triton" and "cuda" do not synchronize with the device to read the values: they
            return NaN for each query whose bounds are out of range or reach a distance without a
            row in r.
        zero_row: the row of r that holds distance 0; L - 1 if row 0 holds distance -(L - 1).
        r_descending: True if row `zero_row - d` belongs to distance d, as in most published code.
        outside: what distances without a row of r and r_bias mean. "refuse": an error where a
            query sees a key at one; "clamp": they use the first or last row (Shaw et al. 2018);
            "zero": such pairs have no positional term, as in Inkling. Tiles of keys that are
            outside for all their queries then cost what plain attention does.
        r_bias: None, or [H, T] (or [1, T]) of any strides: a relative bias for each row of r. It
            may replace r, as in T5 and ALiBi (see `t5_buckets` and `alibi_slopes`).
            `position_scale` multiplies it, as the formula above shows.
        scale: the factor of the content's scores; None for 1 / sqrt(D).
        position_scale: the factor of the terms of r and r_bias; None for `scale`.
        softcap: 0.0 for none, or the bound of the scores' size (1e-30 to 1e30) that the tanh above
            enforces, as in Gemma; lse is that of the capped scores.
        sink: None, or a logit of each head, [H], or of each query, [B, H, L]: one more score whose
            value is 0, so that out_i is divided by the sum of the weights and e^sink. It may have
            any floating dtype and is converted to float32 (float64 beside float64). A query that
            sees no key has out 0 all the same; lse leaves the sink out.
        dropout_p: probability in [0, 1) of dropping an attention weight; apply it in training only.
        dropout_seed: None to draw a seed from torch's generator, or an int64 tensor of one element.
            The same seed drops the same entries in every backend. If r is [B, H, T, D], batch row b
            uses seed + b, as a call with B = 1 would, so it drops other entries than with r [H, T,
            D].
        return_lse: True to return lse, the logarithm of the softmax's denominator, too.
        backend: None for the fastest backend that can run the call, or a name: "native" (C++ for
            CPUs: float32 and bfloat16), "reference" (PyTorch: any device and dtype, L x S memory),
            "triton" (NVIDIA GPUs: float32, bfloat16 and float16, head widths up to 256, float32
            products by the setting of torch.set_float32_matmul_precision), or "cuda" (CUDA C++ for
            NVIDIA GPUs: up to 16 queries without gradients, head widths that are multiples of 8 up
            to 256; on compute capability 9.0, in 16-bit types and head widths up to 128, any number
            of queries, and gradients. None chooses it there, and elsewhere for up to 4 queries).

    Returns:
        out [B, H, L, D of v] in q's dtype; with `return_lse` the pair of out and lse [B, H, L],
        float32 (float64 for float64). Under torch.autocast the tensors are cast to its dtype first.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, device, shape or value; the
            message names it.
        RuntimeError: the backend that `backend` names cannot run the call; the message says why.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 16, 32)  # B=2, H=4, L=16, D=32
        >>> k_mem, v_mem = torch.randn(2, 2, 4, 48, 32)  # M=48
        >>> r, u, w = torch.randn(4, 64, 32), torch.zeros(4, 32), torch.zeros(4, 32)
        >>> rel_attention(q, k, v, r, u, w, memory=(k_mem, v_mem), window=32).shape
        torch.Size([2, 4, 16, 32])
    """
    if unknown:
        checks.refuse_unknown("rel_attention", unknown)
    if not isinstance(q, Tensor) or q.is_nested:
        checks.check_dense("q", q, _PACKED)
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if q.dim() else 1.0
    if q_pos is not None or position_scale is not None:
        q_pos, position_scale = _position_terms(q, r, q_pos, scale, position_scale)
    else:
        position_scale = scale
    if r is None and position_bias is not None:
        raise ValueError(_NO_TABLE)
    k_mem, v_mem = (None, None) if memory is None else memory_pair(memory)
    left, right = (None, 0) if causal is True and window is None else span(causal, window)
    if type(outside) is not str or outside != "refuse":
        checks.check_outside(outside)
    if return_lse is not False and return_lse is not True:
        raise TypeError(f"return_lse must be True or False, got {type(return_lse).__name__}")
    if sink is not None:
        sink = checks.broadcast_sink(sink, q)
    call = Call(
        q, k, v, r, content_bias, position_bias, k_mem, v_mem, r_bias, q_pos, sink, start, end, dropout_seed, left, right,
        zero_row, scale, dropout_p, softcap, position_scale, outside == "zero",
    )  # fmt: skip
    if _is_special(call, chunk, prefix, r_descending, outside):
        plain = functools.partial(_attend, backend=backend, need_lse=True)
        clamp = outside == "clamp"
        chunk = None if chunk is None else composed.check_chunk(chunk, causal)
        check_special(call)
        out, lse = composed.attend(call, plain, chunk, prefix, r_descending, clamp)
    else:
        out, lse = _attend(call, backend, return_lse)
    return (out, lse) if return_lse else out


# The arguments that it has, without those that it refuses.
_shown = inspect.signature(rel_attention)
rel_attention.__signature__ = _shown.replace(parameters=list(_shown.parameters.values())[:-1])  # type: ignore[attr-defined]


def _position_terms(q: Tensor, r: Any, q_pos: Any, scale: Any, position_scale: Any) -> tuple[Any, Any]:
    """Return (q_pos, position_scale) as `Call` has them.

    Raises:
        TypeError, ValueError: position_scale is not a number, or q_pos is given without r.
    """
    if q_pos is not None and not isinstance(q_pos, Tensor):
        raise TypeError(f"q_pos must be None or a torch.Tensor, got {type(q_pos).__name__}")
    if q_pos is not None and r is None:
        raise ValueError("q_pos must be None where r is None: it multiplies rows of r")
    if position_scale is None:
        return q_pos, scale
    for name, value in (("scale", scale), ("position_scale", position_scale)):
        checks.check_scale(name, value)
    # Kernels add up q's gradient by both products before they multiply it by one factor.
    return q if q_pos is None and r is not None and position_scale != scale else q_pos, position_scale


def _is_special(call: Call, chunk: Any, prefix: Any, r_descending: Any, outside: str) -> bool:
    """Whether a call needs `composed`: it sets an option that the kernels do not have, or has a
    table that all heads share or one table for each batch row. Other faults of tables are left to
    the checks of the plain call."""
    if r_descending is not False or outside == "clamp" or chunk is not None or type(prefix) is not int or prefix != 0:
        return True
    if call.q.dim() != 4:
        return False
    heads = call.q.size(1)
    for x in (call.r, call.r_bias):
        if (
            isinstance(x, Tensor)
            and not x.is_nested
            and (x.dim() == 4 or (x.dim() in (2, 3) and x.size(0) == 1 != heads))
        ):
            return True
    return False


def _attend(call: Call, backend: str | None, need_lse: bool) -> tuple[Tensor, Any]:
    """Return (out, lse) of a call without composed variants, whose arguments are not checked yet.

    Without `need_lse`, lse may be None.
    """
    if call.q.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        call = _cast_for_autocast(call)
    if call.start is not None or call.end is not None:
        call = checks.with_bounds(call)
    is_open = torch_state.is_plain(unprofiled=True)
    prepared = None
    if is_open or not torch_state.is_traced():
        prepared, call = prepare(call, backend)
    name = choose(call, backend) if prepared is None else prepared.kernels.NAME
    if call.dropout_p > 0 or call.seed is not None:
        call = seeded(call)
    if name == reference.NAME:
        if not torch.compiler.is_compiling():
            checks.check_bound_values(call)
        return reference.forward(call)
    if prepared is not None and is_open and prepared.is_ordinary:
        return operators.run(call, prepared, need_lse)
    return operators.dispatch(call, name)


def _cast_for_autocast(call: Call) -> Call:
    """Cast the inputs as autocast does for scaled_dot_product_attention, if it is on. float64 is
    not cast, nor are inputs of lse's dtype or values that are not floating-point tensors."""
    dtype = autocast_dtype(call.q.device.type)
    if dtype is None:
        return call
    cast = {
        name: x.to(dtype)
        for name, x in zip(INPUTS, inputs_of(call), strict=True)
        if INPUT[name].dtype == "q" and isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    }
    return changed(call, **cast)


def rel_attention_weights(
    q: Tensor,
    k: Tensor,
    r: Tensor | None,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    memory: KeyValuePair | None = None,
    *,
    q_pos: Tensor | None = None,
    causal: bool = True,
    window: Window = None,
    start: Tensor | None = None,
    end: Tensor | None = None,
    zero_row: int = 0,
    outside: Literal["refuse", "zero"] = "refuse",
    r_bias: Tensor | None = None,
    scale: float | None = None,
    position_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """The weights softmax(score) of `rel_attention`, before dropout; differentiable.

    They are computed in plain PyTorch on any device, and need memory for all L x S pairs.
    `rel_attention` neither needs nor stores them.

    Args:
        q, k: [B, H, L, D] and [B, Hkv, L, D], as in `rel_attention`.
        content_bias, position_bias: [H, D] or None, as in `rel_attention`.
        q_pos, causal, window, start, end, zero_row, r_bias, scale, position_scale, softcap, sink:
            as in `rel_attention`.
        outside: as in `rel_attention`, but for "clamp".
        r: [H, T, D], or [1, T, D] for all heads; None if `r_bias` is the only positional term.
        memory: None, or the pair (k_mem, v_mem) of `rel_attention`, of which only the keys k_mem
            [B, Hkv, M, D] are read.

    Returns:
        [B, H, L, M + L], float32 (float64 for float64). The weights of a query that sees no
            key are 0.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    if unknown:
        checks.refuse_unknown("rel_attention_weights", unknown)
    checks.check_dense("q", q, _PACKED)
    if q.dim() != 4:
        raise ValueError(f"q must be [B, H, L, D], got shape {list(q.shape)}")
    k_mem = None if memory is None else memory_pair(memory)[0]
    left, right = span(causal, window)
    if r is None and position_bias is not None:
        raise ValueError(_NO_TABLE)
    r, r_bias = composed.of_all_heads(r, q.size(1)), composed.of_all_heads(r_bias, q.size(1))
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.size(-1), 1))
    q_pos, position_scale = _position_terms(q, r, q_pos, scale, position_scale)
    checks.check_outside(outside, ("refuse", "zero"))
    call = Call(
        q, k, k, r, content_bias, position_bias, k_mem, k_mem, r_bias, q_pos, checks.broadcast_sink(sink, q), start, end,
        None, left, right, zero_row, scale, 0.0, softcap, position_scale, outside == "zero",
    )  # fmt: skip
    call = _cast_for_autocast(call)
    call = checks.with_bounds(call)
    checks.check(call)
    if not torch.compiler.is_compiling():
        checks.check_bound_values(call)
    return reference.weights(call)
