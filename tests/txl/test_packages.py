"""Imports with missing packages: kernels need torch alone, `txl` and its command the extra."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NEEDED = ("numpy", "rich", "safetensors", "typer")
OPTIONAL = ("matplotlib", "numpy", "rich", "safetensors", "tensorboard", "triton", "typer")
PEERS = ("transformers", "nemo", "espnet", "funasr", "speechbrain", "ray", "ding", "cosyvoice", "enformer_pytorch",
         "fireredasr", "zipformer", "zipenhancer", "modelscope")  # fmt: skip


HIDE = """
import sys
from importlib.machinery import PathFinder
class Hiding:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in {packages!r} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


def run_without(packages: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that does not find these packages."""
    quiet = "ignore:Failed to initialize NumPy"  # torch's own warning
    command = [sys.executable, "-W", quiet, "-c", HIDE.format(packages=packages) + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_kernels_run_with_torch_alone() -> None:
    code = """
import copy, torch, txl_kernels, txl_kernels.integrations, txl_kernels.onnx
txl_kernels.onnx.library()
for backend in txl_kernels.available_backends("cpu"):
    q, r, u = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(2, 5, 8), torch.zeros(2, 8)
    txl_kernels.rel_attention(q, q, q, r, u, u, backend=backend).sum().backward()
    assert q.grad.isfinite().all()
    print(backend)
layer = txl_kernels.RelAttention(8, 2).eval()
cache = copy.deepcopy(layer.new_cache(1, 4, 2))
with torch.no_grad():
    layer(torch.zeros(1, 2, 8), cache=cache)  # a copy belongs to the layer that has the parameters
"""
    done = run_without(OPTIONAL + PEERS, code)
    assert done.returncode == 0, done.stderr
    assert "reference" in done.stdout.split()


def test_command_runs_with_declared_dependencies() -> None:
    optional = tuple(name for name in OPTIONAL if name not in NEEDED)
    done = run_without(optional, "sys.argv = ['txl', '--help']\nfrom txl.commands import cli\ncli.main()")
    assert done.returncode == 0, done.stderr
    assert "prepare" in done.stdout


@pytest.mark.parametrize("absent", [NEEDED, ("safetensors",)], ids=["all", "one"])
def test_command_without_its_packages_names_the_extra(absent: tuple[str, ...]) -> None:
    line = f'txl needs {", ".join(absent)}: pip install "txl-kernels[txl]"\n'
    done = run_without(absent, "import runpy\nsys.argv = ['txl', 'demo']\nrunpy.run_module('txl', run_name='__main__')")
    assert (done.returncode, done.stderr) == (1, f"error: {line}")
    for code in ("import txl\ntxl.load('runs/a')", "from txl import Engine"):
        done = run_without(absent, code)
        assert done.stderr.endswith(f"ImportError: {line}")
    assert run_without(absent, "import txl\nassert not hasattr(txl, '__wrapped__')").returncode == 0


@pytest.mark.slow
def test_benchmarks_without_the_extra_name_it() -> None:
    code = "import pytest\nsys.exit(pytest.main(['benchmarks', '-p', 'no:cacheprovider']))"
    done = run_without(("safetensors",), code)
    (line,) = done.stderr.strip().splitlines()
    assert line == 'ERROR: the benchmarks run its models: txl needs safetensors: pip install "txl-kernels[txl]"'
    assert done.returncode == pytest.ExitCode.USAGE_ERROR


def test_declared_dependencies() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '\ndependencies = ["torch>=2.6"]\n' in pyproject
    extra = re.search(r"^txl = \[(.*?)\]", pyproject, re.MULTILINE)
    assert extra is not None
    assert sorted(re.findall(r'"([a-z0-9]+)', extra[1])) == sorted(NEEDED)
    assert 'txl = "txl.__main__:main"' in pyproject
    assert "triton>=3.6; platform_system == 'Linux'" in pyproject
