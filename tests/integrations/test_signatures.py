"""Originals whose method has other parameters than the adapter's, as in other releases."""

from typing import Any

import pytest
import torch
from layer_helpers import case_of, check
from torch import Tensor, nn

from implementations import bare_peers
from txl_kernels.integrations import Accelerated, Peer, accelerate, register, register_copy
from txl_kernels.integrations.adapters import KNOWN


class Original(nn.Module):
    def forward(
        self, x: Tensor, head_mask: Tensor | None = None, scale: float = 1.0, flag: bool = False, shift: Any = None
    ) -> Tensor:
        found = x * scale + (1.0 if flag else 0.0) + (0.0 if shift is None else shift)
        return found if head_mask is None else found * head_mask


class Adapter(Accelerated):
    """Reads `shift` of its **kwargs, and does not know `head_mask`."""

    reads = ("shift",)

    def forward(self: Any, x: Tensor, flag: bool = False, scale: float = 1.0, **kwargs: Any) -> Tensor | str:
        self.__dict__["answered"] = self.__dict__.get("answered", 0) + 1
        shift = kwargs.get("shift")
        return x * scale + (1.0 if flag else 0.0) + (0.0 if shift is None else shift)


X = torch.randn(2, 3)
HALF = torch.full((3,), 0.5)
KNOWN_CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X,), {}),
    ((X, None, 3.0, True), {}),
    ((X, None, 3.0), {"flag": True, "shift": 2.0}),
    ((), {"x": X, "head_mask": None, "flag": True}),
]
OTHER_CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((X, HALF), {}), ((X,), {"flag": True, "head_mask": HALF})]


@pytest.fixture
def module(registered: None) -> Any:
    register(Peer("Signatures", f"{__name__}.Original", Adapter, "none"))
    made = Original()
    accelerate(made, strict=True)
    return made


@pytest.mark.parametrize(("args", "kwargs"), KNOWN_CALLS)
def test_arguments_in_another_order_and_defaults(module: Any, args: Any, kwargs: Any) -> None:
    assert torch.equal(module(*args, **kwargs), Original()(*args, **kwargs))
    assert module.answered == 1
    assert not module.fallbacks


@pytest.mark.parametrize(("args", "kwargs"), OTHER_CALLS)
def test_unknown_arguments_fall_back(module: Any, args: Any, kwargs: Any) -> None:
    assert torch.equal(module(*args, **kwargs), Original()(*args, **kwargs))
    assert module.fallbacks == {"head_mask given, which its adapter does not know": 1}


@pytest.mark.parametrize(("args", "kwargs"), [((X,), {"x": X}), ((X, None, 1.0, False, None, 1), {}), ((X,), {"y": 1})])
def test_arguments_that_the_original_refuses(module: Any, args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError):
        module(*args, **kwargs)


def with_gain() -> type[nn.Module]:
    class WithGain(bare_peers.espnet().RelPositionMultiHeadedAttention):  # type: ignore[misc]
        def forward(
            self, query: Any, key: Any, value: Any, gain: Any = None, pos_emb: Any = None, mask: Any = None
        ) -> Any:
            out = super().forward(query, key, value, pos_emb, mask)
            return out if gain is None else out * gain

    return WithGain


def test_a_layer_with_one_more_argument(registered: None) -> None:
    """A layer of an older release, which takes a mask of heads, is such a case."""
    module, x, encodings = case_of("espnet").module, torch.randn(3, 45, 64), torch.randn(1, 89, 64)
    module.__class__ = with_gain()
    register_copy(type(module), of="ESPnetRelPosition")

    @torch.no_grad()
    def outputs() -> list[Tensor]:
        return [module(x, x, x, gain, encodings, None) for gain in (None, 2.0)]

    report = check(module, outputs, {"gain given, which its adapter does not know": 1})
    assert len(report.accelerated) == 1


def test_hashes_are_known_once() -> None:
    """A hash of two releases stands at the first; copies of one source have one adapter."""
    for peer in KNOWN:
        hashes = list(peer.hashes.values())
        assert len(hashes) == len(set(hashes)), peer.name
        assert all(len(x) == 16 and int(x, 16) >= 0 for x in hashes), peer.name
    adapters: dict[str, type] = {}
    for peer in KNOWN:
        for code in peer.hashes.values():
            assert adapters.setdefault(code, peer.adapter) is peer.adapter, peer.name
