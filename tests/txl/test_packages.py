"""Imports with missing packages: kernels need torch alone, the command its dependencies."""

import re
import subprocess
import sys
from pathlib import Path

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
import torch, txl_kernels, txl_kernels.integrations
for backend in txl_kernels.available_backends("cpu"):
    q, r, u = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(2, 5, 8), torch.zeros(2, 8)
    txl_kernels.rel_attention(q, q, q, r, u, u, backend=backend).sum().backward()
    assert q.grad.isfinite().all()
    print(backend)
"""
    done = run_without(OPTIONAL + PEERS, code)
    assert done.returncode == 0, done.stderr
    assert "reference" in done.stdout.split()


def test_command_runs_with_declared_dependencies() -> None:
    optional = tuple(name for name in OPTIONAL if name not in NEEDED)
    done = run_without(optional, "sys.argv = ['txl', '--help']\nfrom txl.commands import cli\ncli.main()")
    assert done.returncode == 0, done.stderr
    assert "prepare" in done.stdout


def test_declared_dependencies() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[\n(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
    assert block is not None
    assert sorted(re.findall(r'^  "([a-z0-9]+)', block[1], re.MULTILINE)) == sorted(("torch", *NEEDED))
    assert "triton>=3.6; platform_system == 'Linux'" in pyproject
