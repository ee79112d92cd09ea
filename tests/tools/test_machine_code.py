"""Comparison of the GPU kernels' machine code with a table. `make aot` compares all kernels."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import machine_code
import pytest
import torch
from cases import as_call, make_inputs
from pretended_gpu import compiling

from txl_kernels import rel_attention
from txl_kernels.backends.triton import config

ROOT = Path(__file__).resolve().parents[2]
NEEDS_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
TRITON = {"tile": [64, 64, 4, 2], "spill": 0, "shared": 90000, "serialised": [], "loop": 600}
PART = {"registers": 104, "spill": 0, "shared": 0, "instructions": 2400, "wide": 24, "ahead": 12, "trips": 5}
HOPPER = PART | {"registers": 168, "keeps": 24, "takes": 240, "groups": 2, "used": 22, "products": 32, "waits": 8}
HOPPER |= {"once": 1600}
AMD = {"tile": [64, 64, 4, 1], "registers": 221, "spill": 0, "shared": 16384, "loop": 600, "products": 24}
NAMES = {
    "forward gfx942 bf16 D64": AMD, "forward gfx942 fp32 D64": AMD, "forward gfx950 bf16 D64": AMD,
    "forward gfx1100 bf16 D64": AMD, "forward gfx1100 bf16 D256": AMD | {"spill": 600},
    "forward gfx1100 fp32 D64": AMD | {"products": 0},
    "forward sm_90 bf16 D64": TRITON, "sm_90 part bf16 width 64 queries 1": PART,
    "sm_90 hopper forward bf16 width 64": HOPPER,
}  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), [
    *((name, {}, None) for name in NAMES),
    ("forward sm_90 bf16 D64", {"loop": 629}, None),
    ("forward sm_90 bf16 D64", {"loop": 631}, "631 instructions in the inner loop, before 600"),
    ("forward sm_90 bf16 D64", {"spill": 8}, "spills 8 bytes, before 0"),
    ("forward sm_90 bf16 D64", {"shared": 240000}, "the limit is 227 KiB"),
    ("forward sm_90 bf16 D64", {"serialised": ["C7510"]}, "wgmma serialised"),
    ("forward sm_90 bf16 D64", {"tile": [64, 64, 8, 2]}, "run with --update"),
    ("forward gfx942 bf16 D64", {"shared": 66000}, "the limit is 64 KiB"),
    ("forward gfx950 bf16 D64", {"shared": 66000}, None),
    ("forward gfx942 bf16 D64", {"spill": 1}, "spills 1 registers, 0 are allowed"),
    ("forward gfx1100 bf16 D64", {"spill": 99}, "spills 99 registers, 32 are allowed"),
    ("forward gfx1100 bf16 D256", {"spill": 601}, "spills 601 registers, before 600"),
    *((f"forward {x}", {"products": 0}, "no matrix") for x in ("gfx942 bf16 D64", "gfx1100 bf16 D64", "gfx942 fp32 D64")),
    ("forward gfx942 bf16 D64", {"loop": 631}, "631 instructions in the inner loop, before 600"),
    ("sm_90 part bf16 width 64 queries 1", {"registers": 100}, None),
    ("sm_90 part bf16 width 64 queries 1", {"spill": 8}, "spills 8 bytes"),
    ("sm_90 part bf16 width 64 queries 1", {"wide": 20}, "20 128-bit loads, 24 are needed"),
    ("sm_90 part bf16 width 64 queries 1", {"ahead": 4}, "4 loads in flight before the first barrier, 8 are needed"),
    ("sm_90 part bf16 width 64 queries 1", {"ahead": 8}, "before 12"),
    ("sm_90 part bf16 width 64 queries 1", {"registers": 130}, "3 blocks a multiprocessor"),
    ("sm_90 part bf16 width 64 queries 1", {"trips": 7}, None),
    ("sm_90 part bf16 width 64 queries 1", {"trips": 8}, "8 trips to global memory one after the other, before 5"),
    ("sm_90 part bf16 width 64 queries 1", {"instructions": 2600}, "2600 instructions, before 2400"),
    ("sm_90 hopper forward bf16 width 64", {"keeps": 32}, "request 512 registers per thread of the 504"),
    ("sm_90 hopper forward bf16 width 64", {"used": 25}, "register 24 is used where 24 were kept"),
    ("sm_90 hopper forward bf16 width 64", {"waits": 32}, "serialised"),
    ("sm_90 hopper forward bf16 width 64", {"once": 1700}, "1700 instructions outside of loops, before 1600"),
], ids=str)  # fmt: skip
def test_complaints(name: str, change: dict[str, Any], message: str | None) -> None:
    found = machine_code.complaints(name, NAMES[name] | change, NAMES[name])
    assert (found == []) if message is None else any(message in x for x in found)


def test_kernels_and_table_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that the table lacks, and one that it should not have."""
    monkeypatch.setattr(machine_code, "TABLE", tmp_path / "table.json")
    (new, kernel), (old, _) = list(NAMES.items())[-3:-1]
    (tmp_path / "table.json").write_text(json.dumps({"Triton 3.9": {old: kernel}}))
    assert machine_code.compare("Triton 3.9", {new: kernel}, {new}, update=False, show=False) == 1
    assert f"other kernels than in the table for Triton 3.9, run with --update: ['{new}', '{old}']" in (
        capsys.readouterr().out
    )
    assert machine_code.compare("Triton 3.9", {new: kernel}, {new}, update=True, show=False) == 0
    assert machine_code.compare("Triton 4.0", {new: kernel}, {new}, update=False, show=False) == 1
    assert machine_code.compare("nvcc 14.0", {new: kernel}, {new}, update=False, show=False) == 0
    assert json.loads((tmp_path / "table.json").read_text()) == {"Triton 3.9": {new: kernel}}


@pytest.mark.parametrize(("branch", "architecture", "found"), [
    ("@P0 BRA `(.L_x_0)", 80, 1), ("BRA `(.L_x_0)", 80, 1), ("@!P1 BRA P2, `(.L_x_0)", 90, 1), ("BRA `(.L_x_0)", 90, 0),
    ("BRA.U UP0, `(.L_x_0)", 120, 1), ("BRA.U !UP0, `(.L_x_0)", 120, 1), ("BRA `(.L_x_0)", 120, 0),
], ids=str)  # fmt: skip
def test_inner_loops(branch: str, architecture: int, found: int) -> None:
    """Loops of machine code as nvdisasm prints it; from sm_100 on a condition may be an operand."""
    code = ["S2R R0, SR_TID.X", "HMMA.16816.F32.BF16 R4, R8, R12, R4", branch, "EXIT"]
    lines = [f"        /*{16 * n:04x}*/                   {x};" for n, x in enumerate(code)]
    loops = machine_code.inner_loops("\n".join([lines[0], ".L_x_0:", *lines[1:]]), architecture)
    assert loops == [code[1:3]] * found


def test_instructions_outside_of_loops() -> None:
    """A loop from 0x20 to 0x40, which waits at 0x60, behind the end, and jumps back."""
    texts = [
        "S2R R0",
        "@P1 BRA 0x50",
        "SYNCS.PHASECHK P0",
        "@!P0 BRA 0x60",
        "@P2 BRA 0x20",
        "EXIT",
        "NANOSLEEP",
        "BRA 0x20",
    ]
    assert machine_code.outside_of_loops({16 * n: x for n, x in enumerate(texts)}) == 3


@pytest.mark.nightly
def test_spill_of_a_tile_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile known to need more than the registers of sm_80."""
    monkeypatch.setattr(config, "choose", lambda *given: config.Config(64, 64, 4, 1))
    made = machine_code.compile_call(machine_code.VARIANTS[0], 80)["backward_queries"]
    measured = machine_code.measure_triton(made, 80)
    assert measured["tile"] == [64, 64, 4, 1]
    assert measured["spill"] > 0
    assert measured["products"] == 192  # 6 products of 64 x 64 x 64 by 4 warps, 32 instructions each
    assert measured["loop"] > 500


@pytest.mark.slow
@pytest.mark.parametrize("far", [("k", "v"), ("k_mem", "v_mem")], ids=["segment", "memory"])
def test_rows_with_64_bit_strides_compile(far: tuple[str, str]) -> None:
    """Strides of the memory or of the segment: no variable may hold either of two types."""
    inputs = make_inputs(machine_code.case("two rows", 64, B=1, H=1, L=2, M=2), torch.bfloat16)
    for name in far:  # 4 GiB of addresses, which nothing touches
        inputs[name] = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((1, 1, 2, 64), (64, 64, 2**31, 1))
    compiled: list[str] = []
    with compiling(80, lambda function, *_: compiled.append(function.fn.__name__)):
        out = rel_attention(**as_call(inputs), backend="triton")
        torch.autograd.grad(out, inputs["q"], torch.empty_like(out))
    assert "backward_keys_kernel" in compiled


@pytest.mark.nightly
@NEEDS_NVCC
def test_trips_to_global_memory(tmp_path: Path) -> None:
    """Three loads that need each other's results, and three that do not."""
    source, cubin = tmp_path / "loads.cu", tmp_path / "loads.cubin"
    for body, wanted in (("a[a[a[i]]]", 3), ("a[i] + a[i + 99] + a[i + 999]", 1)):
        source.write_text(f"__global__ void loads(const int* a, int* b, int i) {{ *b = {body}; }}")
        subprocess.run(["nvcc", "-cubin", "-arch=sm_90a", source, "-o", cubin], check=True, capture_output=True)
        sass = subprocess.run(
            [machine_code.BIN / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True
        ).stdout
        assert machine_code.trips(sass) == wanted


@pytest.mark.nightly
@NEEDS_NVCC
@pytest.mark.parametrize("spills", [False, True])
def test_spill_of_a_decode_kernel(tmp_path: Path, spills: bool) -> None:
    starved = "#undef TXL_KERNEL\n#define TXL_KERNEL __global__ __launch_bounds__(128, 12)\n"  # 40 registers
    source, fatbin = tmp_path / "one.cu", tmp_path / "one.fatbin"
    source.write_text(
        f'#include "simt.h"\n{starved if spills else ""}#include "decode/part.cuh"\nusing namespace txl_cuda;\n'
        "template __global__ void txl_cuda::part_kernel<Shape<Bf16, 8, 1, 1, true>>(const DecodeProblem);\n"
    )
    target = ["-std=c++17", "-gencode=arch=compute_80,code=sm_80", "-I", ROOT / "csrc" / "cuda"]
    command = ["nvcc", "-fatbin", *target, source, "-o", fatbin]
    subprocess.run(command, check=True, capture_output=True)
    found = machine_code.measure_cuda(fatbin)
    assert list(found) == ["sm_80 part bf16 width 64 queries 1"]
    (kernel,) = found.values()
    assert (kernel["spill"] > 0) == spills
    assert kernel["wide"] >= 24
    assert any("spills" in x for x in machine_code.complaints(*found, kernel, None)) == spills


@pytest.mark.nightly
@NEEDS_NVCC
def test_registers_that_warpgroups_redistribute(tmp_path: Path) -> None:
    source, fatbin = tmp_path / "one.cu", tmp_path / "one.fatbin"
    source.write_text(
        "namespace txl_cuda { struct Bf16 {}; template <class T, int, int> struct ForwardShape {};\n"
        "template <class S> __global__ __launch_bounds__(384, 1) void forward_kernel(float* x) {\n"
        'if (threadIdx.x >= 256) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");\n'
        'else { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); x[threadIdx.x] = 1; } }\n'
        "template __global__ void forward_kernel<ForwardShape<Bf16, 64, 2>>(float*); }\n"
    )
    command = ["nvcc", "-fatbin", "-gencode=arch=compute_90a,code=sm_90a", source, "-o", fatbin]
    subprocess.run(command, check=True, capture_output=True)
    (kernel,) = machine_code.measure_cuda(fatbin).values()
    assert (kernel["keeps"], kernel["takes"], kernel["groups"]) == (40, 232, 2)
    assert kernel["used"] < 40
