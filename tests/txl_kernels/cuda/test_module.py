"""The CUDA module without a GPU, and the choice between backends."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, as_call, as_fields, make_inputs
from cuda_cases import inkling
from cuda_emulation import meta_call, plan_of
from processes import ROOT, run_python

from txl_kernels import available_backends, backends, rel_attention
from txl_kernels.backends import cuda, native_modules, route, self_check, triton
from txl_kernels.backends.limits import PREFILL
from txl_kernels.call import Call
from txl_kernels.diagnosis import report

built = pytest.mark.skipif(cuda.native.module is None, reason=f"needs the CUDA module: {cuda.native.why_not_loaded}")


@built
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_module_without_a_driver() -> None:
    assert cuda.native.module.no_driver() == "no usable NVIDIA driver"
    assert "no usable NVIDIA driver" in report()
    for queries, dtype in ((1, torch.float32), (17, torch.bfloat16)):
        call, plan = meta_call(1, 1, queries, 0, 8, dtype), plan_of(1, 1, queries, 0, 8, dtype)
        with pytest.raises(RuntimeError, match="CUDA: "):
            plan.forward(call, call.q, None, 0, 0)
        with pytest.raises(RuntimeError, match="CUDA: "):
            plan.load()


@built
def test_module_refuses_sizes_without_kernels() -> None:
    for sizes in ((1, 1, 17, 0, 8), (1, 1, 1, 0, 12), (2**31, 2, 1, 0, 8)):
        with pytest.raises(ValueError, match=r"kernels do not take|a grid of blocks"):
            plan_of(*sizes)


def test_cpu_tensors_are_refused() -> None:
    call = as_call(make_inputs(Case(L=1), torch.float32))
    with torch.no_grad(), pytest.raises(RuntimeError, match="backend='cuda' cannot run: cuda runs on CUDA devices"):
        rel_attention(**call, backend="cuda")
    assert "cuda" not in available_backends("cpu")


def test_missing_module_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("txl_kernels.backends.native_modules.PACKAGE", tmp_path)
    monkeypatch.setattr("txl_kernels.backends.native_modules.SOURCES", tmp_path)
    (tmp_path / "_cuda_missing.txt").write_text("built without it\n")
    monkeypatch.setattr(cuda, "native", native_modules.load("_cuda", "CUDA"))
    assert cuda.native.why_not_loaded == "built without it"
    assert "built without it" in report()
    assert cuda.why_not_tensors(torch.device("cuda"), torch.float32) == "built without it"


def test_choice_of_the_fastest_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "cuda" for up to 4 queries; on compute capability 9.0 in 16 bits for any number, and
    gradients."""
    monkeypatch.setattr(cuda, "why_not_tensors", lambda *args: None)
    monkeypatch.setattr(triton, "why_not_tensors", lambda *args: None)
    monkeypatch.setattr(backends.cpu, "why_not_tensors", lambda *args: "not here")

    def chosen(length: int, dtype: torch.dtype = torch.float32) -> str:
        return backends.choose(None, as_fields(make_inputs(Case(L=length, M=5, D=8), dtype)))

    for capability in ((8, 0), PREFILL.capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        is_hopper = capability == PREFILL.capability
        with torch.no_grad():
            assert [chosen(length) for length in (1, 4, 5, 16, 50)] == ["cuda", "cuda", "triton", "triton", "triton"]
            many = "cuda" if is_hopper else "triton"
            assert [chosen(length, torch.bfloat16) for length in (1, 5, 16, 50)] == ["cuda", many, many, many]
        assert chosen(1) == chosen(50) == "triton"  # with gradients
        assert chosen(50, torch.bfloat16) == ("cuda" if is_hopper else "triton")
        wanted = {(False, True): "cuda" if is_hopper else "triton", (True, False): "cuda"}
        for (decode, gradients), name in wanted.items():
            kind = {"decode": decode, "gradients": gradients}
            assert backends.choose_unasked(torch.device("cpu"), torch.bfloat16, **kind) == name


@pytest.mark.parametrize("capability", [(8, 0), PREFILL.capability], ids=str)
def test_choice_for_inklings_terms(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """ "cuda" for up to 4 queries without gradients. A traced graph, which serves all lengths, has
    another, and its named backend is checked as decode alone."""
    monkeypatch.setattr(cuda, "why_not_tensors", lambda *args: None)
    monkeypatch.setattr(triton, "why_not_tensors", lambda *args: None)
    monkeypatch.setattr(backends.cpu, "why_not_tensors", lambda *args: "not here")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    def made(length: int, dtype: torch.dtype = torch.bfloat16) -> Call:
        call = as_fields(make_inputs(inkling("", 3, length, 9, D=16), dtype))
        return call._replace(sink=torch.zeros(2, 6, length), content_bias=None, position_bias=None)

    for dtype in cuda.LIMITS.dtypes:
        with torch.no_grad():
            chosen = [backends.choose(None, made(length, dtype)) for length in (1, 2, 4, 5, 50)]
        assert chosen == ["cuda", "cuda", "cuda", "triton", "triton"]
        assert backends.choose(None, made(1, dtype)) == "triton"  # with gradients
    asked: list[bool] = []
    monkeypatch.setattr(self_check, "concerns", lambda device: True)
    monkeypatch.setattr(self_check, "why_not_trusted", lambda kernels, kind: asked.append(kind.decode))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad():
        assert not route.is_preferred(made(1))
        assert backends.why_not_kind("cuda", made(1), gradients=False) is None
    assert asked == ([False, True] if capability == PREFILL.capability else [True])


class Attention(torch.nn.Module):
    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return rel_attention(*tensors[:6], tensors[6:], window=self.window)


def gpu_tensors(length: int, rows: int) -> tuple[torch.Tensor, ...]:
    shapes = [(2, 2, length, 8)] * 3 + [(2, rows, 8), (2, 8), (2, 8)] + [(2, 2, 5, 8)] * 2
    return tuple(torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)


def backend_in(graph: torch.fx.GraphModule) -> str:
    """Return the backend that the operator in a graph names."""
    [node] = [x for x in graph.graph.nodes if x.target is torch.ops.txl_kernels.rel_attention.default]
    return str(node.args[-1])


@pytest.mark.parametrize(
    ("length", "capability", "name"),
    [(3, PREFILL.capability, "cuda"), (20, PREFILL.capability, "cuda"), (20, (8, 0), "triton")],
    ids=str,
)
def test_compiled_model_chooses_a_backend(
    length: int, capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is traced without a graph break, with prefill's checks of strides."""
    from torch._subclasses import FakeTensorMode

    monkeypatch.setattr(cuda, "why_not_tensors", lambda *args: None)
    monkeypatch.setattr(triton, "why_not_tensors", lambda *args: None)
    monkeypatch.setattr(self_check, "concerns", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []
    with FakeTensorMode():
        compiled = torch.compile(Attention(), fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
        compiled(*gpu_tensors(length, length + 5))
    assert len(graphs) == 1
    assert backend_in(graphs[0]) == name


@pytest.mark.parametrize(("capability", "name"), [(PREFILL.capability, "cuda"), ((8, 0), "triton")], ids=str)
def test_exported_graph_serves_all_lengths_on_a_gpu(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No length decides which backend runs, which would bound a dimension of the graph."""
    from torch._subclasses import FakeTensorMode

    monkeypatch.setattr(cuda, "why_not_tensors", lambda *args: None)
    monkeypatch.setattr(triton, "why_not_tensors", lambda *args: None)
    monkeypatch.setattr(self_check, "concerns", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    length, memory = torch.export.Dim("length", max=4096), torch.export.Dim("memory", max=4096)
    sizes: list[Any] = [{2: length}] * 3 + [None] * 3 + [{2: memory}] * 2
    with FakeTensorMode(), torch.no_grad():
        program = torch.export.export(Attention(20), gpu_tensors(30, 20), dynamic_shapes=(tuple(sizes),), strict=False)
    assert backend_in(program.graph_module) == name


def test_compiled_decode_call_is_checked_as_decode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other GPUs the module has no kernels for many queries, and their check would fail."""
    asked: list[bool] = []
    monkeypatch.setattr(self_check, "concerns", lambda device: True)
    monkeypatch.setattr(self_check, "why_not_trusted", lambda kernels, kind: asked.append(kind.decode))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    call = as_fields(make_inputs(Case(L=3, M=5, D=8), torch.bfloat16))
    for capability, wanted in (((8, 0), [True]), (PREFILL.capability, [False, True])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        asked.clear()
        assert backends.why_not_kind("cuda", call, gradients=False) is None
        assert asked == wanted


SETUP = """
import os, setuptools, sys
sys.argv = ["setup.py", "--version"]
import setup
def decide():
    try:
        print("without:", setup.cuda_missing())
    except SystemExit as error:
        print("failed:", error)
"""


@pytest.mark.parametrize(
    ("setting", "version_file", "reason"),
    [
        (
            "auto",
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n",
            r"torch 2\.13\.0\+cpu is built without CUDA",
        ),
        ("auto", "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "probed"),
        ("auto", None, "probed"),
        ("on", "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", "probed"),
    ],
)
def test_no_cuda_kernels_for_a_torch_without_cuda(
    setting: str, version_file: str | None, reason: str, tmp_path: Path
) -> None:
    if version_file is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/version.py").write_text(version_file)
    code = f"""
os.environ["TXL_KERNELS_CUDA"] = {setting!r}
setup.sysconfig.get_path = lambda name: {str(tmp_path)!r}
setup.nvcc_does_not_work = lambda: "probed"
decide()
"""
    assert re.search(reason, run_python(SETUP + code).splitlines()[-1])


BUILDS = [  # TXL_KERNELS_CUDA, CUDACXX, and the output of setup.py
    ("on", "/nonexistent/nvcc", "failed: TXL_KERNELS_CUDA=on, but no CUDA compiler found"),
    ("perhaps", "nvcc", "failed: TXL_KERNELS_CUDA must be auto, on or off, got 'perhaps'"),
    ("on", "false", "failed: .* cannot compile for sm_100, which takes CUDA 12.8 or newer"),
    ("off", "/nonexistent/nvcc", "without: txl_kernels was built with TXL_KERNELS_CUDA=off"),
    ("auto", "/nonexistent/nvcc", "without: txl_kernels was built without .*: no CUDA compiler"),
]


def test_builds_with_and_without_cuda() -> None:
    code = f"""
setup.torch_without_cuda = lambda: None
for setting, compiler, _ in {BUILDS}:
    os.environ |= {{"TXL_KERNELS_CUDA": setting, "CUDACXX": compiler}}
    decide()
"""
    lines = run_python(SETUP + code).splitlines()[-len(BUILDS) :]
    for line, (*_, message) in zip(lines, BUILDS, strict=True):
        assert re.match(message, line), line


DEVICES = """
#include <cstdio>
#include "launch.h"

static int current = 0;
extern "C" int cudaGetDevice(int* device) { return *device = current, 0; }
extern "C" int cudaSetDevice(int device) { return std::printf("%d ", current = device), 0; }
int main() {
  for (int device = -1; device < 2; ++device) { txl_cuda::OnDevice on(device); std::printf("[%d] ", current); }
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_device_is_set_only_where_it_changes(tmp_path: Path) -> None:
    """Setting one creates its context."""
    (tmp_path / "devices.cpp").write_text(DEVICES)
    program, folder = tmp_path / "devices", ROOT / "csrc/cuda"
    command = ["nvcc", "-std=c++17", "-arch=sm_80", "-cudart", "shared", "-I", folder]
    subprocess.run([*command, tmp_path / "devices.cpp", folder / "device.cu", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[0]", "[0]", "1", "[1]", "0"]
