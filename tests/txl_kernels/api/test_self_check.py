"""What the first call on a GPU finds out: faults planted in kernels are seen, and who is told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Case, as_call, as_fields, make_inputs
from ptx_marks import RUNS_TRITONS_PTX

from txl_kernels import backends, operators, rel_attention
from txl_kernels.backends import cpu, self_check, triton
from txl_kernels.backends.self_check import Kind, compare

CPU = torch.device("cpu")
KINDS = [(few, gradients) for few in (False, True) for gradients in (False, True)]
FORWARD_AND_BOTH = [(True, False), (False, True)]  # of few queries, of many
needs_native = pytest.mark.skipif(cpu.native.module is None, reason="needs the C++ module")


@pytest.fixture
def first_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a process, on a device that counts as a GPU."""
    monkeypatch.setattr(self_check, "can_run_now", lambda device: True)
    monkeypatch.setattr(self_check, "_machine", lambda device: ("a GPU",))
    monkeypatch.setattr(self_check, "_compared", {})
    monkeypatch.setattr(operators, "_known", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backends._warn_once.cache_clear()


def wrong_r(*given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Backward, with one number of r's gradient wrong by a tenth of its norm."""
    q, k, v, r, *rest = backward(*given, **named)
    r.view(-1)[5] += 0.1 * r.norm()
    return q, k, v, r, *rest


backward = cpu.backward


@needs_native
@pytest.mark.parametrize(("few", "gradients"), KINDS)
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_right_kernels_agree(dtype: torch.dtype, few: bool, gradients: bool) -> None:
    for width in (24, 64, 128):
        assert compare(cpu, Kind("native", CPU, dtype, width, few, gradients)) is None


@needs_native
@pytest.mark.usefixtures("first_call")
def test_a_wrong_gradient_is_said_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(Case(""), torch.float32)
    want = torch.autograd.grad(rel_attention(**as_call(inputs), backend="reference").sum(), [inputs["r"]])
    monkeypatch.setattr(cpu, "backward", wrong_r)
    with torch.no_grad():
        rel_attention(**as_call(inputs), backend="native")  # forward is right
    operators._known.clear()  # on a CPU a choice holds for all directions
    said = r"its gradient of r for a small case in float32 at head width \d+ is off by 0\.1 of its norm"
    with pytest.raises(RuntimeError, match=f"backend='native' cannot run: .*{said}"):
        rel_attention(**as_call(inputs), backend="native")
    with pytest.warns(RuntimeWarning, match=said):
        out = rel_attention(**as_call(inputs))
    (got,) = torch.autograd.grad(out.sum(), [inputs["r"]])
    torch.testing.assert_close(got, want[0])


@needs_native
@pytest.mark.usefixtures("first_call")
def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "backward", wrong_r)
    call = as_fields(make_inputs(Case(""), torch.float32))
    monkeypatch.setenv(self_check.SETTING, "off")
    assert backends.choose("native", call) == "native"
    monkeypatch.setenv(self_check.SETTING, "maybe")
    with pytest.raises(ValueError, match="TXL_KERNELS_SELF_CHECK must be on or off, got 'maybe'"):
        backends.choose("native", call)


@needs_native
@pytest.mark.usefixtures("first_call")
def test_what_agreed_is_remembered_where_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(self_check, "compare", lambda kernels, kind: ran.append(kind))
    call = as_fields(make_inputs(Case(""), torch.float32))

    def choose_anew() -> int:
        monkeypatch.setattr(self_check, "_compared", {})
        backends.choose("native", call)
        return len(ran)

    assert [choose_anew(), choose_anew()] == [1, 1]
    monkeypatch.setattr(self_check, "_machine", lambda device: ("another GPU",))
    assert choose_anew() == 2
    monkeypatch.setattr(self_check, "_sources", lambda: "other code")
    assert choose_anew() == 3


def test_nothing_is_compared_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "compare", lambda kernels, kind: pytest.fail("compared"))
    rel_attention(**as_call(make_inputs(Case(""), torch.float32)))


@pytest.mark.triton
@pytest.mark.parametrize(("few", "gradients"), FORWARD_AND_BOTH)
def test_a_fault_in_tritons_kernels(few: bool, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by Triton's interpreter: position scores of one distance too far."""
    if not triton.interpreted():
        pytest.skip("needs the interpreter")
    from txl_kernels.backends.triton import plan

    kind = Kind("triton", CPU, torch.float32, 16, few, gradients)
    assert compare(triton, kind) is None
    make_plan = plan.make_plan
    monkeypatch.setattr(
        "txl_kernels.backends.triton.passes.make_plan",
        lambda *given: (made := make_plan(*given))._replace(zero_row=made.zero_row - 1),
    )
    plan.forget()
    found = compare(triton, kind)
    plan.forget()
    assert found is not None
    assert "is off by" in found


@RUNS_TRITONS_PTX[0]
@RUNS_TRITONS_PTX[1]
@RUNS_TRITONS_PTX[2]
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_queries_kernel", "backward_keys_kernel"])
def test_a_fault_in_what_triton_compiles(kernel: str) -> None:
    """Run from PTX for sm_90: e to the power of a score, forgotten in one kernel."""
    from ptx.triton_launch import executed

    kind = Kind("triton", CPU, torch.bfloat16, 64, False, True)
    with executed(90):
        assert compare(triton, kind) is None

    def plant(name: str, ptx: str) -> str:
        assert name != kernel or "ex2.approx.ftz.f32" in ptx
        return ptx.replace("ex2.approx.ftz.f32", "mov.f32") if name == kernel else ptx

    with executed(90, change=plant):
        found = compare(triton, kind)
    assert found is not None
