"""The self-check of the first call on a GPU: faults planted in kernels are found and reported."""

import contextlib
import errno
import re
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case, as_call, as_fields, make_inputs
from internals import COMPARED, PREPARED_CALLS, WARN_ONCE
from ptx_marks import RUNS_TRITONS_PTX
from torch.utils.flop_counter import FlopCounterMode

from txl_kernels import backends, rel_attention
from txl_kernels.backends import cpu, cuda, self_check, triton
from txl_kernels.backends.self_check import Kind, compare
from txl_kernels.call import OPTIONS

CPU = torch.device("cpu")
KINDS = [(decode, gradients) for decode in (False, True) for gradients in (False, True)]
FORWARD_AND_BOTH = [(True, False), (False, True)]  # of decode, of prefill
needs_native = pytest.mark.skipif(cpu.native.module is None, reason="needs the C++ module")


@pytest.fixture
def first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a process, on a device that counts as a GPU."""
    monkeypatch.setattr(self_check, "can_run_now", lambda device: True)
    properties = SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    COMPARED.replace(monkeypatch, {})
    PREPARED_CALLS.replace(monkeypatch, {})
    WARN_ONCE.value.cache_clear()


@pytest.fixture
def only_triton(first_call: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which only Triton's kernels can run, which are replaced by those of the CPU."""
    for kernels, reason in ((cpu, "not here"), (cuda, "not here"), (triton, None)):
        monkeypatch.setattr(kernels, "why_not_tensors", lambda *args, reason=reason: reason)
    monkeypatch.setattr(triton, "forward", cpu.forward)
    monkeypatch.setattr(triton, "backward", cpu.backward)


def raising(error: BaseException, calls: list[int] | None = None) -> Callable[..., Any]:
    def forward(*given: Any, **named: Any) -> Any:
        if calls is not None:
            calls.append(1)
        raise error

    return forward


def wrong_r(*given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Backward, with one number of r's gradient wrong by a tenth of its norm."""
    q, k, v, r, *rest = backward(*given, **named)
    r.view(-1)[5] += 0.1 * r.norm()
    return q, k, v, r, *rest


backward = cpu.backward


@needs_native
@pytest.mark.parametrize(("decode", "gradients"), KINDS)
@pytest.mark.parametrize("dtype", cpu.LIMITS.dtypes, ids=str)
def test_right_kernels_agree(dtype: torch.dtype, decode: bool, gradients: bool) -> None:
    for width in (24, 64, 128):
        assert compare(cpu, Kind("native", CPU, dtype, width, decode, gradients)) is None


@needs_native
@pytest.mark.usefixtures("first_call")
def test_wrong_gradient_is_reported_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(Case(""), torch.float32)
    want = torch.autograd.grad(rel_attention(**as_call(inputs), backend="reference").sum(), [inputs["r"]])
    monkeypatch.setattr(cpu, "backward", wrong_r)
    with torch.no_grad():
        rel_attention(**as_call(inputs), backend="native")  # forward is right
    PREPARED_CALLS.value.clear()  # on a CPU a choice holds for all directions
    said = r"its gradient of r for a small case in float32 at head width \d+ is off by 0\.1 of its norm"
    with pytest.raises(RuntimeError, match=f"backend='native' cannot run: .*{said}"):
        rel_attention(**as_call(inputs), backend="native")
    with pytest.warns(RuntimeWarning, match=said):
        out = rel_attention(**as_call(inputs))
    (got,) = torch.autograd.grad(out.sum(), [inputs["r"]])
    torch.testing.assert_close(got, want[0])


@needs_native
@pytest.mark.usefixtures("first_call")
def test_self_check_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "backward", wrong_r)
    call = as_fields(make_inputs(Case(""), torch.float32))
    monkeypatch.setenv(self_check.SETTING, "off")
    assert backends.choose("native", call) == "native"
    monkeypatch.setenv(self_check.SETTING, "maybe")
    with pytest.raises(ValueError, match="TXL_KERNELS_SELF_CHECK must be on or off, got 'maybe'"):
        backends.choose("native", call)


@needs_native
@pytest.mark.usefixtures("only_triton")
@pytest.mark.parametrize("seconds", [0, 0.5])
def test_long_check_is_logged(
    seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_check, "LOG_AFTER", 0.1)
    monkeypatch.setattr(self_check, "compare", lambda kernels, kind: time.sleep(seconds))
    rel_attention(**as_call(make_inputs(Case(""), torch.float32)))
    logged = [x.getMessage() for x in caplog.records if x.name == "txl_kernels"]
    assert len(logged) == (seconds > 0)
    assert all("the first triton call of this dtype, head width and direction on cpu compiles" in x for x in logged)


@needs_native
@pytest.mark.usefixtures("only_triton")
def test_check_runs_without_a_thread_for_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check.threading.Timer, "start", raising(RuntimeError("can't start new thread")))
    assert backends.choose(None, as_fields(make_inputs(Case(""), torch.float32))) == "triton"


def test_nothing_is_compared_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "compare", lambda kernels, kind: pytest.fail("compared"))
    rel_attention(**as_call(make_inputs(Case(""), torch.float32)))


@pytest.mark.triton
@pytest.mark.parametrize(("decode", "gradients"), FORWARD_AND_BOTH)
def test_fault_in_tritons_kernels(decode: bool, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by Triton's interpreter: position scores of one distance too far."""
    if not triton.interpreted():
        pytest.skip("needs the interpreter")
    from txl_kernels.backends.triton import plan

    kind = Kind("triton", CPU, torch.float32, 16, decode, gradients)
    assert compare(triton, kind) is None
    make_plan = plan.make_plan
    monkeypatch.setattr(
        "txl_kernels.backends.triton.passes.make_plan",
        lambda *given: (made := make_plan(*given))._replace(zero_row=made.zero_row - 1),
    )
    plan.clear_layouts()
    found = compare(triton, kind)
    plan.clear_layouts()
    assert found is not None
    assert "is off by" in found


@RUNS_TRITONS_PTX[0]
@RUNS_TRITONS_PTX[1]
@RUNS_TRITONS_PTX[2]
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_queries_kernel", "backward_keys_kernel"])
def test_fault_in_tritons_ptx(kernel: str) -> None:
    """Run from PTX for sm_90: e to the power of a score, forgotten in one kernel.

    The executor may also stop at a consequence: threads that store the same NaN hold different bits
    of it on some processors, which it takes for a race.
    """
    from ptx.faults import Fault
    from ptx.triton_launch import executed

    kind = Kind("triton", CPU, torch.bfloat16, 64, False, True)
    with executed(90):
        assert compare(triton, kind) is None

    def plant(name: str, ptx: str) -> str:
        assert name != kernel or "ex2.approx.ftz.f32" in ptx
        return ptx.replace("ex2.approx.ftz.f32", "mov.f32") if name == kernel else ptx

    found: str | None = None
    with executed(90, change=plant):
        try:
            found = compare(triton, kind)
        except Fault as fault:
            found = str(fault)
    assert found is not None


COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.")


FAILURES = {
    "no C compiler": (COMPILER, "a C compiler and Python's headers|a C compiler .*gcc|Python's headers"),
    "no Python.h": (subprocess.CalledProcessError(1, ["/bin/gcc", "/tmp/tmp8s2/main.c"]), "/bin/gcc ended with exit"),
    "no gcc after all": (FileNotFoundError(errno.ENOENT, "No such file or directory", "gcc-99"), "gcc-99"),
    "architecture": (RuntimeError("ptxas fatal: Value 'sm_130' is not defined for option 'gpu-name'"), "newer torch"),
    "no space": (OSError(errno.ENOSPC, "No space left on device", "/root/.triton/tmp.pid_7"), "TRITON_CACHE_DIR"),
    "a broken Triton": (ImportError("libtriton.so: undefined symbol"), "undefined symbol"),
    "an assertion": (AssertionError("libcuda.so cannot found!"), "NVIDIA driver"),
    "no HIP": (RuntimeError("cannot open libamdhip64.so"), "part of ROCm"),
}  # fmt: skip


@needs_native
@pytest.mark.usefixtures("only_triton")
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.filterwarnings("always")
def test_error_of_the_first_call_is_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """One warning for all kinds of calls, and the reference's results; by name an error."""
    error, said = FAILURES[name]
    monkeypatch.setattr(triton, "forward", raising(error))
    inputs = make_inputs(Case(""), torch.float32)
    want = rel_attention(**as_call(inputs), backend="reference")
    for case in (Case(""), Case("", L=3), Case("", D=16), Case("", dropout_p=0.2)):
        rel_attention(**as_call(make_inputs(case, torch.float32)))
        with torch.no_grad():
            assert torch.equal(rel_attention(**as_call(inputs)), want)
    (warning,) = recwarn
    assert re.search(f"backend='triton' is left out: .*{type(error).__name__}.*({said})", str(warning.message))
    assert warning.filename == __file__
    with pytest.raises(RuntimeError, match=f"backend='triton' cannot run: .*{type(error).__name__}.*({said})"):
        rel_attention(**as_call(inputs), backend="triton")
    with pytest.raises(RuntimeError, match=said):
        torch.ops.txl_kernels.rel_attention(*as_fields(inputs), "triton")


@needs_native
@pytest.mark.usefixtures("only_triton")
def test_backward_alone_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "backward", raising(COMPILER))
    inputs = make_inputs(Case(""), torch.float32)
    want = torch.autograd.grad(rel_attention(**as_call(inputs), backend="reference").sum(), [inputs["r"]])
    with torch.no_grad():
        rel_attention(**as_call(inputs))  # without a warning
    with pytest.warns(RuntimeWarning, match="C compiler"):
        got = torch.autograd.grad(rel_attention(**as_call(inputs)).sum(), [inputs["r"]])
    torch.testing.assert_close(got, want)


PASSING = [
    KeyboardInterrupt(), SystemExit(3), MemoryError(), torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("Triton Error [CUDA]: out of memory"), RuntimeError("CUDA: out of memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("Triton Error [HIP]:  Code: 2, Messsage: out of memory"), torch.OutOfMemoryError("HIP out of memory."),
    RuntimeError("HIP error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"), RuntimeError("CUDA: unspecified launch failure"),
    getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: unspecified launch failure"),
]  # fmt: skip


@needs_native
@pytest.mark.usefixtures("only_triton")
@pytest.mark.parametrize("error", PASSING, ids=lambda x: f"{type(x).__name__} {x}"[:40])
@pytest.mark.parametrize("asked", [None, "triton"])
def test_errors_unrelated_to_a_backend_are_raised_and_not_remembered(
    asked: str | None, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    inputs = make_inputs(Case(""), torch.float32)
    with torch.no_grad():
        want = rel_attention(**as_call(inputs), backend="reference")
        monkeypatch.setattr(triton, "forward", raising(error, calls))
        for n in (1, 2):
            with pytest.raises(type(error)) as raised:
                rel_attention(**as_call(inputs), backend=asked)
            assert (raised.value is error, len(calls)) == (True, n)
        monkeypatch.setattr(triton, "forward", cpu.forward)
        got = rel_attention(**as_call(inputs), backend=asked)
    assert not torch.equal(got, want)  # the kernels', not the reference's
    torch.testing.assert_close(got, want)


@needs_native
@pytest.mark.usefixtures("only_triton")
def test_lost_context_is_transient(monkeypatch: pytest.MonkeyPatch) -> None:
    from txl_kernels.backends.failures import is_transient

    gpu, error = torch.device("cuda", 0), RuntimeError("Triton Error [CUDA]: some new name")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not is_transient(error, gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", raising(RuntimeError("CUDA error: an illegal memory access")))
    assert is_transient(error, gpu)


VARIANTS: dict[str, dict[str, Any]] = {
    "values of another width": {"value_width": 40}, "bias beside r": {"terms": ("r", "r_bias")},
    "bias alone": {"terms": ("r_bias",)}, "dropout": {"options": ("dropout_p",)},
    "softcap": {"options": ("softcap",)},
    "start": {"terms": ("r", "start")}, "end": {"terms": ("r", "end")},
    "all": {"value_width": 8, "terms": ("r", "r_bias", "start", "end"), "options": ("dropout_p", "softcap")},
    "position queries": {"terms": ("r", "q_pos"), "position_width": 16}, "grouped heads": {"grouped": True},
    "sink": {"terms": ("r", "sink")}, "own scale of a bias alone": {"terms": ("r_bias",), "options": ("position_scale",)},
    "distances outside": {"terms": ("r", "start"), "options": ("zero_outside",)},
    "as Inkling's": {"terms": ("r", "q_pos", "sink"), "position_width": 16, "options": ("zero_outside",), "grouped": True},
}  # fmt: skip


@needs_native
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_of_a_kernel_has_a_case(name: str) -> None:
    for decode in (False, True):
        kind = Kind("native", CPU, torch.float32, 24, decode, True, **VARIANTS[name])
        assert compare(cpu, kind) is None
        call = self_check.on_device(self_check.case_of(kind), kind)
        assert self_check.kind_of("native", call, True) == kind


@pytest.mark.parametrize("name", OPTIONS)
def test_every_optional_setting_has_a_case(name: str) -> None:
    kind = Kind("native", CPU, torch.float32, 24, False, False, options=(name,))
    assert self_check.kind_of("native", self_check.case_of(kind)).options == (name,)


@pytest.mark.triton
def test_both_variants_of_forward_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys split among programs, as few rows have it, and not, as in training."""
    if not triton.interpreted():
        pytest.skip("needs the interpreter")
    from txl_kernels.backends.triton import passes, plan

    launched: list[bool] = []

    class Launch(passes.Launch):  # type: ignore[misc,name-defined]
        def __init__(self, function: Any, grid: Any, **arguments: Any) -> None:
            launched.extend([arguments["SPLIT"]] if "SPLIT" in arguments else [])
            super().__init__(function, grid, **arguments)

    monkeypatch.setattr(passes, "Launch", Launch)
    for decode in (False, True):
        plan.clear_layouts()
        launched.clear()
        assert compare(triton, Kind("triton", CPU, torch.float32, 16, decode, False)) is None
        assert launched == [True, False]
    plan.clear_layouts()


@needs_native
@pytest.mark.usefixtures("only_triton")
@pytest.mark.parametrize(("gradients", "dynamic"), [(False, True), (True, False)])
def test_first_call_of_a_compiled_model(gradients: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong kernels are found while torch.compile traces, and the reference is compiled instead."""
    torch.compiler.reset()
    wrong = lambda *a, **k: tuple(x + 1 if x is not None else x for x in cpu.forward(*a, **k))  # noqa: E731
    monkeypatch.setattr(triton, "forward", wrong)
    inputs = as_call(make_inputs(Case("", L=20, M=9), torch.float32))
    q = inputs["q"]
    with torch.set_grad_enabled(gradients):
        want = rel_attention(**inputs, backend="reference")
        compiled = torch.compile(lambda: rel_attention(**inputs), backend="eager", fullgraph=True, dynamic=dynamic)
        with pytest.warns(RuntimeWarning, match="its out for a small case in float32"):
            got = compiled()
    torch.testing.assert_close(got, want)
    if gradients:
        torch.testing.assert_close(*(torch.autograd.grad(x.sum(), q) for x in (got, want)))
    assert [kind.gradients for kind in COMPARED.value] == [gradients]


@needs_native
@pytest.mark.usefixtures("only_triton")
def test_full_memory_while_a_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the user's, and not remembered."""
    torch.compiler.reset()
    inputs = as_call(make_inputs(Case(""), torch.float32))
    compiled = torch.compile(lambda: rel_attention(**inputs), backend="eager", fullgraph=True)
    monkeypatch.setattr(triton, "forward", raising(torch.OutOfMemoryError("CUDA out of memory")))
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        compiled()
    assert not COMPARED.value
    monkeypatch.setattr(triton, "forward", cpu.forward)
    with torch.no_grad():
        torch.testing.assert_close(compiled(), rel_attention(**inputs, backend="reference"))


@needs_native
@pytest.mark.usefixtures("only_triton")
def test_first_call_of_an_exported_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was made elsewhere names its backend, so the call raises."""
    fields = as_fields(make_inputs(Case(""), torch.float32))
    monkeypatch.setattr(triton, "backward", wrong_r)
    out, lse = torch.ops.txl_kernels.rel_attention(*fields, "triton")
    assert len(COMPARED.value) == 1
    given = (torch.ones_like(out), None, out.detach(), lse.detach())
    with pytest.raises(RuntimeError, match="its gradient of r for a small case"):
        torch.ops.txl_kernels.rel_attention_backward(*given, *fields, "triton")


@needs_native
@pytest.mark.usefixtures("only_triton")
def test_modes_of_the_caller_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast, inference mode, transforms and a default device are the caller's."""
    inputs = as_call(make_inputs(Case(""), torch.float32))
    ran: list[Any] = []
    monkeypatch.setattr(self_check, "compare", lambda kernels, kind: ran.append(compare(kernels, kind)))

    def modes() -> list[contextlib.AbstractContextManager[Any]]:
        return [torch.autocast("cpu"), torch.inference_mode(), torch.device("meta"), FlopCounterMode(display=False)]

    for n, mode in enumerate(modes(), 1):
        COMPARED.value.clear()
        PREPARED_CALLS.value.clear()
        with mode:
            rel_attention(**inputs)
        assert ran == [None] * n
    PREPARED_CALLS.value.clear()
    COMPARED.value.clear()
    torch.func.grad(lambda q: rel_attention(**inputs | {"q": q}).sum())(inputs["q"].detach())
    assert ran == [None] * 5
