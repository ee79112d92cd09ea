"""`python -m txl_kernels --check`: makes each kind of call that users make once on this machine.

Each call prints one line: the backend that ran it, seconds to the first result, and the error
against the reference in float64. If a call raises, its line says so, and the other calls still run.
"""

import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_kernels import backends
from txl_kernels.backends import KERNELS, cuda, triton
from txl_kernels.backends.failures import is_lost
from txl_kernels.backends.self_check import MAX_ERROR
from txl_kernels.call import Call
from txl_kernels.checks import broadcast_sink, span
from txl_kernels.composed import of_all_heads
from txl_kernels.functional import rel_attention

WIDTHS = (16, 32, 40, 41, 64, 80, 128, 256)
OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_p": 0.2},
    "start and end": {"bounds": True},
    "window": {"window": 33},
    "window to both sides": {"window": (40, 5), "causal": False},
    "bidirectional": {"causal": False},
    "softcap": {"softcap": 5.0},
    "bias instead of r": {"r_bias": True},
    "Inkling's terms": {"inkling": True},
    "rows that fill the device": {"rows": 264},
}
_WIDEST_LINE = 75  # characters of a line's description of its call


class Kind(NamedTuple):
    """A kind of call: dtype, head width D, decode or prefill, with gradients or not, an option of
    OPTIONS, compiled or not."""

    dtype: torch.dtype
    D: int
    decode: bool
    gradients: bool
    option: str = ""
    compiled: bool = False

    def __str__(self) -> str:
        extra = "".join(f", {x}" for x in (self.option, "torch.compile" if self.compiled else "") if x)
        direction = "forward and backward" if self.gradients else "forward"
        return f"{_short(self.dtype)}, D {self.D}, {self.length} queries, {direction}{extra}"

    @property
    def length(self) -> int:
        return 3 if self.decode else 70

    @property
    def memory(self) -> int:
        return 150 if self.decode else 90


def kinds(device: torch.device) -> Iterator[Kind]:
    """Yield the kinds of calls to make. Narrow heads come last: compilers for Hopper have been
    reported to lose the CUDA context with them, which ends the run."""
    half = torch.bfloat16
    yield from _of_widths(WIDTHS[2:])
    for dtype in (torch.float32, torch.float16):
        for width in (41, 64, 128):
            yield Kind(dtype, width, decode=True, gradients=False)
            yield Kind(dtype, width, decode=False, gradients=True)
    yield Kind(half, 64, decode=True, gradients=True)
    for option in OPTIONS:
        yield Kind(half, 64, decode=True, gradients=False, option=option)
        yield Kind(half, 64, decode=False, gradients=True, option=option)
    if device.type == "cuda":  # on a CPU torch.compile takes longer than all other calls
        yield Kind(half, 64, decode=False, gradients=True, compiled=True)
    yield from _of_widths(WIDTHS[:2])


def _of_widths(widths: Sequence[int]) -> Iterator[Kind]:
    for width in widths:
        yield Kind(torch.bfloat16, width, decode=True, gradients=False)
        yield Kind(torch.bfloat16, width, decode=False, gradients=False)
        yield Kind(torch.bfloat16, width, decode=False, gradients=True)


def arguments(kind: Kind) -> dict[str, Any]:
    """Return arguments of `rel_attention` on the CPU, in float64 with values that the kind's dtype
    can represent."""
    options = dict(OPTIONS.get(kind.option, {}))
    rows, length, memory, width = options.pop("rows", 4), kind.length, kind.memory, kind.D
    generator = torch.Generator("cpu").manual_seed(0)

    def values(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.to(kind.dtype).double().requires_grad_(kind.gradients)

    zero_row = 0 if options.get("causal", True) else length - 1
    given: dict[str, Any] = {name: values(rows // 2, 2, length, width) for name in "qkv"}
    given |= {"memory": tuple(values(rows // 2, 2, memory, width) for _ in range(2)), "zero_row": zero_row}
    given |= {"r": values(2, zero_row + memory + length, width), "content_bias": values(2, width)}
    given["position_bias"] = values(2, width)
    if options.pop("inkling", False):  # one head of keys and values, a short table, position queries of width 16, sinks
        given |= {name: values(rows // 2, 1, length, width) for name in "kv"}
        given |= {"memory": tuple(values(rows // 2, 1, memory, width) for _ in range(2)), "r": values(1, 60, 16)}
        given |= {"q_pos": values(rows // 2, 2, length, 16), "position_bias": None, "position_scale": 1.0}
        given |= {"outside": "zero", "sink": values(2)}
    if options.pop("r_bias", False):
        given |= {"r_bias": values(2, zero_row + memory + length), "r": None, "position_bias": None}
    if options.pop("bounds", False):
        at = memory + torch.arange(length, dtype=torch.int32, device="cpu").expand(rows // 2, length)
        given |= {"start": (at - 37).contiguous(), "end": (at + 1).contiguous()}
    if "dropout_p" in options:
        given["dropout_seed"] = torch.tensor([1234], dtype=torch.int64, device="cpu")
    return given | options


def moved(given: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return copies of tensors on a device, floating-point tensors in `dtype`, as leaves of a new
    graph; other values unchanged."""
    if isinstance(given, tuple) and all(isinstance(x, Tensor) for x in given):
        return tuple(moved(x, device, dtype) for x in given)
    if not isinstance(given, Tensor):
        return given
    x = given.detach().to(device, dtype if given.is_floating_point() else given.dtype, copy=True)
    return x.requires_grad_(given.requires_grad)


def results(given: dict[str, Any], backend: str | None, attention: Callable[..., Any] = rel_attention) -> list[Tensor]:
    """Return out, lse and, if inputs require them, gradients."""
    out, lse = attention(**given, return_lse=True, backend=backend)
    leaves = [x for value in given.values() for x in (value if isinstance(value, tuple) else (value,))]
    leaves = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        return [out, lse]
    at = torch.arange(out.numel(), dtype=torch.float64, device="cpu").view(out.shape)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, at.cos().to(out))]


def call_of(given: dict[str, Any]) -> Call:
    """Return the call that `rel_attention` makes of such arguments."""
    q, q_pos, heads = given["q"], given.get("q_pos"), given["q"].size(1)
    scale = q.size(3) ** -0.5
    u, w = (
        of.new_zeros(heads, of.size(3)) if given[name] is None else given[name]
        for name, of in (("content_bias", q), ("position_bias", q if q_pos is None else q_pos))
    )
    left, right = span(given.get("causal", True), given.get("window"))
    k_mem, v_mem = given["memory"]
    return Call(
        q, given["k"], given["v"], of_all_heads(given["r"], heads), u, w, k_mem, v_mem, given.get("r_bias"), q_pos,
        broadcast_sink(given.get("sink"), q), given.get("start"), given.get("end"), given.get("dropout_seed"), left, right,
        given["zero_row"], scale, given.get("dropout_p", 0.0), given.get("softcap", 0.0),
        given.get("position_scale", scale), given.get("outside") == "zero",
    )  # fmt: skip


def error_of(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest relative error of the results: the norm of a difference over the norm of
    the wanted tensor."""
    pairs = zip(got, want, strict=True)
    return max(float((x.cpu().double() - y).norm() / y.norm()) if y.any() else float(x.any()) for x, y in pairs)


class Check:
    """The calls of one run, with their failures and warnings."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self.device, self.say = device, say
        self.failures: list[str] = []
        self.notes: dict[str, None] = {}  # texts of warnings, as an ordered set
        self.count = 0

    def run(self, wanted: Iterator[Kind]) -> bool:
        """Make a call of each kind; return whether all results were right."""
        for kind in wanted:
            exact = arguments(kind)
            want = results(exact, "reference")
            given = moved_all(exact, self.device, kind.dtype)
            chosen = self._try(kind, given, None, want)
            for name in (cuda.NAME, triton.NAME):
                if name != chosen and self._fits(name, kind, given):
                    self._try(kind, given, name, want)
            if is_lost(self.device):
                self.failures.append("the CUDA context is lost: nothing after it was run")
                break
        return not self.failures

    def _fits(self, name: str, kind: Kind, given: dict[str, Any]) -> bool:
        """Whether a backend supports a call for which backend=None chose another."""
        kernels = KERNELS[name]
        fits = kernels.why_not_tensors(self.device, kind.dtype, kind.D) is None and not kind.compiled
        return fits and kernels.why_not_call(call_of(given)) is None

    def _try(self, kind: Kind, given: dict[str, Any], name: str | None, want: list[Tensor]) -> str:
        """Make one call and print its line; return the name of the backend that ran it."""
        begun, chosen = time.perf_counter(), name or "?"
        attention = torch.compile(rel_attention) if kind.compiled else rel_attention
        self.count += 1
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                got = results(given, name, attention)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                seconds = time.perf_counter() - begun
                chosen = name or backends.choose(None, call_of(given))
            self.notes |= dict.fromkeys(str(x.message) for x in told)
            error = error_of(got, want)
            right = error <= MAX_ERROR[kind.dtype]  # False if error is NaN
            ending = f"{chosen:<9} {seconds:8.3f} s  error {error:.1e}{'' if right else '  WRONG'}"
            if not right:
                self.failures.append(f"{kind}: {chosen} is off by {error:.2g}, {MAX_ERROR[kind.dtype]:.2g} is allowed")
        except Exception as raised:
            seconds = time.perf_counter() - begun
            ending = f"{chosen:<9} {seconds:8.3f} s  RAISED {type(raised).__name__}"
            self.failures.append(
                f"{kind}, backend={name!r}:\n{''.join(traceback.format_exception(raised)[-4:])}".rstrip()
            )
        self.say(f"{kind!s:<{_WIDEST_LINE}} {ending}")
        return chosen


def moved_all(given: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {name: moved(x, device, dtype) for name, x in given.items()}


def check(device: torch.device, say: Callable[[str], None] = print, widths: Sequence[int] = WIDTHS) -> int:
    """Make the calls of all kinds with these head widths and print the results. Return 0 if every
    call was right and no backend was left out, else 1."""
    begun, run = time.perf_counter(), Check(device, say)
    say(f"\ncalls on {device}:")
    run.run(x for x in kinds(device) if x.D in widths)
    left_out = [x for x in run.notes if "is left out" in x]
    for note in run.notes:
        say(f"\nwarning: {note}")
    for failure in run.failures:
        say(f"\n{failure}")
    say(
        f"\n{run.count} calls in {time.perf_counter() - begun:.0f} s, {len(run.failures)} failed, of "
        f"{', '.join(KERNELS)} {len(left_out)} left out. To report it, paste all of this into an issue."
    )
    return 1 if run.failures or left_out else 0


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
