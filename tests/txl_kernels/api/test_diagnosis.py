"""`python -m txl_kernels`, and the package without some of its parts."""

import re
from typing import Any

import pytest
import torch
from internals import COMPARED
from processes import run_python

import txl_kernels
from txl_kernels import check_calls, diagnosis
from txl_kernels.__main__ import main
from txl_kernels.backends import cpu, cuda, self_check, triton

CPU = torch.device("cpu")


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    report, native = capsys.readouterr().out, "native     works for float32, bfloat16"
    assert all(words in report for words in (txl_kernels.__version__, torch.__version__, native, "instruction set"))


def test_check_makes_each_kind_of_call_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "cpu"]) == 0
    printed = capsys.readouterr().out
    _, calls = printed.split("\ncalls on cpu:\n")
    lines = [line for line in calls.splitlines() if re.search(r" quer(y|ies), ", line)]
    for width in (16, 32, 40, 41, 64, 80, 128, 256):
        text = "".join(line for line in lines if f"D {width}, " in line)
        found = re.findall(r"\d+ quer(?:y|ies), forward (?:and backward )?", text)
        assert {"1 query, forward ", "70 queries, forward ", "70 queries, forward and backward "} <= set(found)
    for words in ("float32", "float16", "dropout", "start and end", "window", "softcap", "bias instead of r"):
        assert any(words in line for line in lines), words
    assert all(re.search(r"(native|reference) +\d+\.\d+ s  error \d\.\de-0[2-7]$", line) for line in lines)
    assert "D 32, " in lines[-1]  # a call that may end the process is the last
    assert "0 failed" in printed.splitlines()[-1]
    assert "paste all of this into an issue" in printed


def test_check_reports_failed_calls_and_runs_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
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
    expected = "RuntimeError: out of resource: shared memory", "native: its out is off by", "3 calls in", "2 failed"
    assert all(words in text for words in expected)


def test_check_makes_only_supported_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA C++ kernels compute gradients of decode calls on Hopper alone."""
    lines: list[str] = []
    monkeypatch.setattr(cuda, "why_not_tensors", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    kind = self_check.Kind("", CPU, torch.bfloat16, 64, decode=True, gradients=True)
    monkeypatch.setattr(check_calls, "trials", lambda device: map(check_calls.Trial, [kind]))
    assert check_calls.check(CPU, lines.append) == 0
    assert [line.split("backward")[1].split()[0] for line in lines if " query, " in line] == ["native"]


def test_lost_context_ends_the_check_with_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_check_of_some_head_widths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "cpu", "--widths", "16,32"]) == 0
    assert set(re.findall(r", D (\d+), ", capsys.readouterr().out)) == {"16", "32"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu", "--widths", "16,96"], "--widths must be some of 16, 32, .*, got 96"),
        (["meta"], "--check needs a device that stores values, got meta"),
        (["cuda:99"], "--check needs a device that stores values, got cuda:99"),
    ],
)
def test_check_of_what_it_does_not_have_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        main(["--check", *arguments])


def test_report_of_the_self_check_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that agree, raise, or find the memory full, on a device that counts as a GPU."""
    monkeypatch.setattr(self_check, "can_run_now", lambda device: True)

    def reported(forward: Any) -> str:
        COMPARED.replace(monkeypatch, {})
        monkeypatch.setattr(cpu, "forward", forward)
        return next(line for line in diagnosis.report().splitlines() if line.startswith("  native"))

    def fails(error: Exception) -> Any:
        def forward(*args: Any, **named: Any) -> None:
            raise error

        return forward

    assert "works for float32, bfloat16; a small case agrees with the reference, " in reported(cpu.forward)
    assert "; but it is left out: its first call raised RuntimeError: no compiler." in reported(
        fails(RuntimeError("no compiler"))
    )
    assert "backend=None takes reference" in diagnosis.report()
    assert "could not be tried: OutOfMemoryError: " in reported(fails(torch.OutOfMemoryError("CUDA out of memory")))
    monkeypatch.setenv(self_check.SETTING, "off")
    assert "; not tried, as TXL_KERNELS_SELF_CHECK=off" in diagnosis.report()


def test_reference_runs_without_triton_and_native_modules() -> None:
    code = """
import sys
sys.modules["triton"] = sys.modules["txl_kernels._native"] = None
import torch, txl_kernels
q, r, u = torch.randn(1, 1, 3, 4), torch.randn(1, 3, 4), torch.zeros(1, 4)
print(txl_kernels.rel_attention(q, q, q, r, u, u, backend="reference").shape)
"""
    assert run_python(code) == "torch.Size([1, 1, 3, 4])"


@pytest.mark.slow
def test_slow_imports_are_deferred() -> None:
    """The compiler, Triton and matplotlib are imported at first use. The FLOP counter has the
    operators' formulas when it is imported."""
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
    assert run_python(code) == "[]"
