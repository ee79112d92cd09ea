"""Methods to compute one call of rel_attention with settings: arguments, checks, and comparisons.

Arguments are keywords of rel_attention, with `k_mem` and `v_mem` for its memory, and tensors that
only other implementations take, whose names end in "_all". Tensors of floating dtype get gradients.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.case import DIRECTIONS, Case, Direction, Shape
from harness.comparison import Comparison, Entry, Implementation, Role, require
from harness.machine import Machine
from implementations.attention import agree, floats
from txl_kernels import rel_attention

Arguments = dict[str, Any]
Random = Callable[..., Tensor]  # makes a random tensor of the given sizes
TERMS = ("r", "content_bias", "position_bias")


class Method(NamedTuple):
    """A method to compute a comparison's work.

    Attributes:
        arguments: makes the arguments of a call of the given shape.
        call: function of the arguments; it computes what rel_attention does with them, unless the
            role is "baseline".
        operations: useful operations of a call of the timed shape.
    """

    name: str
    arguments: Callable[[Shape, Random], Arguments]
    role: Role = "part"
    call: Callable[[Arguments], Tensor] | None = None  # None: rel_attention
    operations: float = 0.0


def attend(x: Arguments) -> Tensor:
    """Call rel_attention with those of the arguments that it takes."""
    given = {"r": None} | {name: y for name, y in x.items() if not name.endswith(("_mem", "_all"))}
    if "k_mem" in x:
        given["memory"] = x["k_mem"], x["v_mem"]
    return rel_attention(**given)


def bidirectional(
    shape: Shape, randn: Random, terms: tuple[str, ...] = TERMS, rows: int = 0, heads: int = 0, wider: int = 1,
    **settings: Any,
) -> Arguments:  # fmt: skip
    """Make the arguments of a call that is not causal.

    terms: those of the scores beside the product of queries and keys. rows: of the table, whose
    middle one is distance 0, if not all distances have one. heads: of the table. wider: width of
    values as a multiple of D.
    """
    B, H, L, M, D = shape
    zero_row = rows // 2 if rows else L - 1
    rows = rows or M + 2 * L - 1
    sizes = {"r": (heads or H, rows, D), "r_bias": (H, rows), "content_bias": (H, D), "position_bias": (H, D)}
    x = {"q": randn(B, H, L, D), "k": randn(B, H, L, D), "v": randn(B, H, L, wider * D)}
    if M:
        x |= {"k_mem": randn(B, H, M, D), "v_mem": randn(B, H, M, wider * D)}
    x |= {name: randn(*sizes[name]) for name in terms}
    return x | {"causal": False, "zero_row": zero_row} | settings


def lengths(shape: Shape) -> list[int]:
    """Return the lengths of the batch's rows, from L / 4 to L."""
    return [round(shape.L * (0.25 + 0.75 * n / max(shape.B - 1, 1))) for n in range(shape.B)]


def padded(shape: Shape, randn: Random, masked: bool = True, **settings: Any) -> Arguments:
    """Make the arguments of a call on a padded batch; masked: with each row's length as `end`."""
    x = bidirectional(shape, randn, **settings)
    end = torch.tensor(lengths(shape), dtype=torch.int32, device=x["q"].device)[:, None]
    return x | ({"end": end} if masked else {})


def make(method: Method, shape: Shape, dtype: torch.dtype, device: torch.device) -> Arguments:
    g = torch.Generator(device).manual_seed(0)
    x = method.arguments(shape, lambda *size: torch.randn(*size, generator=g, device=device).to(dtype))
    for y in floats(x).values():
        y.requires_grad_()
    return x


def check(method: Method, small: Shape, backward: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Compare values, and gradients if `backward`, with the float64 reference."""
    x = make(method, small, dtype, device)
    agree(method.call or attend, lambda exact: attend(exact | {"backend": "reference"}), x, backward)


def passes(forward: Callable[[], Tensor], leaves: Iterable[Tensor], backward: bool) -> Callable[[], Tensor]:
    """Return a function that runs forward without gradients, or forward and backward."""
    leaves = list(leaves)

    def run() -> Tensor:
        with torch.set_grad_enabled(backward):
            out = forward()
            if backward:
                for x in leaves:
                    x.grad = None
                out.backward(torch.ones_like(out))
        return out

    return run


def _implementation(
    method: Method, machine: Machine, shape: Shape, small: Shape, backward: bool, dtype: torch.dtype
) -> Implementation:
    checked = functools.partial(check, method, small, backward, dtype, machine.device)

    def prepare() -> Entry:
        x = make(method, shape, dtype, machine.device)
        run = passes(functools.partial(method.call or attend, x), floats(x).values(), backward)
        return Entry(run, None if method.role == "baseline" else checked, operations=method.operations)

    other_dtype = None if dtype == machine.dtype else str(dtype).removeprefix("torch.")
    name = f"{method.name}, {other_dtype}" if other_dtype else method.name
    return Implementation(name, prepare, method.role, other_dtype)


def compared(
    group: str, machine: Machine, case: Case, shape: Shape, small: Shape, methods: Iterable[Method], seconds: float = 4.0, *,
    directions: Iterable[Direction] = DIRECTIONS, dtypes: Iterable[torch.dtype] = (),
    limits: Iterable[Implementation] = (),
) -> list[Comparison]:  # fmt: skip
    """Return comparisons of the methods at `shape`, in the machine's dtype or in `dtypes`.

    small: the shape of the checks, in which every setting should hide or replace something.
    """
    found = []
    for direction in directions:
        given = (machine, shape, small, direction == "forward+backward")
        runs = [_implementation(method, *given, dtype) for dtype in dtypes or (machine.dtype,) for method in methods]
        found.append(Comparison(group, replace(case, direction=direction), [*runs, *limits], seconds=seconds))
    return found


def graphed(implementation: Implementation, machine: Machine) -> Implementation:
    """Return the implementation with its call captured in a CUDA graph."""
    prepare = functools.partial(_capture, implementation.prepare, machine)
    return replace(implementation, name=f"{implementation.name}, CUDA graph", prepare=prepare)


def _capture(prepare: Callable[[], Entry], machine: Machine) -> Entry:
    """Capture a call in a CUDA graph; the entry's check also compares the output of a replay."""
    made = prepare()
    alone = made.run()
    machine.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made.run()

    def check() -> None:
        if made.check is not None:
            made.check()
        captured.zero_()
        graph.replay()
        require(captured, alone.double(), "what the graph writes")

    def replay() -> None:
        graph.replay()
        made  # noqa: B018  keeps the tensors that the graph reads alive

    return Entry(replay, check, bytes=made.bytes)
