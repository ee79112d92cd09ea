"""The CUDA kernels on a GPU: real sizes, 64-bit offsets, no synchronization, graphs, streams,
determinism."""

from typing import Any

import pytest
import torch
from cases import Case, as_call, in_float64, make_inputs
from cuda_cases import inkling
from gpu_helpers import memory_beyond_31_bits

from txl_kernels import rel_attention

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def run(inputs: dict[str, Any], backend: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return rel_attention(**as_call(inputs), return_lse=True, backend=backend)


def assert_equals_reference(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    for got, want in zip(run(inputs), run(in_float64(inputs), "reference"), strict=True):
        seen = want.isfinite()
        assert torch.equal(got.isfinite(), seen)
        error = (got.double() - want)[seen].norm()
        assert error <= 10 * TOLERANCE[dtype] * want[seen].norm() + TOLERANCE[dtype], f"error {error:.3e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [8, 24, 64, 80, 128, 136, 256])
@pytest.mark.parametrize("length", [1, 3, 16])
def test_head_widths(length: int, width: int, dtype: torch.dtype) -> None:
    assert_equals_reference(Case(B=2, H=3, L=length, M=1500, D=width), dtype)
    assert_equals_reference(Case(B=150, H=4, L=length, M=150, D=width), dtype)  # keys in one part


@pytest.mark.parametrize("options", [
    {"causal": False}, {"window": 100}, {"intervals": "episodes"}, {"intervals": "random"}, {"intervals": "filled"},
    {"dropout_p": 0.2}, {"layout": "lbhd"}, {"layout": "fused"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("sizes", [(1, 800), (1, 3800), (16, 3800), (1, 32768)], ids=str)
def test_options_at_real_sizes(sizes: tuple[int, int], options: dict[str, Any]) -> None:
    length, memory = sizes
    assert_equals_reference(Case(B=8, H=4, L=length, M=memory, D=64, **options), torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_inklings_terms(group: int, length: int, dtype: torch.dtype) -> None:
    for memory, extent, window in ((3800, 1024, None), (3800, 512, 512), (150, 1024, None)):
        assert_equals_reference(inkling("", group, length, extent, M=memory, D=128, window=window), dtype)


@pytest.mark.parametrize("options", [
    {"intervals": "filled"}, {"intervals": "random"}, {"dropout_p": 0.2}, {"layout": "fused"}, {"D": 256},
    {"r": "H T Dp", "position_bias": "H Dp"}, {"Dp": 128}, {"B": 64, "M": 800},
], ids=str)  # fmt: skip
def test_options_of_inklings_terms(options: dict[str, Any]) -> None:
    for length in (1, 3):
        case = inkling("", 3, length, 700, **{"M": 3800, "D": 128, "sink": "B H L"} | options)
        assert_equals_reference(case, torch.bfloat16)


def test_more_than_2_to_the_31_elements() -> None:
    """A window sees only the end of the memory, which a slice holds, too."""
    (q, k, v, r, bias), *memories = memory_beyond_31_bits(4, window=300)
    far, near = (rel_attention(q, k, v, r, bias, bias, memory, window=300, backend="cuda") for memory in memories)
    torch.testing.assert_close(far, near, rtol=1e-2, atol=1e-2)


def test_results_are_deterministic() -> None:
    inputs = make_inputs(Case(B=2, H=4, L=3, M=3800, D=64), torch.bfloat16)
    first = run(inputs)
    for _ in range(19):
        torch.testing.assert_close(run(inputs), first, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_device_synchronization() -> None:
    inputs = make_inputs(Case(B=2, H=2, L=4, M=600, D=64, intervals="filled"), torch.bfloat16)
    try:
        torch.cuda.set_sync_debug_mode("error")
        run(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_current_stream_is_used() -> None:
    """The call waits for the work on its stream that fills its inputs."""
    inputs = make_inputs(Case(B=8, H=8, L=1, M=3800, D=64), torch.float32)
    want, stream = run(inputs)[0], torch.cuda.Stream()
    keys = inputs["k_mem"].detach().clone()
    inputs["k_mem"] = torch.full_like(keys, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        inputs["k_mem"].copy_(keys)
        got = run(inputs)[0]
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("length", [1, 8])
def test_cuda_graph(length: int) -> None:
    """A captured call replays on new keys and on bounds that moved."""
    case = Case(B=2, H=4, L=length, M=500, D=64, intervals="filled")
    inputs, other = make_inputs(case, torch.bfloat16), make_inputs(case.but(seed=9), torch.bfloat16)
    run(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs)
    with torch.no_grad():
        for name, x in inputs.items():
            if isinstance(x, torch.Tensor):
                x.copy_(other[name])
    graph.replay()
    torch.testing.assert_close(captured, run(inputs), rtol=0, atol=0)
