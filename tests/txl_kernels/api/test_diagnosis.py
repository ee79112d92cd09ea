"""`python -m txl_kernels`, and what the package does where parts of it are missing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import txl_kernels
from txl_kernels import diagnosis
from txl_kernels.backends import cpu


def test_says_what_runs_here() -> None:
    done = subprocess.run([sys.executable, "-m", "txl_kernels"], capture_output=True, text=True, check=True)
    for words in (
        txl_kernels.__version__,
        torch.__version__,
        "native     works for float32, bfloat16",
        "instruction set",
    ):
        assert words in done.stdout
    assert ("bfloat16 by VDPBF16PS: " in done.stdout) == (cpu.native.module.pairs_over_floats() > 0)


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.native, "module", None)
    monkeypatch.setattr(cpu.native, "missing", "the C++ module could not be loaded: it is not there")
    text = diagnosis.report()
    assert "native     does not run: the C++ module could not be loaded: it is not there" in text
    assert "backend=None takes reference" in text


@pytest.mark.parametrize("blocked", ["triton", "txl_kernels._native"])
def test_reference_imports_and_runs_without(blocked: str) -> None:
    code = f"""
import sys
sys.modules[{blocked!r}] = None
import torch, txl_kernels
q, r, u = torch.randn(1, 1, 3, 4), torch.randn(1, 3, 4), torch.zeros(1, 4)
print(txl_kernels.rel_attention(q, q, q, r, u, u, backend="reference").shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.home())
    assert done.stdout.strip() == "torch.Size([1, 1, 3, 4])"


def test_version_is_the_same_everywhere() -> None:
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{txl_kernels.__version__}"' in pyproject


def test_imports_nothing_that_is_slow_to_import() -> None:
    """The compiler takes a second, Triton and matplotlib a third each; nothing needs them before it
    is asked for them."""
    code = """
import sys, torch
slow = ("torch._dynamo", "torch._inductor", "triton", "matplotlib")
loaded = {name for name in slow if name in sys.modules}  # by torch itself
import txl.commands.cli, txl_kernels
q, r, u = torch.randn(1, 1, 3, 4, requires_grad=True), torch.randn(1, 3, 4), torch.zeros(1, 4)
txl_kernels.rel_attention(q, q, q, r, u, u)
print(sorted(name for name in slow if name in sys.modules and name not in loaded))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
