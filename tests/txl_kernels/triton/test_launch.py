"""Launches of the Triton kernels, on a pretended GPU: what Triton is asked to run. Nothing is
compiled."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from ptx_marks import RUNS_TRITONS_PTX

from txl_kernels.backends import triton as backend
from txl_kernels.call import Call

pytestmark = RUNS_TRITONS_PTX[1:]  # all but slow
KERNELS = ["forward_kernel", "prepare_kernel", "backward_queries_kernel", "backward_keys_kernel", "finish_kernel"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The name and the arguments of each launch."""
    from pretended_gpu import pretended_gpu
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(JITFunction, "run", lambda function, *_, **named: found.append((function.__name__, named)))
    with torch.no_grad(), pretended_gpu(90, 132):
        yield found


def both_ways(length: int = 70, width: int = 64, memory_len: int = 40, bounds: bool = False) -> None:
    B, H = 8, 16
    q, k, v = (torch.zeros(B, length, H, width, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    memory = [torch.zeros(B, memory_len, H, width, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)]
    r, bias = (torch.zeros(H, *shape, width, dtype=torch.bfloat16) for shape in ((memory_len + length,), ()))
    start = torch.zeros(B, length, dtype=torch.int32) if bounds else None
    call = Call(q, k, v, r, bias, bias, *memory, *(None,) * 3, start, *(None,) * 3, 0, 0, 0.125, 0.0, 0.0, 0.125, False)
    out, lse = backend.forward(call)
    backend.backward(call, out, lse, torch.zeros_like(out), None)


@pytest.mark.parametrize("bounds", [False, True])
def test_kernels_of_a_call(bounds: bool, launched: list[Any]) -> None:
    """The visible intervals are computed once, by backward alone, where bounds are given."""
    for _ in range(2):
        both_ways(bounds=bounds)
    kernels = [*KERNELS[:1], *["reach_kernel"] * bounds, *KERNELS[1:]]
    assert [name for name, _ in launched] == 2 * kernels


def test_products_and_sums_are_fused(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Triton's default is, which is to change."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    both_ways()
    assert [named["enable_fp_fusion"] for _, named in launched] == [True] * len(KERNELS)


@pytest.mark.parametrize(("width", "kind"), [(64, "TensorDescriptor"), (41, "Tensor")])
def test_rows_of_16_bytes_come_by_descriptors(width: int, kind: str, launched: list[Any]) -> None:
    both_ways(width=width)
    forward = launched[0][1]
    assert {type(forward[name]).__name__ for name in ("K", "V", "K_MEM", "V_MEM", "R")} == {kind}


def test_threads_may_call_at_once(launched: list[Any]) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(both_ways, 70 + n % 2) for n in range(40)]:
            done.result()
    assert Counter(name for name, _ in launched) == dict.fromkeys(KERNELS, 40)


def test_a_workspace_that_is_not_aligned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator could give it; descriptors of what lies there would not work."""
    from txl_kernels.backends.triton.launch import Workspace

    workspace, real = Workspace(0), torch.empty
    workspace.add(torch.float32, 3)
    monkeypatch.setattr(torch, "empty", lambda size, **named: real(size + 8, **named)[8:])
    with pytest.raises(RuntimeError, match="does not start at a multiple of 16 bytes"):
        workspace.allocate(torch.device("cpu"))
