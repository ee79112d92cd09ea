"""Transforms of torch: forward-mode AD is refused; vmap gives the results of a loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from cases import TENSORS, Case, as_call, as_fields, detached, make_inputs
from torch import Tensor

from txl_kernels import RelAttention, rel_attention

REFUSED = r"no forward-mode AD; call rel_attention\(\.\.\., backend='reference'\)"
Function = Callable[[Tensor], Tensor]


SMALL = {"D": 4, "L": 3, "M": 2, "H": 1, "B": 1}


def plain(**sizes: int) -> dict[str, Any]:
    return detached(make_inputs(Case(**sizes), torch.float32))


def dual(f: Function, x: Tensor, gradients: bool = True) -> Any:
    with torch.set_grad_enabled(gradients), forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def compiled(f: Function, x: Tensor) -> Tensor:
    torch.compiler.reset()
    tangent = torch.ones_like(x)
    return torch.compile(lambda x: torch.func.jvp(f, (x,), (tangent,))[1], backend="aot_eager")(x)


FORWARD_MODES: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
    "dual": dual,
    "dual, no_grad": lambda f, x: dual(f, x, gradients=False),
    "compiled": compiled,
}


@pytest.mark.parametrize(("mode", "direct"), [*((mode, False) for mode in FORWARD_MODES), ("dual", True)])
def test_forward_mode_is_refused(mode: str, direct: bool) -> None:
    inputs = plain(**SMALL)
    fields = as_fields(inputs)

    def f(q: Tensor) -> Tensor:
        if direct:
            return torch.ops.txl_kernels.rel_attention(*fields._replace(q=q), "native")[0]
        return rel_attention(**as_call(inputs) | {"q": q})

    with pytest.raises((NotImplementedError, RuntimeError), match=REFUSED):
        FORWARD_MODES[mode](f, inputs["q"])


@pytest.mark.parametrize("name", TENSORS)
def test_forward_mode_is_refused_for_every_input(name: str) -> None:
    inputs = plain()
    with pytest.raises((NotImplementedError, RuntimeError), match=REFUSED):
        dual(lambda x: rel_attention(**as_call(inputs | {name: x})), inputs[name], gradients=False)


def test_tangent_of_the_cotangent_is_refused() -> None:
    inputs = make_inputs(Case(), torch.float32)
    out = rel_attention(**as_call(inputs))
    with pytest.raises(NotImplementedError, match=REFUSED):
        dual(lambda dout: torch.autograd.grad(out, inputs["q"], dout)[0], torch.ones_like(out))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by linearize, of its own graph
def test_forward_mode_of_the_reference() -> None:
    inputs = plain(**SMALL)

    def f(q: Tensor) -> Tensor:
        return rel_attention(**as_call(inputs) | {"q": q}, backend="reference")

    want = torch.autograd.functional.jacobian(f, inputs["q"]).flatten(4).sum(-1)
    for mode in FORWARD_MODES.values():
        torch.testing.assert_close(mode(f, inputs["q"]), want)


@pytest.mark.parametrize("names", [("q",), ("r",), ("k_mem", "v_mem"), TENSORS], ids=str)
@pytest.mark.filterwarnings("error")  # torch warns of an operator without a rule
def test_vmap_equals_a_loop(names: tuple[str, ...]) -> None:
    inputs = plain()
    stacks = [torch.randn(3, *inputs[name].shape) for name in names]

    def f(*given: Tensor) -> Tensor:
        return rel_attention(**as_call(inputs | dict(zip(names, given, strict=True))))

    def gradient(*given: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *x: f(*x).square().sum(), argnums=tuple(range(len(names))))(*given)

    loop = list(zip(*stacks, strict=True))
    torch.testing.assert_close(torch.func.vmap(f)(*stacks), torch.stack([f(*x) for x in loop]))
    want = tuple(torch.stack(x) for x in zip(*(gradient(*x) for x in loop), strict=True))
    torch.testing.assert_close(torch.func.vmap(gradient)(*stacks), want)


def test_vmap_of_bounds_dropout_and_layers() -> None:
    inputs = plain()
    start = torch.tensor([[[0]], [[2]], [[3]]], dtype=torch.int32)

    def f(start: Tensor) -> Tensor:
        return rel_attention(**as_call(inputs) | {"start": start})

    torch.testing.assert_close(torch.func.vmap(f)(start), torch.stack([f(x) for x in start]))

    layer, x = RelAttention(8, 2, attn_dropout=0.5), torch.randn(1, 4, 8).expand(2, -1, -1, -1)
    torch.compiler.reset()
    for randomness, compile in (("same", False), ("different", False), ("different", True)):

        def g(x: Tensor, randomness: str = randomness) -> Tensor:
            return torch.func.vmap(lambda row: layer(row), randomness=randomness)(x)

        first, second = (torch.compile(g, backend="aot_eager", fullgraph=True) if compile else g)(x)
        assert torch.equal(first, second) == (randomness == "same")


def test_jacobians_by_vmap() -> None:
    inputs = plain(**SMALL)

    def f(q: Tensor, backend: str | None = None) -> Tensor:
        return rel_attention(**as_call(inputs) | {"q": q}, backend=backend)

    want = torch.func.jacrev(lambda q: f(q, "reference"))(inputs["q"])
    torch.testing.assert_close(torch.func.jacrev(f)(inputs["q"]), want)
    with pytest.raises(ValueError, match=r"vmap of txl_kernels\.rel_attention\.default must be over at least one call"):
        torch.func.vmap(f)(torch.zeros(0, *inputs["q"].shape))
