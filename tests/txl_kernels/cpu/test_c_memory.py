"""The C library refuses a call that would write an element of an input or of another result, and
accepts tensors that alternate in one buffer."""

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import CASES, TERMS, Case, as_call, detached, make_inputs
from torch import Tensor

from txl_kernels import rel_attention
from txl_kernels.backends import cpu, native_modules
from txl_kernels.call import BOUNDS, INPUTS, SETTINGS, Call, memory_len_of, position_width_of, table_len_of

DTYPES = [torch.float32, torch.bfloat16]
SIZES = ("B", "H", "L", "D", "Hkv", "Dv", "M", "Dp", "T")
TYPES = {float: ctypes.c_double, bool: ctypes.c_int}
RESULTS = ("out", "lse")
GRADIENTS = tuple(f"gradients.{name}" for name in INPUTS)


class CTensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4))


class CCall(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("seed", ctypes.c_uint64), ("out", CTensor),
        ("lse", ctypes.c_void_p), *((name, ctypes.c_int64) for name in SIZES),
        *((name, TYPES.get(Call.__annotations__[name], ctypes.c_int64)) for name in SETTINGS),
        *((name, CTensor) for name in (*INPUTS, *BOUNDS)),
    )  # fmt: skip


class CGradients(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("out", CTensor), ("lse", ctypes.c_void_p),
        *((name, CTensor) for name in INPUTS),
    )  # fmt: skip


LIBRARY = ctypes.CDLL(str(native_modules.library_of("_native", cpu.native.file)))
LIBRARY.txl_last_error.restype = ctypes.c_char_p


def c_tensor(x: Tensor | None) -> CTensor:
    return CTensor() if x is None else CTensor(x.data_ptr(), (*x.stride(), *[0] * (4 - x.dim())))


def c_call(call: Call, out: Tensor, lse: Tensor) -> CCall:
    made = CCall(
        ctypes.sizeof(CCall), cpu.LIMITS.dtypes.index(call.q.dtype), 0 if call.seed is None else int(call.seed)
    )
    made.out, made.lse = c_tensor(out), lse.data_ptr()
    made.B, made.H, made.L, made.D = call.q.shape
    made.Hkv, made.Dv, made.M = call.k.size(1), call.v.size(3), memory_len_of(call)
    made.Dp, made.T = position_width_of(call), table_len_of(call)
    for name in SETTINGS:
        value = getattr(call, name)
        setattr(made, name, 2**63 - 1 if value is None else value)
    for name in (*INPUTS, *BOUNDS):
        setattr(made, name, c_tensor(getattr(call, name)))
    return made


def forward(call: Call, out: Tensor, lse: Tensor) -> str:
    """Run txl_forward and return its message; "" for success."""
    code = LIBRARY.txl_forward(ctypes.byref(c_call(call, out, lse)))
    assert code in (0, 1)
    return LIBRARY.txl_last_error().decode() if code else ""


def backward(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, gradients: dict[str, Tensor]
) -> str:
    """Run txl_backward and return its message; "" for success. gradients: by the inputs' names."""
    made = CGradients(ctypes.sizeof(CGradients), c_tensor(dout), None if dlse is None else dlse.data_ptr())
    for name, x in gradients.items():
        setattr(made, name, c_tensor(x))
    code = LIBRARY.txl_backward(ctypes.byref(c_call(call, out, lse)), ctypes.byref(made))
    assert code in (0, 1)
    return LIBRARY.txl_last_error().decode() if code else ""


def calls_of(case: Case, dtype: torch.dtype) -> list[Call]:
    """Return the calls of the backend that one call of `rel_attention` makes."""
    found: list[Call] = []
    forward = cpu.forward

    def record(call: Call, *args: Any, **named: Any) -> Any:
        found.append(call)
        return forward(call, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "forward", record)
        rel_attention(**as_call(detached(make_inputs(case, dtype))), backend="native")
    return found


def call_of(case: Case, dtype: torch.dtype) -> Call:
    [call] = calls_of(case, dtype)
    return call


def results_of(call: Call) -> tuple[Tensor, Tensor]:
    """Return out and lse of forward, in memory of their own."""
    q, v = call.q, call.v
    out, lse = q.new_full((*q.shape[:3], v.size(3)), torch.nan), torch.full(q.shape[:3], torch.nan)
    assert forward(call, out, lse) == ""
    return out, lse


EVERY_TERM = Case(
    "every term", B=2, H=4, Hkv=2, L=6, M=5, D=8, Dp=8, r_bias="H T", sink="B H L", intervals="random"
)  # fmt: skip


def written_pairs() -> Iterator[tuple[bool, str, str]]:
    """Yield whether a call is forward, a tensor that it writes or that forward has written, and
    another one with which it must not share memory."""
    inputs = (*INPUTS, *BOUNDS)
    for is_forward in (True, False):
        yield from ((is_forward, name, other) for name in RESULTS for other in inputs)
        yield is_forward, "lse", "out"
    others = (*inputs, *RESULTS, "gradients.out", "gradients.lse")
    for n, name in enumerate(GRADIENTS):
        yield from ((False, name, other) for other in (*others, *GRADIENTS[:n]))


@pytest.fixture
def on_one_thread() -> Iterator[None]:
    threads = LIBRARY.txl_threads()
    assert LIBRARY.txl_set_threads(1) == 0
    yield
    assert LIBRARY.txl_set_threads(threads) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.usefixtures("on_one_thread")
def test_a_written_tensor_may_begin_where_another_ends_and_not_before(dtype: torch.dtype) -> None:
    call = call_of(EVERY_TERM, dtype)
    out, lse = results_of(call)
    tensors = {name: getattr(call, name).contiguous() for name in (*INPUTS, *BOUNDS)} | {"out": out, "lse": lse}
    tensors |= {"gradients.out": torch.ones_like(out), "gradients.lse": torch.ones_like(lse)}
    tensors |= {f"gradients.{name}": torch.empty_like(tensors[name]) for name in INPUTS}

    def run(is_forward: bool, x: dict[str, Tensor]) -> str:
        changed = call._replace(**{name: x[name] for name in (*INPUTS, *BOUNDS)})
        if is_forward:
            return forward(changed, x["out"], x["lse"])
        gradients = {name: x[f"gradients.{name}"] for name in INPUTS}
        return backward(changed, x["out"], x["lse"], x["gradients.out"], x["gradients.lse"], gradients)

    pairs = list(written_pairs())
    assert len(pairs) == 2 * (2 * 13 + 1) + 11 * 17 + 55
    for is_forward, name, other in pairs:
        y, x = tensors[other], tensors[name]
        for shared in (4, 0):  # bytes
            buffer = torch.zeros(y.nbytes + x.nbytes, dtype=torch.uint8)
            first = buffer[: y.nbytes].view(y.dtype).view(y.shape).copy_(y)
            second = buffer[y.nbytes - shared :][: x.nbytes].view(x.dtype).view(x.shape)
            said = run(is_forward, tensors | {other: first, name: second})
            in_place = f" or that of {other}, element by element"
            allowed = in_place if is_forward and name == "out" and other in ("q", "q_pos") else ""
            wanted = f"{name} must have memory of its own{allowed}, got elements in the memory of {other}"
            assert said == (wanted if shared else ""), (is_forward, name, other)


@pytest.mark.parametrize("isa", ["", "baseline"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_forward_may_write_out_over_the_queries(dtype: torch.dtype, isa: str) -> None:
    """In several ranges of queries, in parts of the keys, and for heads of a group, too."""
    cases = [case for case in (*CASES, *TERMS) if case.Dv == case.D]
    cases += [
        Case("several ranges of queries", B=1, H=2, L=800, M=40),
        Case("several parts of keys", B=1, H=1, L=9, M=1700),
        Case("grouped heads", H=8, Hkv=2, L=40),
        Case("position queries of the keys' width", Dp=8),
    ]
    cpu.module().force_isa(isa)
    try:
        calls = [(case, call) for case in cases for call in calls_of(case, dtype)]
        for case, call in calls:
            wanted = results_of(call)
            for x in (call.q, call.q_pos):
                if x is None or x.size(3) != case.Dv:
                    continue
                out = torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x)
                lse = torch.full_like(wanted[1], torch.nan)
                replaced = {name: out for name in ("q", "q_pos") if getattr(call, name) is x}
                assert forward(call._replace(**replaced), out, lse) == "", case
                assert torch.equal(out, wanted[0]), (case, replaced.keys())
                assert torch.equal(lse, wanted[1]), (case, replaced.keys())
    finally:
        cpu.module().force_isa("")
    assert len(cases) > 40


def test_out_over_the_queries_needs_their_strides_and_no_backward() -> None:
    call = call_of(Case("as many heads as queries", H=6), torch.float32)
    out, lse = results_of(call)
    other_strides = call.q.transpose(1, 2)
    assert forward(call, other_strides, lse) == (
        "out must have memory of its own or that of q, element by element, got elements in the memory of q"
    )
    said = backward(call, call.q, lse, torch.ones_like(out), None, {"k": torch.empty_like(call.k)})
    assert said == "out must have memory of its own, got elements in the memory of q"
    assert backward(call, out, lse, out, lse, {"k": torch.empty_like(call.k)}) == ""  # both are only read


@pytest.mark.parametrize("axis", [2, 3], ids=["[B, L, 4, H, D]", "[B, L, H, 4, D]"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_tensors_that_alternate_in_one_buffer(dtype: torch.dtype, axis: int) -> None:
    """q, k, v and out, and the gradients of q, k and v."""
    case = Case("packed", B=2, H=3, L=21, M=6, D=13)
    call = call_of(case, dtype)
    out, lse = results_of(call)

    def packed(count: int) -> list[Tensor]:
        shape = [case.B, case.L, case.H, case.D]
        shape.insert(axis, count)
        return [x.transpose(1, 2) for x in torch.full(shape, torch.nan, dtype=dtype).unbind(axis)]

    *inputs, packed_out = packed(4)
    for x, y in zip(inputs, call[:3], strict=True):
        x.copy_(y)
    together = call._replace(q=inputs[0], k=inputs[1], v=inputs[2])
    packed_lse = torch.empty_like(lse)
    assert forward(together, packed_out, packed_lse) == ""
    assert torch.equal(packed_out, out)
    assert torch.equal(packed_lse, lse)
    dout = torch.ones_like(out)
    apart = {name: torch.empty_like(getattr(call, name)) for name in ("q", "k", "v")}
    gradients = dict(zip(apart, packed(3), strict=True))
    assert backward(call, out, lse, dout, None, apart) == ""
    assert backward(together, packed_out, lse, dout, None, gradients) == ""
    for name, want in apart.items():
        assert torch.equal(gradients[name], want), name


def halves_of(x: Tensor) -> set[int]:
    """Return the places of a tensor's elements in its buffer, in units of 2 bytes."""
    width = x.element_size() // 2
    places = torch.arange(2000).as_strided(x.size(), x.stride(), x.storage_offset()) * width
    return {place + z for place in places.flatten().tolist() for z in range(width)}


def test_sharing_is_decided_by_elements_with_any_strides() -> None:
    """Compared with sets of addresses: out with v, which may overlap itself, and with a sink."""
    draw = random.Random(0)
    outcomes = {"shared": 0, "apart": 0, "alternating": 0}
    for _ in range(800):
        dtype = draw.choice(DTYPES)
        B, H, L, D = (draw.randint(1, 3) for _ in range(4))
        order, stride, extent = draw.sample(range(3), 3), [0, 0, 0, 1], D
        for n in order:
            stride[n] = extent + draw.choice([0, 0, 1, 2, 5, 9])
            extent = stride[n] * ((B, H, L)[n] - 1) + extent
        buffer = torch.zeros(2000, dtype=torch.float32)
        out = buffer.view(dtype).as_strided((B, H, L, D), stride, draw.randint(0, 60))
        q, lse = torch.zeros(B, H, L, 2, dtype=dtype), torch.empty(B, H, L)
        v, sink = torch.zeros(B, H, L, D, dtype=dtype), None
        steps, at, other = [draw.randint(0, 14) for _ in range(3)], draw.randint(0, 60), draw.choice(["v", "sink"])
        if other == "v":
            x = v = buffer.view(dtype).as_strided((B, H, L, D), [*steps, 1], at)
        else:
            x = sink = buffer.as_strided((B, H, L), steps, at)
        mine, theirs = halves_of(out), halves_of(x)
        call = Call(
            q=q, k=q, v=v, r=torch.zeros(H, 2 * L, 2, dtype=dtype), content_bias=None, position_bias=None, k_mem=None,
            v_mem=None, r_bias=None, q_pos=None, sink=sink, start=None, end=None, seed=None, left=None, right=0,
            zero_row=0, scale=1.0, dropout_p=0.0, softcap=0.0, position_scale=1.0, zero_outside=False,
        )  # fmt: skip
        said = forward(call, out, lse)
        wanted = f"out must have memory of its own, got elements in the memory of {other}" if mine & theirs else ""
        assert said == wanted, (dtype, out.shape, stride, out.storage_offset(), other, x.stride(), at)
        ranges_meet = max(min(mine), min(theirs)) <= min(max(mine), max(theirs))
        outcomes["shared" if mine & theirs else "alternating" if ranges_meet else "apart"] += 1
    assert min(outcomes.values()) > 50, outcomes
