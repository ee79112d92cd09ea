"""Counts of a tile against closed forms."""

import pytest
from ptx_marks import RUNS_TRITONS_PTX

pytestmark = RUNS_TRITONS_PTX


def test_products_of_a_tile() -> None:
    """q k, q r and p v; then those of backward's kernels: docs/kernels-gpu.md lists them."""
    from ptx.tile import per_tile, row

    found = per_tile(90, 64)
    assert {name: cost.counts["tensor macs"] / 64**3 for name, cost in found.items()} == {
        "forward_kernel": 3, "backward_queries_kernel": 6, "backward_keys_kernel": 6,
        "backward_queries_kernel, the same bits": 5, "backward_table_kernel": 6,
    }  # fmt: skip
    for name, cost in found.items():
        assert cost.counts["wavefronts"] == cost.counts["least wavefronts"], name
    # Weights, and a factor a row and thread.
    forward = found["forward_kernel"]
    assert forward.counts["exponentials"] * 32 == 64 * 64 + 2 * 64 * 2
    cells = [cell.strip() for cell in row("forward_kernel", 64, forward).split("|")]
    assert cells[1:3] == ["64: forward", "3"]


@pytest.mark.parametrize("outside", [False, True])
def test_products_of_a_tile_with_position_queries(outside: bool) -> None:
    """A quarter as wide as q: one product forward, two or three in backward; none outside."""
    from ptx.tile import Terms, per_tile

    positions = 0.0 if outside else 16 / 64
    found = per_tile(90, 64, Terms(16, outside))
    products = {name: cost.counts["tensor macs"] / 64**3 for name, cost in found.items()}
    assert products["forward_kernel"] == 2 + positions
    assert products["backward_queries_kernel"] == 3 + 3 * positions
    assert products["backward_queries_kernel, the same bits"] == 3 + 2 * positions
    assert products["backward_keys_kernel"] == 4 + 2 * positions
    assert outside or products["backward_table_kernel"] == 4 + 2 * positions


def test_programs_of_a_multiprocessor() -> None:
    """NVIDIA's occupancy rules for sm_90: 64 Ki registers given out by 8 a thread, 228 KiB of which
    1 KiB goes to each program, 2,048 threads."""
    from ptx.occupancy import programs_of

    assert programs_of(registers=255, shared=40_000, threads=128, capability=90) == 2
    assert programs_of(registers=32, shared=115_712, threads=128, capability=90) == 2
    assert programs_of(registers=32, shared=115_713, threads=128, capability=90) == 1
    assert programs_of(registers=16, shared=0, threads=512, capability=90) == 4
    assert programs_of(registers=168, shared=0, threads=128, capability=90) == 3
