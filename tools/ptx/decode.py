"""Decoding of parsed instructions to functions that execute them."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptx.demand import demanded
from ptx.faults import NotModelled
from ptx.operands import Read, elements, items, raw_reader, types_of
from ptx.parse import Instruction, Program, Register

Bind = Callable[[Instruction], Any]
_BINDERS: dict[str, tuple[str, Bind]] = {}
_MODULES = (
    "arithmetic", "convert", "moves", "control", "memory", "copies", "warps", "matrices", "products", "tensor_copies",
)  # fmt: skip


def instruction(*names: str, kind: str = "plain") -> Callable[[Bind], Bind]:
    """Decorator that registers a function, which makes the executable (block, lanes) of an
    instruction, for instructions whose name begins with one of `names`; the longest match is used.

    kind: "plain", or how the instruction affects the schedule: "branch", "exit", "wait" (the
    executable returns the threads that continue), "barrier" (it returns the barrier's number, the
    number of threads or None, and whether the threads wait), "warp barrier", or "warpgroup" (four
    warps execute it together, though each may come in its own time).
    """

    def register(bind: Bind) -> Bind:
        _BINDERS.update(dict.fromkeys(names, (kind, bind)))
        return bind

    return register


@dataclass
class Decoded:
    """An instruction with its executable function."""

    kind: str
    run: Any
    guard: Read | None
    target: int
    text: str
    line: int


class Kernel:
    """A decoded kernel.

    Attributes:
        param_at: byte offset of each parameter.
        product_slots: registers that asynchronous products read or accumulate in.
        shared_cell: size in bytes of the narrowest access to shared memory, at most 4.
    """

    def __init__(self, program: Program) -> None:
        for name in _MODULES:
            importlib.import_module(f"ptx.instructions.{name}")
        self.program = program
        self.code = [_decode(x) for x in program.code]
        self.param_at, self.param_bytes = {}, 0
        for name, size, align in program.params:
            self.param_bytes = -(-self.param_bytes // align) * align
            self.param_at[name] = self.param_bytes
            self.param_bytes += size
        self.shared_cell = min([4, *map(_shared_width, program.code)])
        products = [x for x in program.code if x.parts[:2] == ("wgmma", "mma_async")]
        used = [r for x in products for operand in x.operands[:2] for r in items(operand)]
        self.product_slots = {r.slot for r in used if isinstance(r, Register) and r.bits == 32}

    @functools.cached_property
    def demanded(self) -> list[int]:
        """Bits of each register that can matter; see `ptx.demand`."""
        return demanded(self.program)


def _decode(x: Instruction) -> Decoded:
    guard = raw_reader(x.guard, 1) if x.guard else None
    if guard is not None and x.negated:
        positive = guard
        guard = lambda block, lanes: ~positive(block, lanes)  # noqa: E731
    beginnings = (".".join(x.parts[:n]) for n in range(len(x.parts), 0, -1))
    found = next((_BINDERS[name] for name in beginnings if name in _BINDERS), None)
    if found is None:
        raise NotModelled(f"line {x.line}: {x.text}")
    kind, bind = found
    try:
        return Decoded(kind, bind(x), guard, x.target, x.text, x.line)
    except NotModelled as error:
        raise NotModelled(f"line {x.line}: {x.text} ({error})") from None


def _shared_width(x: Instruction) -> int:
    """Return the bytes of an ordinary access to shared memory; 16 for any other instruction."""
    if x.parts[0] not in ("ld", "st") or not x.parts[1].startswith("shared"):
        return 16
    (t,) = types_of(x.parts[1:])
    return t.bits // 8 * elements(x.parts)
