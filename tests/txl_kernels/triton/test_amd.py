"""AMD GPUs: which are taken, and how the Triton kernels are launched there, on a pretended one."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case, as_call, as_fields, make_inputs
from internals import COMPARED, PREPARED_CALLS, WARN_ONCE
from ptx_marks import RUNS_TRITONS_PTX

from txl_kernels import available_backends, diagnosis, rel_attention
from txl_kernels.backends import cpu, cuda, failures, protocol, route, self_check
from txl_kernels.backends import triton as backend
from txl_kernels.backends.limits import PREFILL
from txl_kernels.backends.triton import config

NEEDS_COMPILER = RUNS_TRITONS_PTX[1:]  # all but slow
GPU = torch.device("cuda", 0)
TAKEN = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1200", "gfx1201")


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A ROCm build of torch with one GPU, whose `gcnArchName` may be set. Its capability, which is
    that of another maker's GPU, must not be asked for."""
    gpu = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304, name="AMD Instinct MI300X")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: gpu.name)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=None: pytest.fail("asked for the capability")
    )
    monkeypatch.setattr(backend, "why_not_loaded", lambda: None)
    monkeypatch.setattr(backend, "version", lambda: "3.9.0")
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    monkeypatch.setattr(self_check, "can_run_now", lambda device: True)
    COMPARED.replace(monkeypatch, {})
    PREPARED_CALLS.replace(monkeypatch, {})
    WARN_ONCE.value.cache_clear()
    protocol.why_not_gpu.cache_clear()
    yield gpu
    protocol.why_not_gpu.cache_clear()


@pytest.mark.parametrize("suffix", ["", ":xnack-", ":sramecc+:xnack-"])
@pytest.mark.parametrize("name", TAKEN)
def test_architectures_that_are_taken(name: str, suffix: str, rocm: SimpleNamespace) -> None:
    rocm.gcnArchName = name + suffix
    for dtype in backend.LIMITS.dtypes:
        assert available_backends(GPU, dtype) == ["triton", "reference"]


@pytest.mark.parametrize("name", ["gfx906", "gfx908", "gfx1030", "gfx1036", "gfx1151", "gfx1250", "gfx90c", "gfx11000"])
def test_other_architectures_are_refused_by_name(name: str, rocm: SimpleNamespace) -> None:
    rocm.gcnArchName = f"{name}:xnack-"
    assert available_backends(GPU) == ["reference"]
    reason = backend.why_not_tensors(GPU, torch.bfloat16)
    assert reason == f"of AMD's GPUs it takes gfx90a, gfx942, gfx950, gfx110x and gfx120x, cuda:0 is a {name}"


def test_triton_3_6_is_refused(rocm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler ends the process at one of the kernels."""
    for version, taken in (("3.6.0+rocm7.1", False), ("3.7.0", True)):
        monkeypatch.setattr(backend, "version", lambda version=version: version)
        reason = backend.why_not_tensors(GPU, torch.bfloat16)
        assert (reason is None) == taken
        assert taken or reason == "gfx942 needs torch 2.12 or newer, which brings Triton 3.7; Triton 3.6 is installed"


def test_what_is_nvidias_is_refused_with_the_reason(rocm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in (None, "no module"):
        monkeypatch.setattr(cuda, "native", SimpleNamespace(why_not_loaded=loaded))
        assert "for NVIDIA GPUs, and this torch is built for ROCm" in str(cuda.why_not_tensors(GPU, torch.bfloat16))
    call = as_fields(make_inputs(Case(D=64), torch.bfloat16))
    assert route.why_not(call, PREFILL).text == "it needs a GPU of compute capability 9.0, this is gfx942"
    assert "not on cpu" in str(backend.why_not_tensors(torch.device("cpu"), torch.bfloat16))
    assert "ROCm devices" in str(backend.why_not_tensors(torch.device("cpu"), torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.why_not_tensors(GPU, torch.bfloat16) == "no ROCm device is available"


def test_advice_is_for_rocm(rocm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """PyPI's torch, and the Triton that an extra of this package names, are NVIDIA's."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    gone = ModuleNotFoundError("No module named 'triton'", name="triton")
    monkeypatch.setattr(backend, "version", lambda: (_ for _ in ()).throw(gone))
    backend.why_not_loaded.cache_clear()
    try:
        found = [str(backend.why_not_loaded())]
    finally:
        backend.why_not_loaded.cache_clear()
    found += [
        failures.reason_of(RuntimeError(x)) for x in ("unsupported target gfx942 arch", "cannot open libamdhip64.so")
    ]
    config.log_full_precision.cache_clear()
    with caplog.at_level(logging.WARNING, "txl_kernels"):
        config.log_full_precision()
    config.log_full_precision.cache_clear()
    found.append(caplog.text)
    for text, words in zip(
        found, ("torch's wheels for ROCm", "newer torch for ROCm", "/dev/kfd", "bfloat16"), strict=True
    ):
        assert words in text
        assert not any(x in text for x in ("pip install", "NVIDIA", "TF32", "--gpus"))


def test_report_says_that_nothing_has_run_there(rocm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "is_wanted", lambda: False)
    monkeypatch.setattr(diagnosis, "choose_unasked", lambda *given: "triton")
    text = diagnosis.report()
    assert "on cuda:0 (AMD Instinct MI300X, gfx942):" in text
    assert "have run on none yet" in text
    rocm.gcnArchName = "gfx1030"
    protocol.why_not_gpu.cache_clear()
    text = diagnosis.report()
    assert "cuda:0 is a gfx1030" in text
    assert "have run on none yet" not in text


@pytest.mark.skipif(cpu.native.module is None, reason="needs the C++ module")
def test_wrong_kernels_are_left_out_with_a_warning(rocm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that compile for the GPU and compute something else, on CPU tensors that count as the
    GPU's."""
    for kernels in (cuda, backend):
        why_not = kernels._why_not_device
        monkeypatch.setattr(kernels, "_why_not_device", lambda device, why_not=why_not: why_not(GPU))
    monkeypatch.setattr(cpu, "why_not_tensors", lambda *given: "not here")
    monkeypatch.setattr(backend, "forward", cpu.forward)
    case = make_inputs(Case(""), torch.float32)
    inputs = as_call(case)
    with torch.no_grad():
        want = rel_attention(**inputs, backend="reference")
        got = rel_attention(**inputs, backend="triton")
        assert not torch.equal(got, want)  # the kernels' own, which agree
        COMPARED.value.clear()
        PREPARED_CALLS.value.clear()
        monkeypatch.setattr(backend, "forward", lambda *given, **named: (2 * cpu.forward(*given, **named)[0], None))
        with pytest.warns(RuntimeWarning, match="backend='triton' is left out: its out for a small case in float32"):
            assert torch.equal(rel_attention(**inputs), want)
        with pytest.raises(RuntimeError, match="backend='triton' cannot run: its out"):
            rel_attention(**inputs, backend="triton")


@pytest.mark.parametrize("name", TAKEN)
def test_tables_have_all_tiles(name: str) -> None:
    for kind in ("half", "float32"):
        for kernel in config.KERNELS:
            for width in (16, *config.WIDTHS):
                for dropout in (False, True):
                    m, n, warps, stages = config.choose(kernel, name, kind, width, False, dropout)
                    assert m <= n
                    assert warps * (64 if name.startswith("gfx9") else 32) <= 1024
                    assert stages == 1


class TestLaunches:
    pytestmark = NEEDS_COMPILER

    @pytest.mark.parametrize("name", ["gfx942", "gfx1201"])
    def test_arguments(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """No descriptors, one accumulator, and products at full precision whatever torch's setting,
        since Triton has TF32 on one architecture alone."""
        from pretended_gpu import pretended_gpu
        from triton.runtime.jit import JITFunction

        found: dict[str, Any] = {}
        monkeypatch.setattr(JITFunction, "run", lambda function, *_, **named: found.update({function.__name__: named}))
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("high")
            with torch.no_grad(), pretended_gpu(name, 304):
                for dtype in (torch.float32, torch.bfloat16):
                    call = as_fields(make_inputs(Case(B=2, L=70, M=40, D=64), dtype))
                    out, lse = backend.forward(call)
                    backend.backward(call, out, lse, torch.zeros_like(out), None)
                    named = found["backward_queries_kernel"]
                    assert (named["PRECISION"], named["APART"], named["TMA"]) == ("ieee", False, False)
                    assert isinstance(named["K"], torch.Tensor)
                    kind = "half" if dtype == torch.bfloat16 else "float32"
                    tile = config.choose("backward_queries", name, kind, 64, False)
                    assert (named["BLOCK"], named["num_warps"]) == (tile.block_m, tile.warps)
        finally:
            torch.set_float32_matmul_precision(before)

    def test_every_call_is_launched_by_triton(self) -> None:
        """Nothing is kept: there Triton specializes on the size of a tensor's storage."""
        from pretended_gpu import launching

        kernels: list[Any] = []
        call = as_fields(make_inputs(Case(B=2, L=20, M=12, D=16), torch.bfloat16))
        with torch.no_grad(), launching("gfx942", lambda kernel, *given: kernels.append((kernel.name, given[9:])), 8):
            for _ in range(3):
                out, lse = backend.forward(call)
                backend.backward(call, out, lse, torch.zeros_like(out), None)
        assert [name for name, _ in kernels[: len(kernels) // 3]] * 3 == [name for name, _ in kernels]
        assert all(any(isinstance(x, torch.Tensor) for x in given) for _, given in kernels)

    @pytest.mark.parametrize("name", ["gfx942", "gfx1100"])
    def test_products_are_matrix_instructions(self, name: str) -> None:
        import machine_code

        variant = machine_code.Variant(machine_code.case("small", 16, B=1, H=1, L=20, M=9), decode=True)
        text = machine_code.compile_call(variant, name)["forward"].kernel.asm["amdgcn"]
        (loop, *_) = machine_code.inner_loops_amd(text)
        assert any(x.startswith("v_mfma" if name == "gfx942" else "v_wmma") for x in loop)
