"""mbarriers; TMA loads of boxes of a tensor, whose completion an mbarrier counts; and TMA
reductions, which the thread that started them waits for."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx.decode import instruction
from ptx.faults import Fault, NotModelled
from ptx.lanes import WARP
from ptx.operands import PARAM_BASE, SIGNED, address_reader, constant, raw_reader, raw_writer, spread
from ptx.parse import Address, Instruction, TensorAddress
from ptx.shared_memory import swizzled

ALIGNED = 128  # alignment in bytes of a box in shared memory


@dataclass
class TensorMap:
    """A tensor map as TMA reads it; the outermost axis comes first.

    address: of the first element. item: bytes of an element. swizzle: 0 for none, 1 to 3 for rows
    of 32, 64 and 128 bytes.
    """

    address: int
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    box: tuple[int, ...]
    swizzle: int


def _where(x: Instruction) -> Any:
    """Return a function that gives each thread's mbarrier address."""
    (given,) = (y for y in x.operands if isinstance(y, Address))
    return address_reader(given, 32)


@instruction("mbarrier.init")
def make(x: Instruction) -> Any:
    address, count = _where(x), raw_reader(x.operands[1], 32)

    def run(block: Any, lanes: Any) -> None:
        for at, n, thread in zip(address(block, lanes), spread(count(block, lanes), lanes), lanes.ids, strict=True):
            block.mbarriers.make(int(at), int(n), int(thread))

    return run


@instruction("mbarrier.inval")
def give_up(x: Instruction) -> Any:
    address = _where(x)

    def run(block: Any, lanes: Any) -> None:
        for at, thread in zip(address(block, lanes), lanes.ids, strict=True):
            block.mbarriers.give_up(int(at), int(thread))

    return run


@instruction("mbarrier.arrive")
def arrive(x: Instruction) -> Any:
    if not set(x.parts[2:]) <= {"expect_tx", "shared", "shared_cta", "b64", "release", "cta"}:
        raise NotModelled(x.op)
    address, last = _where(x), x.operands[-1]
    extra = raw_reader(last, 32) if "expect_tx" in x.parts else None
    if extra is None and not isinstance(last, Address):
        raise NotModelled(x.text)

    def run(block: Any, lanes: Any) -> None:
        more = spread(extra(block, lanes), lanes) if extra else np.zeros(lanes.n, np.int64)
        for at, thread, size in zip(address(block, lanes), lanes.ids, more, strict=True):
            block.mbarriers.arrive(int(at), int(thread), int(size))

    return run


@instruction("mbarrier.try_wait", "mbarrier.test_wait", kind="wait")
def wait(x: Instruction) -> Any:
    """try_wait and test_wait: return the threads that continue.

    A test may fail at any time. Here a thread's first test always fails without stopping it; after
    a second failure it stops until the phase has ended, so that others run.
    """
    if "parity" not in x.parts:
        raise NotModelled(x.op)
    address, parity, put = _where(x), raw_reader(x.operands[2], 32), raw_writer(x.operands[0])

    def run(block: Any, lanes: Any) -> np.ndarray:
        wanted = spread(parity(block, lanes), lanes)
        failed_test = block.failed_test.setdefault(x.line, np.zeros(block.threads, bool))
        failed_before = failed_test[lanes.at].copy()
        done = np.array(
            [
                bool(no) and block.mbarriers.completed(int(at), int(p), int(thread))
                for no, at, p, thread in zip(failed_before, address(block, lanes), wanted, lanes.ids, strict=True)
            ]
        )
        failed_test[lanes.at] = ~done
        put(block, lanes, done)
        return done | ~failed_before

    return run


@instruction("cp.async.bulk.tensor")
def load(x: Instruction) -> Any:
    """cp.async.bulk.tensor.Nd.shared.global.mbarrier: load a box, with zeros outside the tensor."""
    m = re.match(r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(cta|cluster)\.global\.mbarrier::complete_tx::bytes$", x.op)
    if m is None or not isinstance(x.operands[1], TensorAddress):
        raise NotModelled(x.op)
    to, barrier = address_reader(x.operands[0], 32), address_reader(x.operands[2], 32)
    boxes = _boxes(x.operands[1])

    def run(block: Any, lanes: Any) -> None:
        given = zip(boxes(block, lanes), to(block, lanes), barrier(block, lanes), lanes.ids, strict=True)
        for (tensor_map, corner), at, bar, thread in given:
            _start(block, tensor_map, corner, int(at), int(bar), int(thread))

    return run


def _boxes(operand: TensorAddress) -> Any:
    """Return a function (block, lanes) that gives each thread's tensor map and the box's corner."""
    handle, coordinates = raw_reader(operand.base, 64), [raw_reader(c, 32) for c in operand.coordinates]

    def read(block: Any, lanes: Any) -> list[tuple[TensorMap, np.ndarray]]:
        corners = np.stack([spread(c(block, lanes), lanes).view(SIGNED[32]) for c in coordinates[::-1]], 1)
        maps = [block.launch.tensor_maps.get(int(x) - PARAM_BASE) for x in spread(handle(block, lanes), lanes)]
        if None in maps:
            raise Fault("a copy by a descriptor that was not given")
        return list(zip(maps, corners, strict=True))

    return read


def _box(given: TensorMap, corner: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a box's elements that lie inside of the tensor, their global addresses, and the places
    of all bytes of the box [elements, bytes] in shared memory, where it begins at `at`."""
    if at % ALIGNED:
        raise Fault(f"a box of shared memory that does not start at a multiple of {ALIGNED} bytes")
    item, row = given.item, given.box[-1] * given.item
    if len(corner) != len(given.box) or row > 128:
        raise NotModelled(f"a box of {given.box} at {corner}")
    if given.swizzle and row != 16 << given.swizzle:
        raise NotModelled(f"rows of {row} bytes with swizzle {given.swizzle}")
    grid = np.stack(np.meshgrid(*map(np.arange, given.box), indexing="ij"), -1).reshape(-1, len(given.box)) + corner
    inside = ((grid >= 0) & (grid < np.array(given.shape))).all(1)
    address = (grid[inside] * np.array(given.strides)).sum(1) * item + given.address
    places = swizzled(at + np.arange(len(grid)) * item, 16 << given.swizzle)
    return inside, address.astype(np.uint64), places[:, None] + np.arange(item)


def _start(block: Any, given: TensorMap, corner: np.ndarray, to: int, bar: int, thread: int) -> None:
    inside, address, places = _box(given, corner, to)
    data = np.zeros(places.shape, np.uint8)
    if inside.any():
        block.memory.check_waited(address, given.item, np.full(len(address), block.thread_number[thread]))
        data[inside] = block.memory.read(address, given.item, np.zeros(len(address), np.int64))
    if block.counts is not None:
        block.counts.unit_copy(data.size)
    places = places.ravel()
    cells = block.shared.begin_unit_copy(places, thread)
    barrier = block.mbarriers.get(bar, thread)
    barrier.copies.append(
        (len(places), lambda phase: block.shared.land_unit_copy(cells, places, data.ravel(), barrier.agent, phase))
    )


@dataclass
class _Reduction:
    thread: int
    places: np.ndarray  # bytes in shared memory [elements, 4] of those inside of the tensor
    address: np.ndarray  # their global addresses
    cells: np.ndarray  # cells of shared memory that it reads
    is_committed: bool = False


@instruction("cp.reduce.async.bulk.tensor")
def reduce(x: Instruction) -> Any:
    """cp.reduce.async.bulk.tensor: add a box of float32 to global memory; shared memory is read as
    late as possible, when the thread waits."""
    known = r"cp\.reduce\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta\.add\.tile\.bulk_group$"
    if not re.match(known, x.op) or not isinstance(x.operands[0], TensorAddress):
        raise NotModelled(x.op)
    source, boxes = address_reader(x.operands[1], 32), _boxes(x.operands[0])

    def run(block: Any, lanes: Any) -> None:
        for (given, corner), at, thread in zip(boxes(block, lanes), source(block, lanes), lanes.ids, strict=True):
            if given.item != 4:
                raise NotModelled(f"a reduction of elements of {given.item} bytes")
            if (corner < 0).any():
                raise Fault(f"a reduction at negative coordinates {corner}: an illegal instruction on devices")
            inside, address, places = _box(given, corner, int(at))
            if block.counts is not None:
                block.counts.unit_copy(places.size)
            cells = block.shared.lend(places.ravel(), np.array([thread]))
            block.reductions.append(_Reduction(int(thread), places[inside], address, cells))

    return run


@instruction("cp.async.bulk.commit_group")
def commit(x: Instruction) -> Any:
    def run(block: Any, lanes: Any) -> None:
        for reduction in block.reductions:
            reduction.is_committed |= reduction.thread in lanes.ids

    return run


@instruction("cp.async.bulk.wait_group")
def wait_for_reductions(x: Instruction) -> Any:
    if constant(x.operands[0]) != 0:
        raise NotModelled(x.text)

    def run(block: Any, lanes: Any) -> None:
        rest = []
        for reduction in block.reductions:
            if not reduction.is_committed or reduction.thread not in lanes.ids:
                rest.append(reduction)
                continue
            values = block.shared.bytes[reduction.places].view(np.float32)[:, 0]
            block.memory.add_float32(reduction.address, values)
            block.shared.take_back(reduction.cells, np.array([reduction.thread // WARP]))
        block.reductions = rest

    return run


@instruction("prefetch.tensormap")
def prefetch(x: Instruction) -> Any:
    """prefetch of a tensor map, which must be one of the launch's."""
    address = address_reader(x.operands[0], 64)

    def run(block: Any, lanes: Any) -> None:
        if any(int(at) - PARAM_BASE not in block.launch.tensor_maps for at in address(block, lanes)):
            raise Fault("a prefetch of a descriptor that was not given")

    return run
