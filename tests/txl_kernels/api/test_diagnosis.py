"""`python -m txl_kernels`, and what the package does where parts of it are missing."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from internals import COMPARED

import txl_kernels
from txl_kernels import check_calls, diagnosis
from txl_kernels.__main__ import main
from txl_kernels.backends import cpu, cuda, self_check, triton

CPU = torch.device("cpu")


def test_says_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    for words in (
        txl_kernels.__version__,
        torch.__version__,
        "native     works for float32, bfloat16",
        "instruction set",
    ):
        assert words in said
    assert ("bfloat16 by VDPBF16PS: " in said) == (cpu.native.module.bf16_dot_speedup() > 0)


def test_each_kind_of_call_once() -> None:
    """As any user runs it, on a CPU in seconds."""
    command = [sys.executable, "-m", "txl_kernels", "--check", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, calls = done.stdout.split("\ncalls on cpu:\n")
    lines = [line for line in calls.splitlines() if " queries, " in line]
    for width in (16, 32, 40, 41, 64, 80, 128, 256):
        mine = [line for line in lines if f"D {width}, " in line]
        assert {"3 queries, forward ", "70 queries, forward ", "70 queries, forward and backward "} <= {
            said for line in mine for said in re.findall(r"\d+ queries, forward (?:and backward )?", line)
        }
    for words in ("float32", "float16", "dropout", "start and end", "window", "softcap", "bias instead of r"):
        assert any(words in line for line in lines), words
    assert all(re.search(r"(native|reference) +\d+\.\d+ s  error \d\.\de-0[2-7]$", line) for line in lines)
    assert "D 32, " in lines[-1]  # what may end the run is the last
    assert "0 failed" in done.stdout.splitlines()[-1]
    assert "paste all of this into an issue" in done.stdout


def test_a_call_that_fails_is_told_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, lines = cpu.forward, []

    def broken(call: Any, *args: Any, **named: Any) -> Any:
        if call.q.size(3) == 40:
            raise RuntimeError("out of resource: shared memory")
        out, lse = forward(call, *args, **named)
        return (out + 1 if call.q.size(3) == 41 else out), lse

    monkeypatch.setattr(cpu, "forward", broken)
    kinds = [self_check.Kind("", CPU, torch.float32, width, False, False) for width in (40, 41, 64)]
    monkeypatch.setattr(check_calls, "trials", lambda device: map(check_calls.Trial, kinds))
    assert check_calls.check(CPU, lines.append) == 1
    raised, wrong, right = [line for line in lines if " queries, " in line and "\n" not in line]
    assert "RAISED RuntimeError" in raised
    assert wrong.endswith("WRONG")
    assert re.search(r"native .*error \de-07$|native .*error \d\.\de-07$", right)
    text = "\n".join(lines)
    assert "RuntimeError: out of resource: shared memory" in text
    assert "native: its out is off by" in text
    assert "3 calls in" in text
    assert "2 failed" in text


def test_a_backend_is_asked_for_what_it_supports_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA C++ kernels have no gradients of a few queries but on Hopper."""
    lines: list[str] = []
    monkeypatch.setattr(cuda, "why_not_tensors", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    kind = self_check.Kind("", CPU, torch.bfloat16, 64, decode=True, gradients=True)
    monkeypatch.setattr(check_calls, "trials", lambda device: map(check_calls.Trial, [kind]))
    assert check_calls.check(CPU, lines.append) == 0
    assert [line.split("backward")[1].split()[0] for line in lines if " queries, " in line] == ["native"]


def test_a_lost_context_ends_the_check_with_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    def lost(call: Any, *args: Any, **named: Any) -> Any:
        monkeypatch.setattr(check_calls, "is_lost", lambda device: True)
        monkeypatch.setattr(self_check, "on_device", lambda *args: pytest.fail("used the device"))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cpu, "forward", lost)
    monkeypatch.setattr(triton, "why_not_tensors", lambda *args: None)
    kinds = [self_check.Kind("", CPU, torch.float32, 64, False, False)] * 2
    monkeypatch.setattr(check_calls, "trials", lambda device: map(check_calls.Trial, kinds))
    assert check_calls.check(CPU, lines.append) == 1
    assert any("the CUDA context is lost: nothing after it was run" in line for line in lines)
    assert "1 calls in" in lines[-1]


def test_only_some_head_widths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "cpu", "--widths", "16,32"]) == 0
    assert {x for line in capsys.readouterr().out.splitlines() for x in re.findall(r", D (\d+), ", line)} == {
        "16",
        "32",
    }


def test_says_on_a_gpu_what_a_small_case_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that counts as one, where the kernels agree, raise, or memory is full."""
    monkeypatch.setattr(self_check, "can_run_now", lambda device: True)

    def says(forward: Any) -> str:
        COMPARED.replace(monkeypatch, {})
        monkeypatch.setattr(cpu, "forward", forward)
        return next(line for line in diagnosis.report().splitlines() if line.startswith("  native"))

    def fails(error: Exception) -> Any:
        def forward(*args: Any, **named: Any) -> None:
            raise error

        return forward

    assert "works for float32, bfloat16; a small case agrees with the reference, " in says(cpu.forward)
    assert "; but it is left out: its first call raised RuntimeError: no compiler." in says(
        fails(RuntimeError("no compiler"))
    )
    assert "backend=None takes reference" in diagnosis.report()
    assert "could not be tried: OutOfMemoryError: " in says(fails(torch.OutOfMemoryError("CUDA out of memory")))
    monkeypatch.setenv(self_check.SETTING, "off")
    assert "; not tried, as TXL_KERNELS_SELF_CHECK=off" in diagnosis.report()


def test_reference_imports_and_runs_without_triton_and_native_modules() -> None:
    code = """
import sys
sys.modules["triton"] = sys.modules["txl_kernels._native"] = None
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
    is asked for them. The counter of operations, once imported by whoever counts, knows the
    operators."""
    code = """
import sys, torch, warnings
slow = ("torch._dynamo", "torch._inductor", "torch.utils.flop_counter", "triton", "matplotlib")
loaded = {name for name in slow if name in sys.modules}  # by torch itself
import txl.commands.cli, txl_kernels
q, r, u = torch.randn(1, 1, 3, 4, requires_grad=True), torch.randn(1, 3, 4), torch.zeros(1, 4)
txl_kernels.rel_attention(q, q, q, r, u, u)
warnings.simplefilter("ignore")
txl_kernels.rel_attention(*(x.detach().half() for x in (q, q, q, r)))
txl_kernels.available_backends("cpu", torch.float32)
print(sorted(name for name in slow if name in sys.modules and name not in loaded))
import torch.utils.flop_counter as counter
assert torch.ops.txl_kernels.rel_attention in counter.flop_registry
assert torch.ops.txl_kernels.rel_attention_backward in counter.flop_registry
assert type(counter.__loader__).__module__ != "txl_kernels.flops"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
