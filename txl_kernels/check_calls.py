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
from txl_kernels.backends import KERNELS, cuda, route, self_check, triton
from txl_kernels.backends.failures import is_lost
from txl_kernels.backends.protocol import platform
from txl_kernels.backends.self_check import MAX_ERROR, Cotangents, Kind
from txl_kernels.call import Call, inputs_of
from txl_kernels.functional import rel_attention

WIDTHS = (16, 32, 40, 41, 64, 80, 128, 256)
# By name, fields of the kind and fields of the call that differ from the small case's.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dropout": ({"options": ("dropout_p",)}, {}),
    "start and end": ({"terms": ("r", "start", "end")}, {}),
    "window": ({}, {"left": 32}),
    "window to both sides": ({}, {"left": 40, "right": 5, "zero_row": 5}),
    "bidirectional": ({"options": ("zero_outside",)}, {"right": None}),
    "softcap": ({"options": ("softcap",)}, {}),
    "bias instead of r": ({"terms": ("r_bias",)}, {}),
    "Inkling's terms": (
        {"terms": ("r", "q_pos", "sink"), "position_width": 16, "options": ("zero_outside",), "grouped": True},
        {},
    ),
    "rows that fill the device": ({}, {}),
}
_WIDEST_LINE = 75  # characters of a line's description of its call


class Trial(NamedTuple):
    """A call to make: its kind, an option of OPTIONS, and whether it is compiled."""

    kind: Kind
    option: str = ""
    compiled: bool = False

    def describe(self, length: int) -> str:
        """Return the description of the call, whose number of queries is `length`."""
        kind = self.kind
        extra = "".join(f", {x}" for x in (self.option, "torch.compile" if self.compiled else "") if x)
        direction = "forward and backward" if kind.gradients else "forward"
        queries = "1 query" if length == 1 else f"{length} queries"
        return f"{str(kind.dtype).removeprefix('torch.')}, D {kind.head_width}, {queries}, {direction}{extra}"

    def case(self) -> Call:
        """Return the call in float64 on the CPU."""
        _, fields = OPTIONS.get(self.option, ({}, {}))
        return self_check.case_of(self.kind, fills=self.option == "rows that fill the device")._replace(**fields)


def trials(device: torch.device) -> Iterator[Trial]:
    """Yield the calls to make. Narrow heads come last: compilers for Hopper have been reported to
    lose the CUDA context with them, which ends the run."""

    def trial(dtype: torch.dtype, width: int, decode: bool, gradients: bool, option: str = "") -> Trial:
        fields, _ = OPTIONS.get(option, ({}, {}))
        return Trial(Kind("", device, dtype, width, decode, gradients, **fields), option)

    def of_widths(widths: Sequence[int]) -> Iterator[Trial]:
        for width in widths:
            yield trial(half, width, decode=True, gradients=False)
            yield trial(half, width, decode=False, gradients=False)
            yield trial(half, width, decode=False, gradients=True)

    half = torch.bfloat16
    yield from of_widths(WIDTHS[2:])
    for dtype in (torch.float32, torch.float16):
        for width in (41, 64, 128):
            yield trial(dtype, width, decode=True, gradients=False)
            yield trial(dtype, width, decode=False, gradients=True)
    yield trial(half, 64, decode=True, gradients=True)
    for option in OPTIONS:
        yield trial(half, 64, decode=True, gradients=False, option=option)
        yield trial(half, 64, decode=False, gradients=True, option=option)
    if device.type == "cuda":  # on a CPU torch.compile takes longer than all other calls
        yield trial(half, 64, decode=False, gradients=True)._replace(compiled=True)
    yield from of_widths(WIDTHS[:2])


def _arguments(call: Call) -> dict[str, Any]:
    """Return the arguments with which `rel_attention` makes a call."""
    others = ("k_mem", "v_mem", "seed", "left", "right", "zero_outside")
    given = {name: x for name, x in call._asdict().items() if name not in others}
    given |= {"memory": (call.k_mem, call.v_mem), "causal": call.right == 0, "dropout_seed": call.seed}
    given |= {"window": None if call.left is None and call.right in (0, None) else (call.left, call.right)}
    given |= {"outside": "zero" if call.zero_outside else "refuse"}
    return given


def _run(trial: Trial, backend: str | None, call: Call, cotangents: Cotangents) -> list[Tensor | None]:
    """Return out, lse and, if the kind has gradients, the gradients, as `rel_attention` computes
    them."""
    attend: Callable[..., Any] = torch.compile(rel_attention) if trial.compiled else rel_attention
    leaves = [x.requires_grad_(trial.kind.gradients) for x in inputs_of(call) if x is not None]
    out, lse = attend(**_arguments(call), return_lse=True, backend=backend)
    results = [out.detach(), lse.detach()]
    if trial.kind.gradients:
        given = [dx.to(x) for x, dx in zip((out, lse), cotangents, strict=True) if dx is not None]
        results += torch.autograd.grad([out, lse], leaves, given, allow_unused=True)
    return results


class Check:
    """The calls of one run, with their failures and warnings."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self.device, self.say = device, say
        self.failures: list[str] = []
        self.notes: dict[str, None] = {}  # texts of warnings, as an ordered set
        self.count = 0

    def run(self, wanted: Iterator[Trial]) -> bool:
        """Make the calls; return whether all results were right."""
        for trial in wanted:
            exact = trial.case()
            chosen = self._try(trial, exact, None)
            for name in (cuda.NAME, triton.NAME):
                if name == chosen or trial.compiled or is_lost(self.device):
                    continue
                if self._supports(name, trial.kind, exact):
                    self._try(trial, exact, name)
            if is_lost(self.device):
                self.failures.append(f"the {platform()} context is lost: nothing after it was run")
                break
        return not self.failures

    def _supports(self, name: str, kind: Kind, exact: Call) -> bool:
        """Whether a backend supports a call for which backend=None chose another."""
        kernels = KERNELS[name]
        if kernels.why_not_tensors(self.device, kind.dtype, kind.head_width) is not None:
            return False
        call = self_check.on_device(exact, kind)
        call.q.requires_grad_(kind.gradients)
        return route.why_not_call(name, call) is None

    def _try(self, trial: Trial, exact: Call, name: str | None) -> str:
        """Make one call and print its line; return the name of the backend that ran it."""
        what = trial.describe(exact.q.size(2))
        begun, seconds, chosen, limit = time.perf_counter(), 0.0, name or "?", MAX_ERROR[trial.kind.dtype]

        def run(call: Call, cotangents: Cotangents) -> list[Tensor | None]:
            nonlocal begun, seconds, chosen
            begun = time.perf_counter()
            results = _run(trial, name, call, cotangents)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds = time.perf_counter() - begun
            chosen = name or backends.choose(None, call)
            return results

        self.count += 1
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                errors = self_check.errors_of(trial.kind, exact, run)
            self.notes |= dict.fromkeys(str(x.message) for x in caught)
            wrong = [f"its {part} is off by {error:.2g}" for part, error in errors.items() if not error <= limit]
            largest = max(errors.values(), key=lambda error: (error != error, error))  # NaN is the largest
            ending = f"{seconds:8.3f} s  error {largest:.1e}{'  WRONG' if wrong else ''}"
            if wrong:
                self.failures.append(f"{what}: {chosen}: {', '.join(wrong)} of its norm, {limit:.2g} is allowed")
        except Exception as raised:
            ending = f"{time.perf_counter() - begun:8.3f} s  RAISED {type(raised).__name__}"
            self.failures.append(
                f"{what}, backend={name!r}:\n{''.join(traceback.format_exception(raised)[-4:])}".rstrip()
            )
        self.say(f"{what:<{_WIDEST_LINE}} {chosen:<9} {ending}")
        return chosen


def check(device: torch.device, say: Callable[[str], None] = print, widths: Sequence[int] = WIDTHS) -> int:
    """Make the calls of all kinds with these head widths and print the results. Return 0 if every
    call was right and no backend was left out, else 1."""
    begun, run = time.perf_counter(), Check(device, say)
    say(f"\ncalls on {device}:")
    run.run(x for x in trials(device) if x.kind.head_width in widths)
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
