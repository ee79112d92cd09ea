"""What fits a device, and what it takes to keep it busy."""

from dataclasses import replace

from txl.recipes.scaling.hardware import Hardware
from txl.recipes.scaling.memory import device_memory
from txl.recipes.scaling.setup import Setup
from txl.recipes.scaling.step_time import StepTime, step_time

FILLED = 0.9  # of memory; the rest of a device's is the CUDA context's, NCCL's and the allocator's
MOST_ROWS = 4096


def fits(setup: Setup, hardware: Hardware) -> bool:
    """Whether the device holds it."""
    return device_memory(setup).total <= FILLED * hardware.memory


def largest_world(batch: int, most: int) -> int:
    """The most processes, no more than `most`, that divide a batch."""
    return next(n for n in range(min(batch, most), 0, -1) if batch % n == 0)


def grown(setup: Setup, rows: int) -> Setup:
    """With so many rows a process."""
    return replace(setup, train=replace(setup.train, batch=rows * setup.processes, batch_chunk=1))


def best(setup: Setup, hardware: Hardware) -> tuple[Setup, StepTime]:
    """Replicated or sharded, whichever is sooner."""
    kinds = [replace(setup, shard=shard) for shard in (False, True)[: setup.processes]]
    return min(((kind, step_time(kind, hardware)) for kind in kinds), key=lambda found: found[1].total)


def rows_for(setup: Setup, hardware: Hardware, efficiency: float) -> int | None:
    """Fewest rows a process, a power of two, that keep it so busy, computed in as few chunks as
    fit; None where `MOST_ROWS` are too few."""
    rows = 1
    while rows <= MOST_ROWS:
        if best(chunked(grown(setup, rows), hardware), hardware)[1].efficiency >= efficiency:
            return rows
        rows *= 2
    return None


def chunked(setup: Setup, hardware: Hardware) -> Setup:
    """In the fewest chunks of a batch, of one size, that fit."""
    counts = (count for count in range(1, setup.rows + 1) if setup.rows % count == 0)
    tried = [replace(setup, train=replace(setup.train, batch_chunk=count)) for count in counts]
    return next((each for each in tried if fits(each, hardware)), tried[-1])


def longest_memory(setup: Setup, hardware: Hardware) -> int:
    """Most hidden states a layer can remember; a multiple of 1,024."""
    low, high = 0, 2**21
    while high - low > 1:
        middle = (low + high) // 2
        tried = replace(setup, model=replace(setup.model, mem_len=1024 * middle, window=None))
        low, high = (middle, high) if fits(tried, hardware) else (low, middle)
    return 1024 * low
