"""mma.sync, and loads and stores that distribute 8 x 8 matrices over a warp."""

from typing import Any

import numpy as np

from ptx.decode import instruction
from ptx.faults import NotModelled
from ptx.instructions.warps import need_whole
from ptx.lanes import WARP
from ptx.operands import Type, address_reader, items, raw_reader, raw_writer, reader, spread, writer
from ptx.parse import Instruction, Operand

ROW, COLUMN = np.arange(WARP) // 4, np.arange(WARP) % 4  # of each thread in the fragments
_FLOAT32 = Type("f", 32)


def fragment(operands: tuple[Operand | None, ...], kind: str) -> Any:
    """Return a function that reads a fragment as float32 [warps, 32, values per thread]; lower
    halves come first."""
    readers = [raw_reader(operand, 32) for operand in operands]

    def read(block: Any, lanes: Any) -> np.ndarray:
        words = np.stack([spread(f(block, lanes), lanes) for f in readers], 1)
        raw = words if kind == "tf32" else words.view(np.uint16)
        return numbers(raw, kind).reshape(len(lanes.warps), WARP, -1)

    return read


def in_a_register(kind: str) -> int:
    """Return the number of values of a factor in one register."""
    return 1 if kind == "tf32" else 2


def left_factor(a: np.ndarray, kind: str, depth: int) -> np.ndarray:
    """Assemble the left factor [warps, 16, depth] from its fragments [warps, 32, ...]."""
    each = in_a_register(kind)
    A = np.zeros((len(a), 16, depth), np.float32)
    for n in range(a.shape[2]):
        register, e = divmod(n, each)
        A[:, ROW + 8 * (register % 2), each * COLUMN + e + 4 * each * (register // 2)] = a[:, :, n]
    return A


def numbers(raw: np.ndarray, kind: str) -> np.ndarray:
    """Convert uint16 as bf16 or f16, or uint32 as tf32 (whose low 13 bits are ignored), to
    float32."""
    if kind == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw & np.uint32(0xFFFFE000)).view(np.float32)


@instruction("mma")
def multiply(x: Instruction) -> Any:
    """mma.sync.aligned.m16n8k{16,8}.row.col.f32.T.T.f32."""
    shape, kind = x.parts[3], x.parts[7]
    if (
        x.parts[:3] != ("mma", "sync", "aligned")
        or x.parts[4:7] != ("row", "col", "f32")
        or x.parts[8:] != (kind, "f32")
    ):
        raise NotModelled(x.op)
    depth = {("m16n8k16", "bf16"): 16, ("m16n8k16", "f16"): 16, ("m16n8k8", "tf32"): 8, ("m16n8k8", "bf16"): 8,
             ("m16n8k8", "f16"): 8}.get((shape, kind))  # fmt: skip
    if depth is None:
        raise NotModelled(x.op)
    left, right = fragment(items(x.operands[1]), kind), fragment(items(x.operands[2]), kind)
    each = in_a_register(kind)
    added = [reader(operand, _FLOAT32) for operand in items(x.operands[3])]
    puts = [writer(operand, _FLOAT32) for operand in items(x.operands[0])]

    def run(block: Any, lanes: Any) -> None:
        warps = need_whole(lanes)
        b, B = right(block, lanes), np.zeros((warps, depth, 8), np.float32)
        for n in range(b.shape[2]):
            register, e = divmod(n, each)
            B[:, each * COLUMN + e + 4 * each * register, ROW] = b[:, :, n]
        C = left_factor(left(block, lanes), kind, depth) @ B
        if block.counts is not None:
            block.counts.product(warps * 16 * 8 * depth)
        for n, (put, add) in enumerate(zip(puts, added, strict=True)):
            product = C[:, ROW + 8 * (n // 2), 2 * COLUMN + n % 2].ravel()
            put(block, lanes, product + add(block, lanes))

    return run


def _matrices(x: Instruction) -> int:
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "b16"}
    if not set(x.parts[1:]) <= known:
        raise NotModelled(x.op)
    return next(int(p[1]) for p in x.parts if p in ("x1", "x2", "x4"))


def _rows(address: np.ndarray, lanes: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the addresses of the rows, and the threads that give them: thread n has row n % 8 of
    matrix n // 8."""
    chosen = lanes.ids % WARP < 8 * count
    return address[chosen], lanes.ids[chosen]


@instruction("ldmatrix")
def load(x: Instruction) -> Any:
    count, transposed = _matrices(x), "trans" in x.parts
    puts = [raw_writer(operand) for operand in items(x.operands[0])]
    address = address_reader(x.operands[1], 32)

    def run(block: Any, lanes: Any) -> None:
        warps = need_whole(lanes)
        at, ids = _rows(address(block, lanes), lanes, count)
        rows = block.shared.read(at, 16, ids, collective=True)
        matrices = rows.view(np.uint16).reshape(warps, count, 8, 8)
        for n, put in enumerate(puts):
            m = matrices[:, n].swapaxes(1, 2) if transposed else matrices[:, n]
            low, high = m[:, ROW, 2 * COLUMN].astype(np.uint32), m[:, ROW, 2 * COLUMN + 1].astype(np.uint32)
            put(block, lanes, (low | high << np.uint32(16)).ravel())

    return run


@instruction("stmatrix")
def store(x: Instruction) -> Any:
    count, transposed = _matrices(x), "trans" in x.parts
    values = [raw_reader(operand, 32) for operand in items(x.operands[1])]
    address = address_reader(x.operands[0], 32)

    def run(block: Any, lanes: Any) -> None:
        warps = need_whole(lanes)
        at, ids = _rows(address(block, lanes), lanes, count)
        matrices = np.zeros((warps, count, 8, 8), np.uint16)
        for n, value in enumerate(values):
            words = spread(value(block, lanes), lanes).reshape(warps, WARP)
            for e in range(2):
                half = (words >> np.uint32(16 * e)).astype(np.uint16)
                where = (2 * COLUMN + e, ROW) if transposed else (ROW, 2 * COLUMN + e)
                matrices[:, n, where[0], where[1]] = half
        block.shared.write(at, matrices.view(np.uint8).reshape(-1, 16), ids, collective=True)

    return run
