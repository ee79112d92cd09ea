"""From parsed instructions to functions that run them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptx.faults import NotModelled
from ptx.operands import Read, elements, items, raw_reader, types_of
from ptx.parse import Instruction, Program, Register

Bind = Callable[[Instruction], Any]
_BINDERS: dict[str, tuple[str, Bind]] = {}
_MODULES = (
    "arithmetic", "convert", "moves", "control", "memory", "copies", "warps", "matrices", "products", "tensor_copies",
)  # fmt: skip


def instruction(*names: str, kind: str = "plain") -> Callable[[Bind], Bind]:
    """Registers what makes a function of (block, lanes) of an instruction whose name begins so:
    with the most parts, where several fit.

    kind: "plain"; or what the schedule must know of: "branch", "exit", "wait" (returns which
    threads go on), "barrier" (returns its number, threads or None, whether it waits).
    """

    def register(bind: Bind) -> Bind:
        _BINDERS.update(dict.fromkeys(names, (kind, bind)))
        return bind

    return register


@dataclass
class Decoded:
    """An instruction that can be run."""

    kind: str
    run: Any
    guard: Read | None
    target: int
    text: str
    line: int


class Kernel:
    """A kernel that can be run.

    Attributes:
        param_at: offset of each parameter in their bytes.
        product_slots: registers that asynchronous products read or add to.
        shared_cell: bytes of the narrowest access to shared memory, at most 4.
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
    """Bytes of an ordinary access to shared memory; 16 for anything else."""
    if x.parts[0] not in ("ld", "st") or not x.parts[1].startswith("shared"):
        return 16
    (t,) = types_of(x.parts[1:])
    return t.bits // 8 * elements(x.parts)
