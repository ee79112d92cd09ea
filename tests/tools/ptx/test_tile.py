"""Counts of a tile against closed forms; the plain kernels that they are held against, against
torch."""

import pytest
import torch
from ptx_marks import RUNS_TRITONS_PTX

pytestmark = RUNS_TRITONS_PTX
# Weights, and in forward a factor a row and thread.
EXPONENTIALS = {"forward_kernel": 64 * 64 + 2 * 64 * 2, "flash_queries_kernel": 64 * 64}


def test_products_of_a_tile() -> None:
    """q k, q r and p v; then those of backward's kernels: docs/kernels-gpu.md lists them."""
    from ptx.tile import per_tile, units

    found = per_tile(90, 64)
    assert {name: cost.counts["tensor macs"] / 64**3 for name, cost in found.items()} == {
        "forward_kernel": 3, "backward_queries_kernel": 6, "backward_keys_kernel": 6,
        "backward_queries_kernel, the same bits": 5, "backward_table_kernel": 6,
        "flash_kernel": 2, "flash_queries_kernel": 3, "flash_keys_kernel": 4,
    }  # fmt: skip
    for name, cost in found.items():
        assert cost.counts["wavefronts"] == cost.counts["least wavefronts"], name
    for name, wanted in EXPONENTIALS.items():
        assert found[name].counts["exponentials"] * 32 == wanted
    assert units(found["forward_kernel"].counts, 90)["tensor"] == 3 * 128


def test_programs_of_a_multiprocessor() -> None:
    """NVIDIA's occupancy rules for sm_90: 64 Ki registers given out by 8 a thread, 228 KiB of which
    1 KiB goes to each program, 2,048 threads."""
    from ptx.occupancy import programs_of

    assert programs_of(registers=255, shared=40_000, threads=128, capability=90) == 2
    assert programs_of(registers=32, shared=115_712, threads=128, capability=90) == 2
    assert programs_of(registers=32, shared=115_713, threads=128, capability=90) == 1
    assert programs_of(registers=16, shared=0, threads=512, capability=90) == 4
    assert programs_of(registers=168, shared=0, threads=128, capability=90) == 3


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_plain_kernels_are_torchs(architecture: int) -> None:
    from ptx.triton_launch import executed
    from ptx.yardstick import flash_backward, flash_forward

    q, k, v = (torch.randn(1, 1, n, 64).bfloat16() for n in (64, 192, 192))
    dout = torch.randn(64, 64).bfloat16()
    with executed(architecture):
        out, lse2 = flash_forward(q, k, v)
        dq, dk, dv = flash_backward(q, k, v, out, lse2, dout.float())
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*exact)[0, 0]
    want.backward(dout.float())
    torch.testing.assert_close(out, want.detach(), rtol=2e-2, atol=5e-3)
    for got, x in zip((dq * 64**-0.5, dk * 64**-0.5, dv), exact, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(got, x.grad[0, 0], rtol=3e-2, atol=2e-2)
