"""Bits of registers that can matter to what a program does.

LLVM fills a lane of a vector that nothing uses from a register that nothing writes, as Triton 3.7
does in `backward_queries_kernel` for sm_80, and Triton 3.9 for sm_120:

    mov.b32 %r1, {%rs1, %rs2};  // %rs1 is never written
    mov.b32 {_, %rs3}, %r1;
"""

from collections.abc import Iterator

from ptx.operands import Type, types_of
from ptx.parse import Address, Immediate, Instruction, Operand, Program, Register, TensorAddress, Vector


def demanded(program: Program) -> list[int]:
    """Return a mask for each register, of those of its bits that an instruction may use.

    Every instruction uses all bits of all its registers, except mov, shr by a constant and cvt
    between unsigned integers, which use a bit of their source only if the bit of their result that
    it becomes is used, and products and sums of float32 pairs, which use a lane only if that lane
    of their result is. So no bit of a register whose mask is 0 reaches a store, a branch, an
    address or other arithmetic, whichever way the threads go. Predicates are always used.
    """
    masks = [int(r.bits == 1) for r in program.registers]
    changed = True
    while changed:
        changed = False
        for x in reversed(program.code):
            for register, mask in _demands(x, masks):
                if mask & ~masks[register.slot]:
                    masks[register.slot] |= mask
                    changed = True
    return masks


def _demands(x: Instruction, masks: list[int]) -> Iterator[tuple[Register, int]]:
    """Yield registers and masks of their bits that an instruction uses.

    masks: by register, the bits known to be used.
    """
    if x.parts[0] in ("add", "sub", "mul", "fma") and x.parts[-1] == "f32x2":
        wanted = _of(x.operands[0], masks)
        lanes = sum(lane for lane in (_ones(32), _ones(32) << 32) if wanted & lane)
        for operand in x.operands[1:]:
            for r in registers(operand):
                yield r, lanes
        return
    if not _moves_bits(x):
        for operand in x.operands:
            for r in registers(operand):
                yield r, _ones(r.bits)
        return
    to, given = x.operands[0], x.operands[1]
    *_, t = types_of(x.parts)  # of what is read
    if isinstance(to, Vector):
        wanted = sum(_of(item, masks) << n * t.bits // len(to.items) for n, item in enumerate(to.items))
    else:
        wanted = _of(to, masks)
    if x.parts[0] == "shr":
        wanted <<= x.operands[2].value  # type: ignore[union-attr]
    parts = given.items if isinstance(given, Vector) else (given,)
    width = t.bits // len(parts)
    for n, part in enumerate(parts):
        if isinstance(part, Register):
            yield part, wanted >> n * width & _ones(width)


def _moves_bits(x: Instruction) -> bool:
    """Whether each bit of the result is 0 or a bit of the source, whose place the text gives."""
    types = types_of(x.parts[1:])
    if len(types) != len(x.parts) - 1:  # other qualifiers
        return False
    if x.parts[0] == "cvt":
        return all(t.kind == "u" for t in types) and all(isinstance(y, Register) for y in x.operands)
    if x.parts[0] == "mov":
        return all(_fits(y, types[0]) for y in x.operands)
    if x.parts[0] == "shr":
        by = x.operands[2]
        fits = all(_fits(y, types[0]) for y in x.operands[:2])
        return types[0].kind in "bu" and fits and isinstance(by, Immediate) and by.value >= 0
    return False


def _fits(operand: Operand | None, t: Type) -> bool:
    """Whether the registers of an operand have together as many bits as a type."""
    if isinstance(operand, Vector):
        return all(
            y is None or (isinstance(y, Register) and y.bits * len(operand.items) == t.bits) for y in operand.items
        )
    return not isinstance(operand, Register) or operand.bits == t.bits


def _of(operand: Operand | None, masks: list[int]) -> int:
    return masks[operand.slot] if isinstance(operand, Register) else 0


def _ones(bits: int) -> int:
    return (1 << bits) - 1


def registers(operand: Operand | None) -> Iterator[Register]:
    """Yield the registers of an operand, those of its address included."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Address):
        yield from registers(operand.base)
    elif isinstance(operand, TensorAddress):
        yield operand.base
        for item in operand.coordinates:
            yield from registers(item)
