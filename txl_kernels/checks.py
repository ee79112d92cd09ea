"""Checks of a call before any kernel runs. Only `check_bound_values` reads tensors' values."""

import numbers
from collections.abc import Iterable
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor

from txl_kernels.call import (
    BOUNDS,
    INPUT,
    INPUTS,
    Call,
    changed,
    distance_range,
    inputs_of,
    intervals,
    is_bounded,
    memory_len_of,
    position_width_of,
    table_len_of,
)
from txl_kernels.torch_state import constant_when_traced

KeyValuePair = tuple[Tensor, Tensor]
Window = int | tuple[int | None, int | None] | None
Outside = Literal["refuse", "clamp", "zero"]
_MASK = "start and end, which txl_kernels.intervals(mask, visible=...) makes of a mask"
_WEIGHTS = "nothing: rel_attention_weights, and a layer's method weights, return the weights"
# Arguments of torch's attention, flash-attn's and others', and what takes their place here.
FOREIGN = {
    "attention_mask": _MASK, "attn_mask": _MASK, "key_padding_mask": _MASK, "mask": _MASK, "is_causal": "causal",
    "window_size": "window=(left, right)", "softmax_scale": "scale", "sm_scale": "scale", "dropout": "dropout_p, to a layer "
    "attn_dropout", "dropout_p": "attn_dropout", "attn_dropout": "dropout_p", "need_weights": _WEIGHTS,
    "return_attn_probs": _WEIGHTS, "output_attentions": _WEIGHTS, "enable_gqa": "k and v with fewer heads, a divisor of q's",
    "alibi_slopes": "r_bias", "query": "q", "key": "k", "value": "v", "k_mem": "memory=(k_mem, v_mem)",
    "past_key_value": "cache, of the layer's new_cache", "mems": "memory", "embed_dim": "d_model", "hidden_size": "d_model",
    "num_heads": "n_head", "nhead": "n_head", "head_dim": "d_head", "num_kv_heads": "n_kv_head",
}  # fmt: skip
_WIDEST = 2**31  # wider than any distance
SIDE = "None or an integer >= 0"
ZERO_ROW = "an integer from 0 to 2**31 - 1 (the row of r that holds distance 0)"
FLOAT32_RANGE = 3.4028235e38
DROPOUT_P = "a number in [0, 1)"
SOFTCAP, CAPS = "0.0 for none, or a number from 1e-30 to 1e30", (1e-30, 1e30)
# Plain tuples, which torch.compile of torch 2.6 can trace.
_SHAPES = tuple((name, tuple(x.axes.split())) for name, x in INPUT.items() if name not in ("q", "r", "r_bias"))
_ANY_STRIDES = tuple(name for name, x in INPUT.items() if x.any_strides)
_OF_LSE = tuple(name for name, x in INPUT.items() if x.dtype == "lse")
WINDOW = "None or an integer >= 1 (keys seen, the query's own included)"


def check(call: Call) -> None:
    """Check everything that shapes, dtypes, devices, strides and settings decide, except the seed,
    which changes with every call.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what was given and what
            is accepted.
    """
    check_tensors(call)
    check_bounds(call)
    check_settings(call)
    check_table(call)


def check_dense(name: str, x: Any, instead: str) -> None:
    """Raise TypeError if a value is no tensor, or a nested one, whose sizes cannot be read.

    instead: what to pass for a nested tensor.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested tensor: pass {instead}")


def check_tensors(call: Call, special: bool = False) -> None:
    """Check that tensors are dense, have q's dtype and device, shapes that fit each other, and a
    contiguous last axis (except `r_bias` and `sink`, which may have any strides).

    special: True for a call that `txl_kernels.composed` will rewrite: r may also be [1, T, D] or [B
    or 1, H or 1, T, D], and `r_bias` [1, T]. Dtypes and strides are then checked in the plain
    calls, after autocast has cast the tensors.

    Raises:
        TypeError, ValueError: a tensor is wrong; the message names it.
    """
    if (call.k_mem is None) != (call.v_mem is None):
        raise TypeError("k_mem and v_mem must both be given or both be None, got one of them")
    inputs: dict[str, Any] = dict(zip(INPUTS, inputs_of(call), strict=True))
    if call.r is None and call.r_bias is None:
        raise TypeError("r or r_bias must be given, got None for both")
    given = {name: x for name, x in inputs.items() if x is not None or name in ("q", "k", "v")}
    _check_kind(given, call.q, dtypes=not special)
    _check_shapes(call, inputs)
    if special:
        _check_special_tables(call)
    else:
        _check_tables(call)
        _check_last_axis({name: x for name, x in given.items() if name not in _ANY_STRIDES})


def refuse_unknown(name: str, unknown: Iterable[str]) -> NoReturn:
    """Raise TypeError for keywords that a function or layer does not have, with what to pass for
    those of other libraries.

    name: that of the function or layer.
    """
    hints = (f"{x}; pass {FOREIGN[x]}" if x in FOREIGN else x for x in unknown)
    raise TypeError(f"{name} takes no argument {', and no '.join(hints)}")


def memory_pair(memory: Any) -> KeyValuePair:
    """Return `memory` as the pair (k_mem, v_mem).

    Raises:
        TypeError: memory is not a pair of tensors.
    """
    if not isinstance(memory, (tuple, list)) or len(memory) != 2:
        got = f"{type(memory).__name__}" + (f" of length {len(memory)}" if isinstance(memory, (tuple, list)) else "")
        raise TypeError(f"memory must be None or a pair (k_mem, v_mem) of [B, Hkv, M, D] tensors, got {got}")
    k_mem, v_mem = memory
    if not isinstance(k_mem, Tensor):
        raise TypeError(f"k_mem must be a torch.Tensor, got {type(k_mem).__name__}")
    if not isinstance(v_mem, Tensor):
        raise TypeError(f"v_mem must be a torch.Tensor, got {type(v_mem).__name__}")
    return k_mem, v_mem


def _check_kind(given: dict[str, Any], q: Tensor, dtypes: bool) -> None:
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not q.dtype.is_floating_point:
        raise TypeError(f"q must have a floating-point dtype, got {q.dtype}")
    for name, x in given.items():
        if dtypes and name in _OF_LSE and x.dtype != lse_dtype(q):
            raise TypeError(f"{name} must be {lse_dtype(q)} beside q of {q.dtype}, got {x.dtype}")
        if dtypes and name not in _OF_LSE and x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}; convert it or use torch.autocast")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if x.layout != torch.strided or x.is_nested or x.is_quantized:
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else f"of layout {x.layout}"
            raise TypeError(f"{name} must be a dense (strided) tensor, got one that is {kind}")


def _check_shapes(call: Call, inputs: dict[str, Any]) -> None:
    """Check all shapes but those of r and `r_bias`. inputs: the call's, by name."""
    q, k = call.q, call.k
    if q.dim() != 4:
        raise ValueError(f"q must be [B, H, L, D], got shape {list(q.shape)}")
    batch, heads, length, width = q.shape
    _check_heads(call)
    if width == 0:
        raise ValueError(f"q must have a head width D >= 1, got shape {list(q.shape)}")
    sizes: dict[str, Any] = {"B": batch, "H": heads, "L": length, "D": width}
    if call.q_pos is None:
        sizes["Dp"] = width
    for name, axes in _SHAPES:
        x = inputs[name]
        if x is None:
            continue
        _check_shape(name, x, axes, sizes)
        if name == "k" and k.size(1) != heads and (k.size(1) == 0 or heads % k.size(1)):
            raise ValueError(
                f"k must have as many heads as q, {heads}, or a divisor of them, got {k.size(1)} in shape {list(k.shape)}"
            )
        for letter, size in zip(axes, x.shape, strict=True):
            if letter != "M":
                sizes[letter] = size
        if name == "v_mem" and call.k_mem is not None and call.k_mem.size(2) != x.size(2):
            raise ValueError(f"k_mem and v_mem must have the same length M, got {call.k_mem.size(2)} and {x.size(2)}")


def _check_heads(call: Call) -> None:
    """Raise ValueError if the table has as many heads as q has in the place of queries: q is then
    [B, L, H, D], and other errors would be misleading."""
    name, table = ("r_bias", call.r_bias) if call.r is None else ("r", call.r)
    if table is None or table.dim() != (2 if call.r is None else 3):
        return
    found, heads, length = table.size(0), call.q.size(1), call.q.size(2)
    if found not in (1, heads) and found == length:
        axes = f"[H, T] = [{heads}, T]" if call.r is None else f"[H, T, D] = [{heads}, T, D]"
        raise ValueError(
            f"{name} must be {axes}, got shape {list(table.shape)}; if q, of shape {list(call.q.shape)}, is [B, L, H, D], "
            "as in flash-attn, pass q.transpose(1, 2), and likewise k and v"
        )


def _check_shape(name: str, x: Tensor, axes: tuple[str, ...], sizes: dict[str, Any]) -> None:
    """Raise ValueError if a tensor does not have the given axes. sizes: those known by letter; a
    width that is not known must be at least 1."""
    fits = x.dim() == len(axes)
    if fits:
        for letter, size in zip(axes, x.shape, strict=True):
            if letter in sizes:
                fits = fits and size == sizes[letter]
            elif letter in ("Dv", "Dp"):
                fits = fits and size > 0
    if not fits:
        note = ""
        if name == "k":
            note = f" with Hkv a divisor of q's {sizes['H']} heads"
        letters = ["D" if x == "Dp" and sizes.get(x) == sizes["D"] else x for x in axes]
        if name == "v_mem":
            letters, note = ["D" if x == "Dv" else x for x in axes], " of v's width"
        raise ValueError(
            f"{name} must be [{', '.join(letters)}] = [{', '.join(str(sizes.get(x, x)) for x in axes)}]{note}, got shape "
            f"{list(x.shape)}"
        )


def _check_tables(call: Call) -> None:
    heads, width = call.q.size(1), position_width_of(call)
    r, r_bias = call.r, call.r_bias
    if r is not None and (r.dim() != 3 or (r.size(0), r.size(2)) != (heads, width)):
        axes = "[H, T, D]" if call.q_pos is None else "[H, T, Dp of q_pos]"
        raise ValueError(f"r must be {axes} = [{heads}, T, {width}], got shape {list(r.shape)}")
    if call.zero_outside and table_len_of(call) == 0 and (r is not None or r_bias is not None):
        raise ValueError(f"{'r_bias' if r is None else 'r'} must have a row where outside='zero', got none")
    if r_bias is not None and (r_bias.dim() != 2 or r_bias.size(0) != heads):
        raise ValueError(f"r_bias must be [H, T] = [{heads}, T], got shape {list(r_bias.shape)}")
    if r is not None and r_bias is not None and r_bias.size(1) != r.size(1):
        raise ValueError(f"r_bias must be [H, T] = [{heads}, {r.size(1)}] beside r, got shape {list(r_bias.shape)}")


def _check_special_tables(call: Call) -> None:
    batch, heads, _, _ = call.q.shape
    width = position_width_of(call)
    if call.r is not None:
        table = call.r.shape
        sizes = (batch, heads)[-max(len(table) - 2, 0) :]
        fits = len(table) in (3, 4) and table[-1] == width
        if not fits or any(n not in (1, m) for n, m in zip(table[:-2], sizes, strict=True)):
            raise ValueError(
                f"r must be [H, T, D] = [{heads}, T, {width}], [1, T, {width}] or [{batch}, {heads}, T, {width}], got "
                f"shape {list(table)}"
            )
    if call.r_bias is None:
        return
    rows = call.r.size(-2) if call.r is not None else "T"
    shape = list(call.r_bias.shape)
    if len(shape) != 2 or shape[0] not in (1, heads) or (call.r is not None and shape[1] != rows):
        raise ValueError(f"r_bias must be [H, T] = [{heads}, {rows}] or [1, {rows}], got shape {shape}")


def _check_last_axis(given: dict[str, Tensor]) -> None:
    for name, x in given.items():
        if x.size(-1) > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous along its last axis (stride 1), got stride {x.stride(-1)}; pass "
                f"{name}.contiguous()"
            )


def check_settings(call: Call) -> None:
    """Check `left`, `right`, `zero_row`, `scale`, `dropout_p` and `softcap`.

    Raises:
        TypeError, ValueError: a setting is wrong; the message names it.
    """
    for name, side in (("left", call.left), ("right", call.right)):
        if side is not None:
            check_integer(name, side, 0, SIDE)
    if isinstance(call.zero_row, Tensor) and torch.jit.is_tracing():
        raise TypeError(
            "zero_row must not depend on a length under torch.jit.trace, whose graph would hold this call's length for "
            "all; torch.export.export takes it"
        )
    check_integer("zero_row", call.zero_row, 0, ZERO_ROW)
    if not isinstance(call.zero_row, torch.SymInt) and call.zero_row >= 2**31:  # else it would bound exported lengths
        raise ValueError(f"zero_row must be {ZERO_ROW}, got {call.zero_row}")
    check_scale("scale", call.scale)
    check_scale("position_scale", call.position_scale)
    if call.q_pos is None and call.r is not None and call.position_scale != call.scale:
        raise ValueError(
            f"position_scale must be scale, {call.scale}, where q_pos is None beside r, got {call.position_scale}"
        )
    check_number("dropout_p", call.dropout_p, 0.0, 1.0, DROPOUT_P)
    check_number("softcap", call.softcap, 0.0, FLOAT32_RANGE, SOFTCAP)
    if call.softcap and not CAPS[0] <= call.softcap <= CAPS[1]:
        raise ValueError(f"softcap must be {SOFTCAP}, got {call.softcap}")


def check_scale(name: str, value: Any) -> None:
    """Check that a factor of scores is a finite number in float32's range.

    Raises:
        TypeError, ValueError: it is not.
    """
    check_number(name, value, -FLOAT32_RANGE, FLOAT32_RANGE, "None or a finite number in float32's range")


def check_outside(value: Any, accepted: tuple[str, ...] = get_args(Outside)) -> None:
    """Check that `outside` is one of the accepted names.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(value, str):
        raise TypeError(f"outside must be one of {', '.join(accepted)}, got {type(value).__name__}")
    if value not in accepted:
        raise ValueError(f"outside must be one of {', '.join(accepted)}, got {value!r}")


def check_integer(name: str, value: Any, minimum: int, accepted: str) -> None:
    """Check that a value is an integer >= `minimum`, and not a bool. While tracing it may be a
    SymInt.

    accepted: the accepted values, for the error.

    Raises:
        TypeError, ValueError: it is not.
    """
    # torch.compile follows only the first test; NumPy's integers pass the second.
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):  # noqa: SIM102
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be {accepted}, got {value}")


def check_number(name: str, value: Any, low: float, high: float, accepted: str) -> None:
    """Check that a value is a real number in [low, high), and not a bool. While tracing it may be a
    symbol.

    accepted: the accepted values, for the error.

    Raises:
        TypeError, ValueError: it is not.
    """
    symbols = (torch.SymInt, torch.SymFloat)
    if isinstance(value, bool) or not isinstance(value, (float, int, *symbols)):  # noqa: SIM102
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    if not low <= value < high:
        raise ValueError(f"{name} must be {accepted}, got {value}")


def check_seed(seed: Any, q: Tensor, name: str = "dropout_seed") -> None:
    """Check that a seed is None or an int64 tensor of one element on q's device.

    Raises:
        TypeError: it is not.
    """
    if seed is None:
        return
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
        got = f"{seed.dtype} {list(seed.shape)} on {seed.device}" if isinstance(seed, Tensor) else type(seed).__name__
        raise TypeError(f"{name} must be None or an int64 tensor of one element on {q.device}, got {got}")


def span(causal: Any, window: Any) -> tuple[int | None, int | None]:
    """Return (left, right) of a `Call`: the numbers of keys before and after a query's own, each
    None for all.

    Raises:
        TypeError, ValueError: `rel_attention` does not accept this causal or window.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {type(causal).__name__}")
    right: int | None = 0 if causal else None
    if window is None:
        return None, right
    if isinstance(window, (tuple, list)):
        return _two_sided(causal, window)
    check_integer("window", window, 1, WINDOW)
    return min(window - 1, _WIDEST), right


def _two_sided(causal: bool, window: Any) -> tuple[int | None, int | None]:
    if len(window) != 2:
        raise ValueError(f"window must be an integer or a pair (left, right), got {len(window)} values")
    left, right = window
    for name, side in (("window[0]", left), ("window[1]", right)):
        if side is not None:
            check_integer(name, side, 0, SIDE)
    if causal:
        right = 0
    elif right is not None and right >= _WIDEST:
        right = None
    return None if left is None else min(left, _WIDEST), right


def with_bounds(call: Call) -> Call:
    """Return the call with `start` and `end` as int32 views [B, L].

    Raises:
        TypeError, ValueError: see `broadcast_bound`.
    """
    if (call.start is None and call.end is None) or call.q.dim() != 4:  # another check reports a wrong q
        return call
    sizes, device = (call.q.size(0), call.q.size(2)), call.q.device
    for x in (call.start, call.end):
        if x is not None and not (
            type(x) is Tensor
            and x.dtype == torch.int32
            and x.shape == sizes
            and x.device == device
            and x.layout == torch.strided
            and not x.is_nested
        ):
            break
    else:
        return call
    start, end = (broadcast_bound(name, x, call.q) for name, x in zip(BOUNDS, (call.start, call.end), strict=True))
    return changed(call, start=start, end=end)


def broadcast_bound(name: str, bound: Any, q: Tensor) -> Tensor | None:
    """Return the user's `start` or `end` as an int32 view [B, L].

    Raises:
        TypeError, ValueError: it is not an integer tensor on q's device that broadcasts to [B, L],
            or has one axis that could be the batch as well as the queries.
    """
    if bound is None:
        return None
    if not isinstance(bound, Tensor):
        raise TypeError(f"{name} must be None or an int32 tensor broadcastable to [B, L], got {type(bound).__name__}")
    if bound.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (or int64), got {bound.dtype}")
    if bound.layout != torch.strided or bound.is_nested:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {bound.layout}")
    if bound.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {bound.device}")
    target = (q.size(0), q.size(2))
    if bound.shape == target and bound.dtype == torch.int32:
        return bound
    if bound.dim() > 2 or any(a not in (1, b) for a, b in zip(bound.shape, target[2 - bound.dim() :], strict=True)):
        raise ValueError(
            f"{name} must broadcast to [B, L] = {list(target)}, got shape {list(bound.shape)}{_of_lengths(name, bound, q)}"
        )
    if bound.dim() == 1 and target[0] == target[1] > 1 and bound.size(0) > 1:
        raise ValueError(
            f"{name} must say whether it holds a value for each batch row or for each query where B = L = {target[0]}: pass "
            f"{name}[:, None] or {name}[None, :], got shape {list(bound.shape)}{_of_lengths(name, bound, q)}"
        )
    view: Tensor = to_int32(bound).expand(target)
    return view


def _of_lengths(name: str, bound: Tensor, q: Tensor) -> str:
    return f"; for lengths [B] take {name}_from_lengths(lengths)" if bound.shape == q.shape[:1] else ""


def to_int32(bound: Tensor) -> Tensor:
    """Return an int32 or int64 bound as int32. Values that do not fit in 32 bits are clamped to
    values that remain out of range."""
    return bound if bound.dtype == torch.int32 else bound.clamp(-1, 2**31 - 1).to(torch.int32)


def lse_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of lse and of sinks in a `Call`: float32, beside float64 float64."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def broadcast_sink(sink: Any, q: Tensor) -> Tensor | None:
    """Return the user's `sink`, [H] or [B, H, L], as a view [B, H, L] in float32 (float64 beside
    float64).

    Raises:
        TypeError, ValueError: it is neither None nor such a tensor on q's device.
    """
    if sink is None or q.dim() != 4:  # another check reports a wrong q
        return None
    batch, heads, length, _ = q.shape
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink must be None or a tensor [H] or [B, H, L], got {type(sink).__name__}")
    if not sink.dtype.is_floating_point or sink.layout != torch.strided or sink.is_nested:
        raise TypeError(
            f"sink must be a dense tensor of a floating-point dtype, got {sink.dtype} of layout {sink.layout}"
        )
    if sink.device != q.device:
        raise ValueError(f"sink must be on q's device {q.device}, got {sink.device}")
    if sink.shape not in ((heads,), q.shape[:3]):
        raise ValueError(
            f"sink must be [H] = [{heads}] or [B, H, L] = {list(q.shape[:3])}, got shape {list(sink.shape)}"
        )
    exact: Tensor = sink.to(lse_dtype(q))
    return exact[:, None].expand(batch, heads, length) if sink.dim() == 1 else exact


def check_bounds(call: Call) -> None:
    """Check that bounds are int32 [B, L] on q's device.

    Raises:
        TypeError, ValueError: a bound is not.
    """
    shape = (call.q.size(0), call.q.size(2))
    for name, bound in zip(BOUNDS, (call.start, call.end), strict=True):
        if bound is None:
            continue
        if bound.dtype != torch.int32 or bound.device != call.q.device:
            raise TypeError(f"{name} must be int32 on {call.q.device}, got {bound.dtype} on {bound.device}")
        if bound.shape != shape:
            raise ValueError(f"{name} must be [B, L] = {list(shape)}, got shape {list(bound.shape)}")


def check_table(call: Call) -> None:
    """Check that r has a row for every distance that `left` and `right` leave visible. If the call
    has bounds, `check_bound_values` does this.

    Under torch.compile lengths are symbols, and comparing them would specialize the graph; the
    operators check the table when the graph runs.

    Raises:
        ValueError: r, or `r_bias` without it, has too few rows.
    """
    if not call.zero_outside and not is_bounded(call) and not torch.compiler.is_compiling():
        _require_rows(call, *distance_range(call))


def check_bound_values(call: Call) -> None:
    """Read `start` and `end`, and check that their values are in [0, S] and that r has a row for
    every visible distance.

    Tensors on "meta", which have no values, are not checked.

    Raises:
        ValueError: a value is not; the message names the argument, the value and what is accepted.
    """
    if not is_bounded(call) or call.q.is_meta:
        return
    keys = memory_len_of(call) + call.q.size(2)
    for name, bound in zip(BOUNDS, (call.start, call.end), strict=True):
        if bound is not None and bound.numel() and (int(bound.min()) < 0 or int(bound.max()) > keys):
            raise ValueError(
                f"{name} must hold key indices in [0, M + L] = [0, {keys}], got values from {int(bound.min())} to "
                f"{int(bound.max())}"
            )
    if call.zero_outside or _has_rows(call, *distance_range(call)):
        return
    low, high = intervals(call)
    at = torch.arange(memory_len_of(call), keys, device=call.q.device)
    seen = low < high
    if bool(seen.any()):
        nearest = int((at - high + 1).expand_as(seen)[seen].min())
        farthest = int((at - low).expand_as(seen)[seen].max())
        _require_rows(call, nearest, farthest)


def _has_rows(call: Call, nearest: int, farthest: int) -> bool:
    """Whether r (or `r_bias` without it) has a row for every distance in [nearest, farthest]."""
    return nearest > farthest or (nearest + call.zero_row >= 0 and farthest + call.zero_row < table_len_of(call))


def _require_rows(call: Call, nearest: int, farthest: int) -> None:
    if not _has_rows(call, nearest, farthest):
        rows, future, past = table_len_of(call), max(-nearest, 0), max(farthest, 0)
        table = "r_bias" if call.r is None else "r"
        held = f"{-call.zero_row} to {rows - 1 - call.zero_row}"
        # `composed` may have reversed the rows; these words are right for either order.
        raise ValueError(
            f"{table} must have a row for each visible distance, {nearest} to {farthest}, but with the given zero_row its "
            f"{rows} rows are of distances {held}: {table} needs {future + past + 1} rows with zero_row={future} "
            f"(zero_row={past} with r_descending=True)"
        )


def check_gradients(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments of the backward operator, and return dout and dlse as the kernels read
    them.

    dout is returned in q's dtype with a contiguous last axis, dlse contiguous in float32.

    Raises:
        ValueError: a tensor has a wrong shape or device, or out and lse do not look like results of
            the forward operator.
    """
    for name, x, shape in (
        ("out", out, (*call.q.shape[:3], call.v.size(3))),
        ("dout", dout, (*call.q.shape[:3], call.v.size(3))),
        ("lse", lse, call.q.shape[:3]),
        ("dlse", dlse, call.q.shape[:3]),
    ):
        if x is not None and (x.shape != shape or x.device != call.q.device):
            raise ValueError(f"{name} must be {list(shape)} on {call.q.device}, got {list(x.shape)} on {x.device}")
    rows = out.size(-1) <= 1 or out.stride(-1) == 1
    if out.dtype != call.q.dtype or not rows or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError("out and lse must be as the forward operator returned them")
    dout = dout.to(call.q.dtype)
    if dout.size(-1) > 1 and dout.stride(-1) != 1:
        dout = dout.contiguous()
    return dout, None if dlse is None else dlse.float().contiguous()


@constant_when_traced
def can_autocast(device_type: str) -> bool:
    """Whether torch.autocast supports the device."""
    return torch.amp.is_autocast_available(device_type)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype to which torch.autocast casts on the device; None if autocast is off."""
    if (device_type != "cpu" and not can_autocast(device_type)) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
