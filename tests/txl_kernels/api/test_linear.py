"""`linear`: products by oneDNN and by torch, and the choice between them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from internals import MAX_ONEDNN_SHAPES, ONEDNN, ONEDNN_SHAPES
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from txl_kernels import linear as module
from txl_kernels.linear import linear, project

onednn = pytest.mark.skipif(ONEDNN.value() is None, reason="torch was built without oneDNN")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes that oneDNN multiplied, which is chosen here."""
    found: list[torch.Size] = []
    product = ONEDNN.value()

    def counted(x: Tensor, *rest: Any) -> Tensor:
        found.append(x.shape)
        return product(x, *rest)

    ONEDNN.replace(monkeypatch, lambda: counted)
    monkeypatch.setattr(module, "onednn_is_faster", lambda: True)
    ONEDNN_SHAPES.replace(monkeypatch, set())
    return found


def inputs(*rows: int, d_in: int = 300, d_out: int = 500, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x, weight, bias = torch.randn(*rows, d_in), torch.randn(d_out, d_in), torch.randn(d_out)
    return [t.to(dtype) for t in (x, weight, bias)]


@onednn
@pytest.mark.parametrize("rows", [(40,), (1, 37), (2, 3, 11)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_products(rows: tuple[int, ...], with_bias: bool, products: list[torch.Size]) -> None:
    x, weight, bias = inputs(*rows)
    given = bias if with_bias else None
    exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
    with torch.no_grad():
        for strided in (x, x.transpose(0, 1).contiguous().transpose(0, 1), x.repeat_interleave(2, -1)[..., ::2]):
            torch.testing.assert_close(linear(strided, weight, given).double(), exact, rtol=0, atol=2e-4)
    assert products == [x.shape] * 3


@onednn
def test_product_of_a_layer(products: list[torch.Size]) -> None:
    layer, x = torch.nn.Linear(300, 500), torch.randn(64, 300)
    with torch.inference_mode():
        torch.testing.assert_close(project(layer, x), F.linear(x, layer.weight, layer.bias))
    assert len(products) == 1
    project(layer, x).sum().backward()
    assert layer.weight.grad is not None
    assert len(products) == 1


@onednn
def test_products_of_torch(products: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = inputs(64)
    linear(x, weight, bias)  # gradients may be needed
    with torch.no_grad():
        linear(x[:10], weight, bias)
        linear(x, weight.t().contiguous().t(), bias)
        linear(*inputs(64, dtype=torch.float64))
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x, weight, bias).dtype == torch.bfloat16
        with FlopCounterMode(display=False) as counter:
            linear(x, weight, bias)
        assert counter.get_total_flops() == 2 * 64 * 300 * 500
        torch.func.vmap(lambda row: linear(row, weight, bias))(x.expand(2, 64, 300))
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.mkldnn, "enabled", False)
            linear(x, weight, bias)
        torch.use_deterministic_algorithms(True)
        try:
            linear(x, weight, bias)
        finally:
            torch.use_deterministic_algorithms(False)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            linear(x[:, :-1], weight, bias)
    assert products == []


@onednn
def test_number_of_shapes_by_onednn_is_bounded(products: list[torch.Size]) -> None:
    """It keeps memory for each shape until the process ends. Known shapes may be repeated."""
    weight = torch.randn(500, 300)
    with torch.inference_mode():
        for rows in [*range(40, 240), 40]:
            torch.testing.assert_close(linear(torch.ones(rows, 300), weight), weight.sum(1).expand(rows, 500))
    assert products == [(rows, 300) for rows in [*range(40, 40 + MAX_ONEDNN_SHAPES.value), 40]]
