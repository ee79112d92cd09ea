"""The model of whole launches against closed forms."""

import itertools

import pytest
import torch
from ptx_marks import RUNS_TRITONS_PTX

pytestmark = RUNS_TRITONS_PTX


def test_trips_to_global_memory_are_counted() -> None:
    """Loads that need each other's results wait one after the other, others together."""
    from ptx.counts import LOAD_LATENCY
    from ptx_programs import run

    a = torch.zeros(64, dtype=torch.int32)
    loads = "ld.global.u32 %r2, [%d3]; ld.global.u32 %r3, [%d3];"
    together = run(loads + "add.u32 %r4, %r2, %r3; st.global.u32 [%d3], %r4;", a)
    address = "mul.wide.u32 %d5, %r2, 4; add.s64 %d5, %d3, %d5;"
    chain = run(f"ld.global.u32 %r2, [%d3]; {address} ld.global.u32 %r3, [%d5]; st.global.u32 [%d3], %r3;", a)
    assert (together.trips, chain.trips) == (1, 2)
    assert LOAD_LATENCY - 2 <= together.exposed <= LOAD_LATENCY
    assert 2 * LOAD_LATENCY - 4 <= chain.exposed <= 2 * LOAD_LATENCY


@pytest.mark.parametrize("order", list(itertools.permutations(("text", "head", "block"))), ids=str)
def test_a_grids_order_is_found(order: tuple[str, ...]) -> None:
    from ptx.counts import Counts
    from ptx.whole import order_of

    sizes = {"text": 2, "head": 3, "block": 4}
    counts = Counts.__new__(Counts)
    counts.boxes = {}
    for n, place in enumerate(itertools.product(*(range(sizes[name]) for name in order))):
        at = dict(zip(order, place, strict=True))
        keys = {("k", at["text"], at["head"], key) for key in range(4)}
        counts.boxes[(n, 0, 0)] = keys | {("r", at["head"], at["block"] + d) for d in range(3)}
    assert order_of(counts, texts=2, heads=3) == order


def test_the_l2_keeps_what_was_used_last() -> None:
    from ptx.whole import L2_BYTES, read_through

    third = L2_BYTES / 3
    assert read_through([("a", third, False), ("b", third, True), ("a", third, False)]) == pytest.approx(3 * third)
    rounds = [(x, third, False) for x in "abcd" * 2]  # four thirds: each is gone before it comes again
    assert read_through(rounds) == pytest.approx(8 * third)


def test_a_launch_of_equal_blocks_takes_whole_rounds() -> None:
    """Keys without a mask: every block of the memory walks all queries."""
    from ptx.whole import HERTZ, MULTIPROCESSORS, B, H, Walk, run

    walk = Walk(64, ("text", "head", "block"), 1, 10_000.0, 5_000.0, 0.0, 3, True, False)
    blocks = B * H * 2  # one of the memory and one of the segment, which walks as many
    rounds = -(-blocks // MULTIPROCESSORS)
    assert run(walk, 64, 64).seconds == pytest.approx(rounds * (5_000 + 10_000) / HERTZ)
