"""The self-check of a backend at the first call of a kind on a GPU: its kernels run a small case,
which is compared with the reference.

On a GPU on which the kernels were never tested, they could give wrong results silently, or raise.
If the small case differs or raises, `backend=None` leaves the backend out with that reason, and a
backend that is named raises it. Each process checks a kind once. TXL_KERNELS_SELF_CHECK=off
disables the check.
"""

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from txl_kernels.backends import reference, triton
from txl_kernels.backends.failures import is_transient, reason_of
from txl_kernels.backends.limits import DECODE_QUERIES
from txl_kernels.backends.protocol import Kernels
from txl_kernels.backends.route import is_decode
from txl_kernels.call import BOUNDS, INPUT, INPUTS, OPTIONS, TERMS, Call, inputs_of, is_given, needs_gradients
from txl_kernels.torch_state import constant_when_traced

SETTING = "TXL_KERNELS_SELF_CHECK"
# Relative to the norm of a result: ten times the usual error of the kernels; a faulty kernel gives
# about 1. float32 may be computed in tf32.
MAX_ERROR = {torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 5e-2}
LOG_AFTER = 2.0  # seconds of a check after which a line of the log says that kernels are compiled
Cotangents = tuple[Tensor, Tensor | None]  # dout and dlse
_TERMS = tuple((name, Call._fields.index(name)) for name in (*TERMS, *BOUNDS))
_OPTIONS = tuple((name, Call._fields.index(name)) for name in OPTIONS)
logger = logging.getLogger("txl_kernels")
_T = TypeVar("_T")


class Kind(NamedTuple):
    """The part of a call's signature that decides which kernels are compiled. One small case checks
    all calls of a kind."""

    backend: str
    device: torch.device
    dtype: torch.dtype
    head_width: int
    decode: bool  # at most DECODE_QUERIES queries; of "cuda", those that its decode kernels take
    gradients: bool
    terms: tuple[str, ...] = ("r",)  # the tensors of TERMS and the bounds that are given
    value_width: int | None = None  # None for head_width
    position_width: int | None = None  # None for head_width
    options: tuple[str, ...] = ()  # of OPTIONS, those that are given
    deterministic: bool = False  # torch.use_deterministic_algorithms, if there are gradients
    grouped: bool = False  # fewer heads of keys than of queries


_compared: dict[Kind, str | None] = {}
_lock = threading.Lock()


def kind_of(backend: str, call: Call, gradients: bool | None = None, decode: bool | None = None) -> Kind:
    """Return the kind of a call. Symbols of torch.compile become constants.

    gradients, decode: fields of the kind; None to derive them from the call.
    """
    q, gradients = call.q, needs_gradients(call) if gradients is None else gradients
    if decode is None:
        decode = is_decode(call) if backend == "cuda" else q.size(2) <= DECODE_QUERIES
    widths = [len(range(x.size(3))) for x in (q, call.v, q if call.q_pos is None else call.q_pos)]
    width, value_width, position_width = widths
    return Kind(
        backend, q.device, q.dtype, width, decode, gradients,
        terms=tuple([name for name, n in _TERMS if call[n] is not None]),
        value_width=None if value_width == width else value_width,
        position_width=None if position_width == width else position_width,
        options=tuple([name for name, n in _OPTIONS if is_given(call, name, n)]),
        deterministic=gradients and torch.are_deterministic_algorithms_enabled(),
        # A bool, of which torch.compile may have made a symbol.
        grouped=True if call.k.size(1) != call.q.size(1) else False,  # noqa: SIM210
    )  # fmt: skip


def is_wanted() -> bool:
    """Whether the self-check is enabled.

    Raises:
        ValueError: TXL_KERNELS_SELF_CHECK is neither "on" nor "off".
    """
    wanted = os.environ.get(SETTING, "on")
    if wanted not in ("on", "off"):
        raise ValueError(f"{SETTING} must be on or off, got {wanted!r}")
    return wanted == "on"


@constant_when_traced
def can_run_now(device: torch.device) -> bool:
    """Whether the device is a GPU and no CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


def concerns(device: torch.device) -> bool:
    """Whether backends are checked on a device before they are used."""
    return device.type == "cuda" or can_run_now(device)


def is_settled(kind: Kind) -> bool:
    """Whether later calls of the kind will get the same answer."""
    return kind in _compared or kind.device.type != "cuda" or not is_wanted()


def why_not_trusted(kernels: Kernels, kind: Kind) -> str | None:
    """Return the reason why a backend must not be used for a kind of call: how the results of the
    small case differ from the reference's, or what it raised. None if they agree, or cannot be
    compared now.

    Raises:
        BaseException: the case was interrupted, memory was full, or the CUDA context is lost. This
            says nothing about the backend and is not stored.
    """
    if kind in _compared:
        return _compared[kind]
    if not can_run_now(kind.device) or not is_wanted():
        return None
    with _lock:
        if kind not in _compared:
            _compared[kind] = found = _in_a_thread(_find, kernels, kind)
            if found is None and kind.gradients:  # forward agreed, too
                _compared[kind._replace(gradients=False, deterministic=False)] = None
        return _compared[kind]


def _in_a_thread(function: Callable[..., _T], *args: Any) -> _T:
    """Run a function in another thread, and return its result or raise its exception. The caller's
    modes, transforms, tracers, streams and default devices are not active there."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="txl_kernels self-check", daemon=True).start()
    return future.result()


def _find(kernels: Kernels, kind: Kind) -> str | None:
    """Return the result of `why_not_trusted`, without storing it."""
    try:
        with _log_compilation(kind):
            found = compare(kernels, kind)
    except Exception as error:
        if is_transient(error, kind.device):
            raise
        logger.info("backend=%r is left out for %s", kind.backend, kind, exc_info=error)
        return reason_of(error)
    return None if found is None else f"{found}. {SETTING}=off runs it nevertheless"


@contextlib.contextmanager
def _log_compilation(kind: Kind) -> Iterator[None]:
    """A context that logs one line if Triton's check takes longer than `LOG_AFTER`, as where it
    compiles. The kernels of the other backends are compiled already."""
    if kind.backend != triton.NAME:
        yield
        return
    text = (
        "the first triton call of this dtype, head width and direction on %s compiles kernels: usually 1 to 15 seconds, "
        "and well below a second in later processes, which find them in Triton's cache"
    )
    timer = threading.Timer(LOG_AFTER, logger.warning, (text, kind.device))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # there may be no more threads
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def compare(kernels: Kernels, kind: Kind) -> str | None:
    """Return how the kernels' results, in their dtype, differ from the reference in float64; None
    if the error is within `MAX_ERROR`.

    Two small cases run: one whose keys are split among programs, and one with enough batch rows to
    fill the device without a split.
    """
    for fills in (False, True):
        errors = errors_of(kind, case_of(kind, fills), functools.partial(_run, kernels, kind), with_dlse=not fills)
        for name, error in errors.items():
            if not error <= MAX_ERROR[kind.dtype]:
                return (
                    f"its {name} for a small case in {str(kind.dtype).removeprefix('torch.')} at head width "
                    f"{kind.head_width} is off by {error:.2g} of its norm, where {MAX_ERROR[kind.dtype]:.2g} is allowed"
                )
    return None


def errors_of(
    kind: Kind, exact: Call, run: Callable[[Call, Cotangents], list[Tensor | None]], with_dlse: bool = True
) -> dict[str, float]:
    """Return the errors of out, lse and, if the kind has gradients, of the gradients of the inputs
    that are not None: each the norm of the difference from the reference over the reference's norm.

    exact: a call in float64 on the CPU, as `case_of` returns.
    run: returns these results for the call on the kind's device and in its dtype.
    with_dlse: False if dlse is None.
    """
    given = {name: x for name, x in zip(INPUTS, inputs_of(exact), strict=True) if x is not None}
    grads: tuple[Tensor | None, ...] = ()
    with torch.enable_grad():
        leaves = [x.requires_grad_(kind.gradients) for x in given.values()]
        out, lse = reference.forward(exact)
        at = torch.arange(out.numel(), dtype=torch.float64, device="cpu")
        dout, dlse = at.cos().view(out.shape), torch.ones_like(lse) if with_dlse else None
        if kind.gradients:
            outs, cotangents = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
            grads = torch.autograd.grad(outs, leaves, cotangents, allow_unused=True)
    results = run(on_device(exact, kind), (dout, dlse))
    names = ["out", "lse", *(f"gradient of {name}" for name in given)]
    errors = {}
    for name, got, want in zip(names, results, (out.detach(), lse.detach(), *grads), strict=False):
        if want is not None:  # None for the gradient of a position bias without a table
            errors[name] = torch.inf if got is None else float((got.cpu().double() - want).norm() / want.norm())
    return errors


def _run(kernels: Kernels, kind: Kind, call: Call, cotangents: Cotangents) -> list[Tensor | None]:
    with torch.no_grad():
        out, lse = kernels.forward(call)
        results: list[Tensor | None] = [out, lse]
        if kind.gradients:
            assert lse is not None
            dout, dlse = cotangents
            grads = kernels.backward(call, out, lse, dout.to(out), None if dlse is None else dlse.to(lse))
            results += [dx for x, dx in zip(inputs_of(call), grads, strict=True) if x is not None]
        if kind.device.type == "cuda":
            torch.cuda.synchronize(kind.device)  # raise errors of kernels here
    return results


def on_device(exact: Call, kind: Kind) -> Call:
    def dtype(name: str, x: Tensor) -> torch.dtype:
        if name in INPUT and INPUT[name].dtype == "lse":
            return torch.float32
        return kind.dtype if x.is_floating_point() else x.dtype

    moved: dict[str, Any] = {
        name: x.detach().to(kind.device, dtype(name, x)) for name, x in exact._asdict().items() if isinstance(x, Tensor)
    }
    return exact._replace(**moved)


def case_of(kind: Kind, fills: bool = False) -> Call:
    """Return a small case on the CPU: more keys than a tile, and a memory that ends inside a tile;
    in float64, with values that the kind's dtype can represent. A case of decode has one query,
    and three where it fills the device, since "cuda" has a kernel for each number.

    fills: True for at least as many batch rows times heads as the device has multiprocessors.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    batch, heads, length, memory = (2, 2, 1, 150) if kind.decode else (1, 2, 70, 90)
    if fills:
        batch = -(-_multiprocessors(kind.device) // heads)
        length, memory = (3, 150) if kind.decode else (20, 60)
    width, keys = kind.head_width, memory + length
    sizes = {
        "B": batch, "H": heads, "Hkv": 1 if kind.grouped else heads, "L": length, "M": memory, "D": width,
        "T": keys // 3 if "zero_outside" in kind.options else keys,  # then tiles lie on both sides of the table's end
        "Dv": kind.value_width or width, "Dp": kind.position_width or width,
    }  # fmt: skip

    def values(name: str) -> Tensor | None:
        if INPUT[name].is_term and name not in kind.terms:
            return None
        drawn = torch.randn(
            [sizes[x] for x in INPUT[name].axes.split()], generator=generator, dtype=torch.float32, device="cpu"
        )
        return drawn.to(kind.dtype).double()

    inputs = {name: values(name) for name in INPUTS}
    if "r" not in kind.terms:
        inputs["position_bias"] = None
    if kind.backend == "cuda" and "q_pos" in kind.terms:  # whose kernels of prefill take no biases then
        inputs["content_bias"] = inputs["position_bias"] = None
    own_scale = 0.7 if "q_pos" in kind.terms or "position_scale" in kind.options else 1.0
    at = memory + torch.arange(length, dtype=torch.int32, device="cpu").expand(batch, length)
    return Call(
        **inputs,  # type: ignore[arg-type]
        start=(at - 37).contiguous() if "start" in kind.terms else None,
        end=(at + 1 - at % 3).contiguous() if "end" in kind.terms else None,
        seed=torch.tensor([1234], dtype=torch.int64, device="cpu") if "dropout_p" in kind.options else None,
        left=None,
        right=0,
        zero_row=0,
        scale=width**-0.5,
        dropout_p=0.25 if "dropout_p" in kind.options else 0.0,
        softcap=5.0 if "softcap" in kind.options else 0.0,
        position_scale=own_scale * width**-0.5,
        zero_outside="zero_outside" in kind.options,
    )


def _multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors; on a CPU the number that Triton's interpreter
    assumes."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
