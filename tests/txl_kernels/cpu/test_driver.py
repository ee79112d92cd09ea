"""The C++ kernels without Python: on an emulated Arm processor; under ThreadSanitizer in vectors of
16; the symbols of their objects.

The driver starts threads of its own, because torch's OpenMP runtime looks like a race to
ThreadSanitizer. `TESTS_REQUIRE_TOOLS=1` (CI) makes a missing compiler or emulator a failure.
"""

import functools
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builds import ROOT, once
from cases import Case, as_call, in_float64, leaves, make_inputs
from tolerances import OF_ROUNDING, largest, require_close

from txl_kernels import rel_attention
from txl_kernels.call import drop_threshold, keep_scale

pytestmark = pytest.mark.slow  # its programs take minutes to compile
CPU = ROOT / "csrc" / "cpu"
KERNELS = [CPU, *sorted(CPU.parent.glob("*.h"))]
SOURCES = [Path(__file__).with_name("driver.cpp"), CPU / "dispatch.cpp", CPU / "runtime.cpp"]
# Instruction sets that not every processor of their architecture has: x86-64's and Arm's.
NEWER = ["avx2", "avx512", "avx512_bf16", "amx"]
NEWER_ARM = ["neon_bf16"]
ISAS = ["baseline", "neon", *NEWER, *NEWER_ARM, "emulated_bf16", "emulated_amx"]
FLAGS = ["-std=c++17", "-I", str(ROOT / "csrc"), "-fno-math-errno", "-Wno-psabi", "-pthread"]
FLAGS += ["-DTXL_POISON", "-DTXL_EMULATED"]
BUILDS = {  # name: compiler and flags, what runs the program, instruction sets
    "aarch64": (["aarch64-linux-gnu-g++", "-O2", "-static"], ["qemu-aarch64", "-cpu", "max"],
                ["neon", "neon_bf16", "baseline", "emulated_bf16", "emulated_amx"]),
    "thread-sanitizer, sixteen lanes": (
        ["g++", "-O1", "-g", "-fsanitize=thread", "-DTXL_BASELINE_LANES=16"], [],
        ["baseline", "emulated_bf16", "emulated_amx"]),
}  # fmt: skip
CASES = [
    Case("intervals and dropout", B=2, H=2, L=61, M=50, D=24, intervals="random", dropout_p=0.2),
    Case("bidirectional window", B=1, H=2, L=70, M=210, D=17, causal=False, window=90),
    Case("parts of keys", B=1, H=1, L=7, M=1600, D=16),
    Case("decode", B=2, H=2, L=2, M=1100, D=20),
]


def need(tool: str) -> None:
    if shutil.which(tool) is None:
        message = f"{tool} is not installed"
        if os.environ.get("TESTS_REQUIRE_TOOLS") == "1":
            pytest.fail(message)
        pytest.skip(message)


def compile_isa(compiler: list[str], isa: str, folder: Path, source: Path = CPU / "isa.cpp") -> Path:
    """The object of one instruction set; empty where the architecture lacks it."""
    target = folder / f"{isa}.o"
    subprocess.run([*compiler, *FLAGS, f"-DTXL_ISA_{isa}", "-c", str(source), "-o", str(target)], check=True)
    return target


def unoptimized(compiler: str, isa: str) -> Path:
    """The object of an instruction set that is only linked and examined, not run."""
    need(compiler)
    make = functools.partial(compile_isa, [compiler, "-O0"], isa)
    return once(f"object_{compiler.removesuffix('g++')}{isa}", KERNELS, FLAGS, compiler, make) / f"{isa}.o"


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest) -> tuple[list[str], list[str]]:
    compiler, runner, isas = BUILDS[request.param]
    for tool in (compiler[0], *runner[:1]):
        need(tool)
    sources, settings = [*KERNELS, SOURCES[0]], [compiler, FLAGS, ISAS, isas]

    def make(to: Path) -> None:
        with ThreadPoolExecutor() as pool:  # every process of tests waits for it
            optimized = pool.map(lambda isa: compile_isa(compiler, isa, to), isas)
            others = pool.map(lambda isa: unoptimized(compiler[0], isa), [isa for isa in ISAS if isa not in isas])
            subprocess.run([*compiler, *FLAGS, *SOURCES, *optimized, *others, "-o", to / "driver"], check=True)

    folder = once(f"driver_{request.param.split(',')[0]}", sources, settings, compiler[0], make)
    return [*runner, str(folder / "driver")], isas


def raw(x: torch.Tensor) -> bytes:
    x = x.detach().contiguous()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().tobytes()


def input_of(case: Case, x: dict[str, Any], dout: torch.Tensor, dlse: torch.Tensor) -> bytes:
    """One call as the driver reads it."""
    drop = case.dropout_p
    settings = [case.B, case.H, case.L, case.M, case.D, case.T, case.zero_row, 0 if case.causal else case.S]
    settings += [case.S if case.window is None else case.window - 1]
    settings += [x["q"].dtype == torch.bfloat16, 3, drop_threshold(drop) if drop else 0]
    settings += [int(x["dropout_seed"]) if drop else 0, x["start"] is not None, x["end"] is not None]
    given = np.array(settings, dtype=np.int64).tobytes()
    given += np.array([case.D**-0.5, keep_scale(drop)], dtype=np.float32).tobytes()
    given += b"".join(raw(x[n]) for n in ("q", "k", "v", "k_mem", "v_mem", "r", "content_bias", "position_bias"))
    given += raw(dout) + raw(dlse)
    return given + b"".join(raw(x[n].expand(case.B, case.L)) for n in ("start", "end") if x[n] is not None)


def run(command: list[str], isa: str, given: bytes) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"TXL_KERNELS_ISA": isa, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(command, input=given, capture_output=True, env=environment)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_driver_agrees_with_the_reference(build: tuple[list[str], list[str]], case: Case, dtype: torch.dtype) -> None:
    command, isas = build
    x = make_inputs(case, dtype)
    exact = in_float64(x)
    out, lse = rel_attention(**as_call(exact), return_lse=True, backend="reference")
    dout, dlse = torch.randn(out.shape).to(dtype), torch.randn(lse.shape)
    loss = (out * dout.double()).sum() + (lse.where(lse.isfinite(), 0.0) * dlse.double()).sum()
    grads = dict(zip(leaves(exact), torch.autograd.grad(loss, list(leaves(exact).values())), strict=True))
    order = ("q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem")
    wanted = {"lse": lse, "out": out} | {name: grads[name] for name in order}
    given = input_of(case, x, dout, dlse)

    results: dict[str, dict[str, torch.Tensor]] = {}
    for isa in isas:
        done = run(command, isa, given)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stderr.decode().strip() == isa
        results[isa] = {}
        at = 0
        for name, want in wanted.items():
            kind = torch.float32 if name == "lse" else dtype
            size = want.numel() * kind.itemsize
            got = torch.frombuffer(bytearray(done.stdout[at : at + size]), dtype=kind).view(want.shape).double()
            at += size
            require_close(got, want, name, dtype, minimum=0.0)
            # The same roundings to bfloat16; the order of sums differs, which may change one.
            if isa == "emulated_bf16" and "neon_bf16" in results:
                maximum = OF_ROUNDING[kind] * largest(want)
                torch.testing.assert_close(results["neon_bf16"][name], got, rtol=0, atol=maximum)
            results[isa][name] = got
        assert at == len(done.stdout)


@pytest.mark.parametrize("build", ["aarch64"], indirect=True)
def test_bf16_instructions_run_where_an_arm_processor_has_them(build: tuple[list[str], list[str]]) -> None:
    case = CASES[-1]
    x = make_inputs(case, torch.bfloat16)
    given = input_of(case, x, torch.zeros_like(x["q"]), torch.zeros(case.B, case.H, case.L))
    program = build[0][-1]
    for processor, isa in (("max", "neon_bf16"), ("cortex-a72", "neon")):
        assert run(["qemu-aarch64", "-cpu", processor, program], "", given).stderr.decode().strip() == isa
    refused = run(["qemu-aarch64", "-cpu", "cortex-a72", program], "neon_bf16", given)
    assert "TXL_KERNELS_ISA=neon_bf16: this processor does not have it" in refused.stderr.decode()


def test_thread_sanitizer_reports_a_race(tmp_path: Path) -> None:
    """Two threads of a loop write to one variable."""
    need("g++")
    source = tmp_path / "race.cpp"
    source.write_text(
        '#include "cpu/runtime.h"\n'
        "#include <atomic>\n"
        "int main() {\n"
        "  long sum = 0;\n"
        "  std::atomic<int> here{0};\n"
        "  txl::parallel_for(2, 2, [&](int64_t i, int) {\n"
        "    here.fetch_add(1, std::memory_order_relaxed);  // orders nothing, but waits for the other thread\n"
        "    while (here.load(std::memory_order_relaxed) < 2) {}\n"
        "    sum += i;\n"
        "  });\n"
        "  return sum == 1000;\n"
        "}\n"
    )
    program, compiler = tmp_path / "race", BUILDS["thread-sanitizer, sixteen lanes"][0]
    subprocess.run([*compiler, *FLAGS, source, CPU / "runtime.cpp", "-o", program], check=True)
    done = run([str(program)], "", b"")
    assert done.returncode != 0
    assert b"data race" in done.stderr


def symbols(file: Path, tools: str, *options: str) -> str:
    command = [f"{tools}nm", "--demangle", *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def weak_code(file: Path, tools: str = "") -> list[str]:
    """Functions of an object that the linker may use for other objects, too."""
    lines = symbols(file, tools, "--format=sysv").splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.count("|") >= 6]
    return [row[0] for row in rows if row[2] in "WVu" and row[-1].startswith(".text")]


x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="most instruction sets are x86-64's")


@x86_64
@pytest.mark.parametrize("isa", [*NEWER, *NEWER_ARM])
def test_code_of_newer_processors_is_not_shared(isa: str) -> None:
    """Without optimization, each inline function and template between the pragmas is a symbol."""
    tools = "aarch64-linux-gnu-" if isa in NEWER_ARM else ""
    target = unoptimized(f"{tools}g++", isa)
    assert f"T txl::isa_{isa}::forward(" in symbols(target, tools)
    assert weak_code(target, tools) == []


@x86_64
def test_shared_code_is_found(tmp_path: Path) -> None:
    need("g++")
    source = tmp_path / "planted.cpp"
    planted = (
        '#include "{CPU}/generic/instruction_set.h"\n#include <algorithm>\nTXL_BEGIN_TARGET\n{code}\nTXL_END_TARGET\n'
    )
    for code, seen in (
        ("int planted(int a, int b) { return a < b ? b : a; }", []),
        ("int planted(int a, int b) { return std::max(a, b); }", ["int const& std::max<int>(int const&, int const&)"]),
    ):
        source.write_text(planted.format(CPU=CPU, code=code))
        assert weak_code(compile_isa(["g++", "-O0"], "avx2", tmp_path, source)) == seen
