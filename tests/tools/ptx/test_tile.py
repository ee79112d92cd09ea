"""Counts of a tile against closed forms; the plain kernel that they are held against, against
torch."""

import pytest
import torch
from ptx_marks import RUNS_TRITONS_PTX

pytestmark = RUNS_TRITONS_PTX


def test_products_of_a_tile() -> None:
    """q k, q r and p v; then those of backward's kernels: docs/kernels-gpu.md lists them."""
    from ptx.tile import per_tile

    found = per_tile(90, 64)
    products = {name: cost["tensor macs"] / 64**3 for name, cost in found.items() if cost["tensor macs"]}
    assert products.pop("flash_kernel") == 2
    assert products == {
        "forward_kernel": 3, "backward_queries_kernel": 5, "backward_keys_kernel": 6, "backward_table_kernel": 6,
    }  # fmt: skip
    assert found["forward_kernel"]["wavefronts"] == found["forward_kernel"]["least wavefronts"]
    assert (
        found["forward_kernel"]["exponentials"] * 32 == 64 * 64 + 2 * 64 * 2
    )  # weights, and a factor a row and thread


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_plain_kernel_is_torchs(architecture: int) -> None:
    from ptx.triton_launch import executed
    from ptx.yardstick import flash_forward

    q, k, v = (torch.randn(1, 1, n, 64).bfloat16() for n in (64, 192, 192))
    with executed(architecture):
        out = flash_forward(q, k, v)
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())[0, 0]
    torch.testing.assert_close(out, want, rtol=2e-2, atol=5e-3)
