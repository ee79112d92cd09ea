"""Launches of the Triton kernels on a pretended GPU. Nothing is compiled."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import Case, as_fields, make_inputs
from ptx_marks import RUNS_TRITONS_PTX

from txl_kernels.backends import triton as backend

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


def forward_and_backward(length: int = 70, width: int = 64, bounds: bool = False) -> None:
    case = Case(B=8, H=16, L=length, M=40, D=width, layout="lbhd", intervals="start" if bounds else "")
    call = as_fields(make_inputs(case, torch.bfloat16))
    out, lse = backend.forward(call)
    backend.backward(call, out, lse, torch.zeros_like(out), None)


@pytest.mark.parametrize("bounds", [False, True])
def test_kernels_of_a_call(bounds: bool, launched: list[Any]) -> None:
    """The visible intervals are computed once, by backward alone, where bounds are given."""
    for _ in range(2):
        forward_and_backward(bounds=bounds)
    kernels = [*KERNELS[:1], *["reach_kernel"] * bounds, *KERNELS[1:]]
    assert [name for name, _ in launched] == 2 * kernels


def test_products_and_sums_are_fused(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With any default of Triton, which is to change."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    forward_and_backward()
    assert [named["enable_fp_fusion"] for _, named in launched] == [True] * len(KERNELS)


@pytest.mark.parametrize(("width", "kind"), [(64, "TensorDescriptor"), (41, "Tensor")])
def test_rows_of_16_bytes_come_by_descriptors(width: int, kind: str, launched: list[Any]) -> None:
    forward_and_backward(width=width)
    forward = launched[0][1]
    assert {type(forward[name]).__name__ for name in ("K", "V", "K_MEM", "V_MEM", "R")} == {kind}


def test_full_precision_is_logged_once(launched: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    from txl_kernels.backends.triton import config

    def lines(dtype: torch.dtype, length: int) -> int:
        caplog.clear()
        backend.forward(as_fields(make_inputs(Case(L=length), dtype)))
        return sum("float32 attention on the GPU runs at full precision" in x.getMessage() for x in caplog.records)

    config.log_full_precision.cache_clear()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert [lines(torch.float32, 5), lines(torch.bfloat16, 5)] == [0, 0]
        torch.set_float32_matmul_precision("highest")
        assert [lines(torch.float32, 5), lines(torch.float32, 7)] == [1, 0]
    finally:
        torch.set_float32_matmul_precision(before)


def test_concurrent_calls(launched: list[Any]) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(forward_and_backward, 70 + n % 2) for n in range(40)]:
            done.result()
    assert Counter(name for name, _ in launched) == dict.fromkeys(KERNELS, 40)


def test_unaligned_workspace_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors need aligned memory."""
    from txl_kernels.backends.triton.launch import Workspace

    workspace, real = Workspace(0), torch.empty
    workspace.add(torch.float32, 3)
    monkeypatch.setattr(torch, "empty", lambda size, **named: real(size + 8, **named)[8:])
    with pytest.raises(RuntimeError, match="does not start at a multiple of 16 bytes"):
        workspace.allocate(torch.device("cpu"))
