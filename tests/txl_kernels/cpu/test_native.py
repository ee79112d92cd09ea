"""The C++ backend: every instruction set, threads, determinism, fork, concurrent calls."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TILES, Case, as_call, as_fields, in_float64, make_inputs
from oracle import attend, gradients, matches_the_reference
from processes import run_python

from txl_kernels import prepare, rel_attention
from txl_kernels.backends import cpu, native_modules

ISAS = cpu.native.module.isas(True)
CASE = TILES[0]


@contextlib.contextmanager
def forced(isa: str) -> Iterator[None]:
    """A context of one instruction set, which an error names."""
    cpu.native.module.force_isa(isa)
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{isa}: {error}") from error
    finally:
        cpu.native.module.force_isa("")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced(request.param):
        yield request.param


def run(case: Case = CASE, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    inputs = make_inputs(case, dtype)
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="native")
    return [out, lse, *gradients(out, lse, inputs).values()]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", TILES, ids=str)
def test_every_isa_matches_the_reference(case: Case, dtype: torch.dtype) -> None:
    for isa in ISAS:
        with forced(isa):
            assert cpu.native.module.isa() == isa
            matches_the_reference(case, dtype, "native", minimum=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("queries", range(5, 18))
def test_every_isa_with_any_number_of_queries(queries: int, dtype: torch.dtype) -> None:
    """The last strip of queries and the last panel of keys are not full."""
    for case in (
        Case(B=1, H=1, L=queries, M=0, D=9),
        Case(B=1, H=2, L=queries, M=queries % 5 * 11, D=16),
        Case(B=1, H=4, Hkv=2, L=queries, M=29, D=33, Dv=20, Dp=5, T=9, outside="zero", r_bias="H T"),
        Case(B=2, H=1, L=queries + 40, M=7, D=16, causal=False, window=(6, 3), dropout_p=0.2),
    ):
        for name in ISAS:
            with forced(name):
                matches_the_reference(case, dtype, "native", minimum=0.0)


def test_instruction_sets_of_this_processor() -> None:
    assert "baseline" in ISAS
    if os.environ.get("TESTS_REQUIRE_TOOLS") == "1":  # an install of `make`
        assert {"emulated_bf16", "emulated_amx"} <= set(ISAS)
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    assert ("avx512_bf16" in ISAS) == (" avx512_bf16 " in flags)
    assert ("amx" in ISAS) == (" amx_bf16 " in flags)
    chosen = cpu.native.module.isa()
    assert not chosen.startswith("emulated")
    assert ("avx2" in ISAS) == (" avx2 " in flags and " fma " in flags)
    if "avx512_bf16" in ISAS and "amx" not in ISAS:
        assert chosen == ("avx512_bf16" if "AuthenticAMD" in flags else "avx512")


@pytest.mark.slow
def test_environment_forces_an_isa() -> None:
    code = "from txl_kernels.backends import cpu; print(cpu.module().isa())"
    assert run_python(code, TXL_KERNELS_ISA="baseline") == "baseline"
    with pytest.raises(AssertionError, match="TXL_KERNELS_ISA=mmx is not known; this build has"):
        run_python(code, TXL_KERNELS_ISA="mmx")


@pytest.mark.slow
@pytest.mark.skipif("amx" not in ISAS, reason="needs AMX")
def test_amx_without_permission_is_reported() -> None:
    """A signal stack too small for AMX's registers makes Linux refuse them."""
    code = """
import ctypes, mmap
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = mmap.mmap(-1, 8192)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(at, 0, 8192)), None) == 0
from txl_kernels.diagnosis import report
print(report())
"""
    assert "the system does not let this process use amx: " in run_python(code)
    with pytest.raises(AssertionError, match="ISA=amx: the system does"):
        run_python(code, TXL_KERNELS_ISA="amx")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "case",
    [CASE, Case("parts of keys", B=1, H=1, L=300, M=1500, D=16), Case("decode", B=1, H=1, L=2, M=3000), *TILES[-5:]],
    ids=str,
)
def test_same_bits_at_any_thread_count(case: Case) -> None:
    torch.set_num_threads(1)
    want = run(case)
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        torch.testing.assert_close(run(case), want, rtol=0, atol=0)


@pytest.fixture
def own_threads() -> Iterator[None]:
    cpu.module().set_openmp(0)
    yield
    cpu.module.cache_clear()
    cpu.module()


@pytest.mark.usefixtures("own_threads", "threads")
def test_own_threads_give_the_same_bits() -> None:
    assert cpu.native.module.threading() == "threads"
    torch.set_num_threads(3)
    got = run()
    cpu.module.cache_clear()
    assert cpu.module().threading() == "torch-openmp"
    torch.testing.assert_close(got, run(), rtol=0, atol=0)


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.usefixtures("own_threads")
def test_own_threads_are_reused() -> None:
    before = tasks()
    cpu.native.module.fma(1000, 9)  # more than any test has used
    started = tasks()
    assert started > before
    for count in (2, 9, 5):
        cpu.native.module.fma(1000, count)
        assert tasks() == started


@pytest.mark.parametrize("pool", ["torch's", "own"])
def test_several_python_threads_at_once(pool: str, request: pytest.FixtureRequest) -> None:
    if pool == "own":  # the first has them, the others run alone
        request.getfixturevalue("own_threads")
    want = run()
    results: list[list[torch.Tensor]] = []

    def work() -> None:
        results.extend(run() for _ in range(3))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 12
    assert all(torch.equal(a, b) for got in results for a, b in zip(got, want, strict=True))


def _forward_in_child(call: dict[str, Any], queue: "multiprocessing.Queue[bytes]") -> None:
    # Only the kernel: torch's own parallel loops hang in a forked child.
    out = rel_attention(**call, backend="native")
    cpu.native.module.fma(1000, 3)
    own = len(tasks())  # before the queue starts one
    queue.put(out.numpy().tobytes() if own >= 3 else f"{own} threads".encode())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("pool", ["torch's", "own"])
def test_fork_after_use(pool: str, request: pytest.FixtureRequest) -> None:
    if pool == "own":
        request.getfixturevalue("own_threads")
    with torch.no_grad():
        call = as_call(make_inputs(CASE, torch.float32))
        want = rel_attention(**call, backend="native")
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_forward_in_child, args=(call, queue))
        child.start()
        assert queue.get(timeout=60) == want.numpy().tobytes()
        child.join(10)
        assert child.exitcode == 0


def test_fork_before_use() -> None:
    """The parent has used torch's pool, but no kernel. The child must not wait for that pool."""
    code = """
import multiprocessing, torch
import txl_kernels
assert torch.get_num_threads() == 2
torch.nn.functional.relu(torch.randn(4_000_000)).sum()
q, r, u = torch.randn(2, 4, 64, 32), torch.randn(4, 64, 32), torch.zeros(4, 32)

def work(queue):
    out = txl_kernels.rel_attention(q, q, q, r, u, u, backend="native")
    queue.put(out.numpy().tobytes())

context = multiprocessing.get_context("fork")
queue = context.Queue()
child = context.Process(target=work, args=(queue,))
child.start()
try:
    got = queue.get(timeout=30)
finally:
    child.kill()
assert got == txl_kernels.rel_attention(q, q, q, r, u, u, backend="native").numpy().tobytes()
"""
    run_python(code, OMP_NUM_THREADS="2")


def compare_with_float64(x: dict[str, Any], atol: float, lse_rtol: float = 2e-6) -> None:
    results = [attend(x, backend="native"), attend(in_float64(x), backend="reference")]
    for (got, want), tolerance in zip(zip(*results, strict=True), ((0, atol), (lse_rtol, 1e-5)), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("length", [1, 7])
def test_scores_that_overflow_to_minus_infinity(length: int) -> None:
    """Whole tiles and parts of them, before keys whose scores are finite."""
    x = make_inputs(Case(B=1, H=1, L=length, M=2000), torch.float32)
    with torch.no_grad():
        x["q"].fill_(1e10)
        for name in ("k", "k_mem", "r", "content_bias", "position_bias"):
            x[name].zero_()
        x["k_mem"][:, :, :1400] = -1e30
    compare_with_float64(x, 1e-6)


def test_exp(isa: str) -> None:
    """The relative error is at most 2^-23 (1 + |x|), as rounding x * log2(e) leaves it."""
    x = torch.cat([torch.linspace(-87, 0, 1_000_001), torch.linspace(-1, 1, 100_001)])
    y = torch.empty_like(x)
    cpu.native.module.exp(x.data_ptr(), y.data_ptr(), x.numel())
    exact = x.double().exp()
    assert float(((y / exact - 1).abs() / (1 + x.abs())).max()) <= 2**-23, isa
    x = torch.tensor([-torch.inf, -1e30, -88.5, torch.nan, 0.0])
    y = torch.empty_like(x)
    cpu.native.module.exp(x.data_ptr(), y.data_ptr(), x.numel())
    assert y.tolist()[:3] == [0, 0, 0]
    assert y[3].isnan()
    assert y[4] == 1


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("height", [13.0, 15.0, 60.0, 300.0])
def test_scores_far_above_the_first_ones(height: float, dtype: torch.dtype) -> None:
    """In other tiles, rows and lanes: weights are rescaled where a score is more than 14 higher."""
    x = make_inputs(Case(B=1, L=40, M=600, D=16), dtype)
    with torch.no_grad():
        x["q"][..., 0] = 1
        x["k_mem"][..., 0] = x["k"][..., 0] = 0
        x["content_bias"].zero_()
        x["position_bias"].zero_()
        for n, key in enumerate((5, 33, 191, 192, 400, 599)):
            x["k_mem"][0, n % 2, key, 0] = height * 4 * (1 + n / 8)  # its score for every query, rising from key to key
    if dtype == torch.float32:
        compare_with_float64(x, 2e-5)
    else:
        compare_with_float64(x, 0.05, 0.02)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
def test_tensors_without_strides_have_no_metadata() -> None:
    eye = torch.eye(3)
    tensors = [eye.to_sparse(), eye.to_sparse_csr(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
    tensors += [eye.to_mkldnn()] if torch.backends.mkldnn.is_available() else []
    assert [cpu.native.module.tensor_metadata(x) for x in tensors] == [None] * len(tensors)


@pytest.mark.parametrize("backward", [False, True])
def test_torch_without_the_c_functions(backward: bool) -> None:
    """Python reads the tensors, and calls take the dispatcher: the same bits."""
    module = cpu.native.module
    inputs = make_inputs(Case(L=9, M=7, layout="lbhd", intervals="filled", dropout_p=0.2), torch.float32)

    def run() -> list[torch.Tensor]:
        with torch.set_grad_enabled(backward):
            out, lse = attend(inputs, backend="native")
        return [out, *(gradients(out, lse, inputs).values() if backward else ())]

    want = run()
    try:
        module.set_torch_functions([0] * len(module.TORCH_FUNCTIONS))
        assert module.tensor_metadata(inputs["q"]) is None
        assert prepare.signature(as_fields(inputs)) is None
        got = run()
    finally:
        native_modules.connect(module)
    assert module.tensor_metadata(inputs["q"]) is not None
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_wrong_c_functions_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them exchanged: their results differ from Python's."""
    module = cpu.native.module
    real = native_modules.address_of
    swapped = {"aoti_torch_get_sizes": "aoti_torch_get_strides", "aoti_torch_get_strides": "aoti_torch_get_sizes"}
    try:
        with monkeypatch.context() as patch:
            patch.setattr(native_modules, "address_of", lambda name: real(swapped.get(name, name)))
            native_modules.connect(module)
        assert module.tensor_metadata(torch.ones(2, 3)) is None
    finally:
        native_modules.connect(module)
    assert module.tensor_metadata(torch.ones(2, 3)) is not None


# The beginning of a program: `plan.forward(call, out, lse, threads, seed)` then calls the module.
ONE_PLAN = """
import sys, torch
sys.path.insert(0, "tests/support")
from cases import Case, as_fields, make_inputs
from txl_kernels.backends import cpu
call = as_fields(make_inputs(Case(B=1, H=4, L=256, M=0, D=64), torch.float32))
out, lse = torch.empty_like(call.q), torch.empty(1, 4, 256)
plan = cpu.make_plan(call, out)
"""


@pytest.mark.slow
def test_shutdown_while_threads_compute() -> None:
    """The interpreter ends although daemon threads are inside the kernel: no crash, no hang.

    Only the module is called: torch's own operators abort there ("terminate called without an
    active exception").
    """
    code = """
import threading, time
calls = []
def work():
    while True:
        plan.forward(call, out, lse, 2, 0)
        calls.append(1)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
while len(calls) < 3:
    time.sleep(0.01)
"""
    run_python(ONE_PLAN + code)


@pytest.mark.slow
def test_call_while_the_interpreter_ends() -> None:
    """A destructor calls on the thread that ends the interpreter, and must get the GIL back."""
    code = """
import os
class Late:
    def __del__(self, plan=plan, call=call, out=out, lse=lse, write=os.write, ending=sys.is_finalizing):
        plan.forward(call, out, lse, 2, 0)
        write(1, str(ending()).encode())
sys.late = Late()
"""
    assert run_python(ONE_PLAN + code) == "True"


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
@pytest.mark.parametrize("sizes", ["2048, 1024, True", "1, 400_000, False"], ids=["backward", "decode"])
def test_one_head_is_split_over_threads(sizes: str) -> None:
    """Forward, backward and decode of one head: the other thread does a good part of the work."""
    code = f"""
import time, torch
from txl_kernels import rel_attention
torch.set_num_threads(2)
L, M, backward = {sizes}
q, k, v = (torch.randn(1, 1, L, 64, requires_grad=backward) for _ in range(3))
km, vm = torch.randn(2, 1, 1, M, 64)
r, u = torch.randn(1, M + L, 64), torch.zeros(1, 64)
shares = []
for _ in range(5):
    own, everyone = time.thread_time(), time.process_time()
    out = rel_attention(q, k, v, r, u, u, (km, vm), backend="native")
    if backward:
        out.sum().backward()
    shares.append((time.thread_time() - own) / (time.process_time() - everyone))
print(min(shares))
"""
    assert float(run_python(code, OMP_WAIT_POLICY="passive")) < 0.75  # waiting takes no processor time


@pytest.mark.slow
def test_memory_grows_linearly() -> None:
    """L = M = 8192 with one head: scores alone would be 512 MiB."""
    code = """
import re, torch
from txl_kernels import rel_attention
L = 8192
q, k, v, km, vm = (torch.randn(1, 1, L, 32, requires_grad=True) for _ in range(5))
r, u = torch.randn(1, 2 * L, 32, requires_grad=True), torch.zeros(1, 32)
small = rel_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], r, u, u, backend="native").sum().backward()
def peak():
    return int(re.search("VmHWM:\\s*([0-9]+) kB", open("/proc/self/status").read())[1]) / 1024
before = peak()
rel_attention(q, k, v, r, u, u, (km, vm), backend="native").sum().backward()
print(peak() - before)
"""
    assert float(run_python(code)) < 160, "MiB"
