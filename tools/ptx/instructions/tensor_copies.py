"""mbarriers, and the copy engine's loads of boxes of a tensor, which complete on one."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ptx.decode import instruction
from ptx.faults import Fault, NotModelled
from ptx.operands import PARAM_BASE, SIGNED, address_reader, raw_reader, raw_writer, spread
from ptx.parse import Address, Instruction, TensorAddress

ALIGNED = 128  # bytes that a box in shared memory starts at a multiple of
_SWIZZLE = {0: 0, 1: 1, 2: 3, 3: 7}  # none, 32, 64, 128 bytes: bits of the row that the address takes


@dataclass
class TensorMap:
    """What the copy engine is told of a tensor: outermost axis first.

    swizzle: 0 none, 1 to 3: rows of 32, 64, 128 bytes.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    box: tuple[int, ...]
    swizzle: int


@instruction("mbarrier")
def mbarrier(x: Instruction) -> Any:
    kind = x.parts[1]
    (where,) = (y for y in x.operands if isinstance(y, Address))
    address = address_reader(where, 32)
    last = x.operands[-1]
    if kind in ("init", "inval"):
        count = raw_reader(last, 32) if kind == "init" else None

        def make(block: Any, lanes: Any) -> None:
            for n, (at, thread) in enumerate(zip(address(block, lanes), lanes.ids, strict=True)):
                if count is None:
                    block.mbarriers.give_up(int(at), int(thread))
                else:
                    block.mbarriers.make(int(at), int(spread(count(block, lanes), lanes)[n]), int(thread))

        return make
    if kind == "arrive":
        if not set(x.parts[2:]) <= {"expect_tx", "shared", "shared_cta", "b64", "release", "cta"}:
            raise NotModelled(x.op)
        extra = raw_reader(last, 32) if "expect_tx" in x.parts else None
        if extra is None and not isinstance(last, Address):
            raise NotModelled(x.text)

        def arrive(block: Any, lanes: Any) -> None:
            more = spread(extra(block, lanes), lanes) if extra else np.zeros(lanes.n, np.int64)
            for at, thread, size in zip(address(block, lanes), lanes.ids, more, strict=True):
                block.mbarriers.arrive(int(at), int(thread), int(size))

        return arrive
    if kind in ("try_wait", "test_wait"):
        if "parity" not in x.parts:
            raise NotModelled(x.op)
        parity, put = raw_reader(x.operands[2], 32), raw_writer(x.operands[0])

        def wait(block: Any, lanes: Any) -> np.ndarray:
            """Which threads go on.

            It may say no at any time: it does so once, and then until the phase has ended, which
            lets others run.
            """
            wanted = spread(parity(block, lanes), lanes)
            refused = block.refused.setdefault(x.line, np.zeros(block.threads, bool))
            said_no = refused[lanes.at].copy()
            done = np.array(
                [
                    bool(no) and block.mbarriers.completed(int(at), int(p), int(thread))
                    for no, at, p, thread in zip(said_no, address(block, lanes), wanted, lanes.ids, strict=True)
                ]
            )
            refused[lanes.at] = ~done
            put(block, lanes, done)
            return done | ~said_no

        return wait
    raise NotModelled(x.op)


def load(x: Instruction) -> Any:
    """cp.async.bulk.tensor.Nd.shared.global.mbarrier: a box, zeros where it lies outside."""
    m = re.match(r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(cta|cluster)\.global\.mbarrier::complete_tx::bytes$", x.op)
    if m is None or not isinstance(x.operands[1], TensorAddress):
        raise NotModelled(x.op)
    to, barrier = address_reader(x.operands[0], 32), address_reader(x.operands[2], 32)
    handle = raw_reader(x.operands[1].base, 64)
    coordinates = [raw_reader(c, 32) for c in x.operands[1].coordinates]

    def run(block: Any, lanes: Any) -> None:
        at, bars, maps = to(block, lanes), barrier(block, lanes), spread(handle(block, lanes), lanes)
        corners = np.stack([spread(c(block, lanes), lanes).view(SIGNED[32]) for c in coordinates[::-1]], 1)
        for n, thread in enumerate(lanes.ids):
            tensor_map = block.launch.tensor_maps.get(int(maps[n]) - PARAM_BASE)
            if tensor_map is None:
                raise Fault("a copy by a descriptor that was not given")
            _start(block, tensor_map, corners[n], int(at[n]), int(bars[n]), int(thread))

    return run


def _start(block: Any, given: TensorMap, corner: np.ndarray, to: int, bar: int, thread: int) -> None:
    if to % ALIGNED:
        raise Fault(f"a box of shared memory that does not start at a multiple of {ALIGNED} bytes")
    item, row = given.tensor.element_size(), given.box[-1] * given.tensor.element_size()
    if len(corner) != len(given.box) or row > 128:
        raise NotModelled(f"a box of {given.box} at {corner}")
    if given.swizzle and row != 16 << given.swizzle:
        raise NotModelled(f"rows of {row} bytes with swizzle {given.swizzle}")
    grid = np.stack(np.meshgrid(*map(np.arange, given.box), indexing="ij"), -1).reshape(-1, len(given.box)) + corner
    inside = ((grid >= 0) & (grid < np.array(given.shape))).all(1)
    data = np.zeros((len(grid), item), np.uint8)
    if inside.any():
        offset = (grid[inside] * np.array(given.strides)).sum(1) * item + given.tensor.data_ptr()
        data[inside] = block.memory.read(offset.astype(np.uint64), item, np.zeros(len(offset), np.int64))
    if block.counts is not None:
        block.counts.unit_copy(len(grid) * item)
    line = to + np.arange(len(grid)) * item
    places = line ^ ((line >> 7 & _SWIZZLE[given.swizzle]) << 4)
    places = (places[:, None] + np.arange(item)).ravel()
    cells = block.shared.begin_unit_copy(places, thread)
    barrier = block.mbarriers.get(bar, thread)
    barrier.copies.append(
        (len(places), lambda phase: block.shared.land_unit_copy(cells, places, data.ravel(), barrier.agent, phase))
    )
