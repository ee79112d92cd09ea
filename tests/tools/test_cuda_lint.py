"""The lint of the CUDA kernels' machine code fails on what it is there for."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import cuda_lint
import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"registers": 104, "stack": 0, "shared": 0, "instructions": 2400, "wide": 24, "ahead": 12, "trips": 5}


@pytest.mark.parametrize(("change", "said"), [
    ({}, None),
    ({"registers": 100}, None),
    ({"stack": 8}, "8 bytes of registers spilled"),
    ({"wide": 20}, "20 128-bit loads, 24 are wanted"),
    ({"ahead": 4}, "4 loads in flight"),
    ({"ahead": 8}, "before 12"),
    ({"registers": 130}, "3 blocks a multiprocessor"),
    ({"trips": 7}, None),
    ({"trips": 8}, "8 trips to global memory one after the other, before 5"),
    ({"instructions": 2600}, "2600 instructions, before 2400"),
], ids=str)  # fmt: skip
def test_complaints(change: dict[str, Any], said: str | None) -> None:
    found = cuda_lint.complaints("sm_90 part bf16 width 64 queries 1", GOOD | change, GOOD)
    assert (not found) if said is None else any(said in x for x in found)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_trips_to_global_memory(tmp_path: Path) -> None:
    """Three loads that need each other's results, and three that do not."""
    source, cubin = tmp_path / "loads.cu", tmp_path / "loads.cubin"
    for body, wanted in (("a[a[a[i]]]", 3), ("a[i] + a[i + 99] + a[i + 999]", 1)):
        source.write_text(f"__global__ void loads(const int* a, int* b, int i) {{ *b = {body}; }}")
        subprocess.run(["nvcc", "-cubin", "-arch=sm_90a", source, "-o", cubin], check=True, capture_output=True)
        sass = subprocess.run([cuda_lint.CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        assert cuda_lint.trips(sass) == wanted


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("spills", [False, True])
def test_a_spill_is_seen(tmp_path: Path, spills: bool) -> None:
    starved = "#undef TXL_KERNEL\n#define TXL_KERNEL __global__ __launch_bounds__(128, 12)\n"  # 40 registers
    source, fatbin = tmp_path / "one.cu", tmp_path / "one.fatbin"
    source.write_text(
        f'#include "simt.h"\n{starved if spills else ""}#include "decode/part.cuh"\nusing namespace txl_cuda;\n'
        "template __global__ void txl_cuda::part_kernel<Shape<Bf16, 8, 1, 1, true>>(const DecodeProblem);\n"
    )
    target = ["-std=c++17", "-gencode=arch=compute_80,code=sm_80", "-I", ROOT / "csrc" / "cuda"]
    command = ["nvcc", "-fatbin", *target, source, "-o", fatbin]
    subprocess.run(command, check=True, capture_output=True)
    found = cuda_lint.measure(fatbin)
    assert list(found) == ["sm_80 part bf16 width 64 queries 1"]
    (kernel,) = found.values()
    assert (kernel["stack"] > 0) == spills
    assert kernel["wide"] >= 24
    assert any("spilled" in x for x in cuda_lint.complaints(*found, kernel, None)) == spills


@pytest.mark.parametrize(("change", "said"), [
    ({}, None),
    ({"keeps": 32}, "ask for 512 registers a thread of the 504"),
    ({"used": 25}, "register 24 is used where 24 were kept"),
], ids=str)  # fmt: skip
def test_registers_that_are_handed_over(change: dict[str, Any], said: str | None) -> None:
    good = GOOD | {"registers": 168, "keeps": 24, "takes": 240, "groups": 2, "used": 22}
    found = cuda_lint.complaints("sm_90 hopper forward bf16 width 64", good | change, None)
    assert found == [] if said is None else any(said in x for x in found)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_registers_are_found_in_machine_code(tmp_path: Path) -> None:
    source, fatbin = tmp_path / "one.cu", tmp_path / "one.fatbin"
    source.write_text(
        "namespace txl_cuda { struct Bf16 {}; template <class T, int N> struct ForwardShape {};\n"
        "template <class S> __global__ __launch_bounds__(384, 1) void forward_kernel(float* x) {\n"
        'if (threadIdx.x >= 256) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");\n'
        'else { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); x[threadIdx.x] = 1; } }\n'
        "template __global__ void forward_kernel<ForwardShape<Bf16, 64>>(float*); }\n"
    )
    command = ["nvcc", "-fatbin", "-gencode=arch=compute_90a,code=sm_90a", source, "-o", fatbin]
    subprocess.run(command, check=True, capture_output=True)
    (kernel,) = cuda_lint.measure(fatbin).values()
    assert (kernel["keeps"], kernel["takes"], kernel["groups"]) == (40, 232, 3)
    assert kernel["used"] < 40


def test_serialised_products() -> None:
    name, good = "sm_90 hopper forward bf16 width 64", GOOD | {"products": 32, "waits": 8}
    assert cuda_lint.complaints(name, good, good) == []
    assert any("serialised" in x for x in cuda_lint.complaints(name, good | {"waits": 32}, good))
    assert cuda_lint.readable(
        "_ZN8txl_cuda20backward_keys_kernelINS_9KeysShapeINS_3F16ELi128ELi1ELi2ELi3ELb1EEEEEv"
    ) == ("hopper backward_keys f16 width 128")
