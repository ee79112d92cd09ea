"""cp.async: copies to shared memory, which complete when the threads that issued them wait for
them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx.decode import instruction
from ptx.faults import NotModelled
from ptx.operands import address_reader, constant, raw_reader, spread
from ptx.parse import Instruction


@dataclass
class _Copy:
    address: np.ndarray  # destination in shared memory
    data: np.ndarray  # [n, bytes]
    ids: np.ndarray  # threads that issued the copies
    group: np.ndarray  # group of each copy


class Copies:
    """Pending copies of a block, in groups numbered separately for each thread."""

    def __init__(self, threads: int) -> None:
        self.group = np.zeros(threads, np.int64)  # group of each thread's next copy
        self.list: list[_Copy] = []

    def wait(self, block: Any, lanes: Any, left: int) -> None:
        """Complete all but each thread's last `left` committed groups; uncommitted copies stay
        pending."""
        going = np.zeros(len(self.group), bool)
        going[lanes.at] = True
        rest = []
        for copy in self.list:
            lands = going[copy.ids] & (copy.group < self.group[copy.ids] - left)
            if lands.any():
                block.shared.land_copy(copy.address[lands], copy.data[lands], copy.ids[lands])
            if not lands.all():
                stays = ~lands
                rest.append(_Copy(copy.address[stays], copy.data[stays], copy.ids[stays], copy.group[stays]))
        self.list = rest

    def pending(self) -> bool:
        return bool(self.list)


def _copies(block: Any) -> Copies:
    if block.copies is None:
        block.copies = Copies(block.threads)
    return block.copies  # type: ignore[no-any-return]


@instruction("cp.async.commit_group")
def commit(x: Instruction) -> Any:
    def run(block: Any, lanes: Any) -> None:
        _copies(block).group[lanes.at] += 1

    return run


@instruction("cp.async.wait_group")
def wait(x: Instruction) -> Any:
    left = constant(x.operands[0])
    return lambda block, lanes: _copies(block).wait(block, lanes, left)


@instruction("cp.async.ca", "cp.async.cg")
def copy(x: Instruction) -> Any:
    if len(x.operands) not in (3, 4):
        raise NotModelled(x.op)
    to, source = address_reader(x.operands[0], 32), address_reader(x.operands[1], 64)
    size = constant(x.operands[2])
    given = raw_reader(x.operands[3], 32) if len(x.operands) == 4 else None

    def run(block: Any, lanes: Any) -> None:
        address, origin = to(block, lanes), source(block, lanes)
        data = np.zeros((lanes.n, size), np.uint8)  # bytes that are not read are zero
        bytes_read = spread(given(block, lanes), lanes) if given else np.full(lanes.n, size)
        if not np.isin(bytes_read, (0, size)).all():
            raise NotModelled("a copy of some of its bytes")
        reads = bytes_read == size
        if reads.any():
            threads = block.thread_number[lanes.at]
            data[reads] = block.memory.read(origin[reads], size, threads[reads])
            if block.counts is not None:
                block.counts.global_access(origin[reads], size, lanes.warp[reads])
        block.shared.begin_copy(address, size, lanes.ids)
        copies = _copies(block)
        copies.list.append(_Copy(address, data, lanes.ids, copies.group[lanes.at].copy()))

    return run
