"""The figures of tools/gpu_steps.py: `python tools/gpu_figures.py STEP --out FILE`, a line of JSON
for each figure, as soon as it exists. A figure that raises leaves a line with its error.

STEP: variants (errors: of --only one), queries, inkling, flex, conformer, or ncu, which watches
launches. --rehearse: tiny shapes on a CPU, which show that everything runs; its times mean nothing.
"""

import argparse
import contextlib
import copy
import csv
import functools
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_card import mhz_under
from gpu_kernels import FEW_QUERIES, GROUP, INKLING, Work, adopt_carried, arguments_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from txl_kernels import operators, rel_attention
from txl_kernels.backends import cuda, native_modules, triton
from txl_kernels.backends.protocol import Prepared
from txl_kernels.call import ALL, Call
from txl_kernels.checks import span

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ROOT / "gpu-kit/variants"
TODAY = "today"
SDPA = {"flash SDPA": SDPBackend.FLASH_ATTENTION, "cuDNN SDPA": SDPBackend.CUDNN_ATTENTION}
# Of the largest error of a variant, relative to the norm of a result in float64.
MAX_ERROR = 2e-2
ERRORS_LIMIT = 50  # seconds, for the errors of all variants

Run = Callable[[], Any]


class Session:
    """A step in progress: where its figures go, when it must end, and on what it runs."""

    def __init__(self, step: str, out: Path | None, seconds: float, rehearse: bool) -> None:
        self.step, self.out, self.rehearse = step, out, rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.end = time.monotonic() + seconds
        self.failed = False

    def figure(self, **fields: Any) -> None:
        line = json.dumps({"step": self.step} | fields, default=str)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(line + "\n")

    @contextlib.contextmanager
    def attempt(self, **fields: Any) -> Iterator[None]:
        """A context whose exception becomes a figure's error. Nothing of it stays on the device."""
        try:
            yield
        except Exception as error:
            self.failed = True
            self.figure(**fields, error=f"{type(error).__name__}: {error}"[:400])
        if self.device == "cuda":
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                torch.cuda.empty_cache()

    def is_over(self, **fields: Any) -> bool:
        """Whether the time is up; then a line says what was not reached."""
        if time.monotonic() < self.end:
            return False
        self.figure(**fields, error="not reached, the time is up")
        return True

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, run: Run, seconds: float = 0.3, maximum: int = 20) -> dict[str, float]:
        """Return the median, least and number of times of a call, by events around each."""
        run()
        self.synchronize()
        begun, found = time.monotonic(), []
        while len(found) < 3 or (len(found) < maximum and time.monotonic() < begun + seconds):
            found.append(self.once(run))
        return {"ms": round(statistics.median(found), 4), "min_ms": round(min(found), 4), "runs": len(found)}

    def once(self, run: Run) -> float:
        """Return the milliseconds of one call."""
        if self.device == "cpu":
            begun = time.perf_counter()
            run()
            return (time.perf_counter() - begun) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def peak_mib(self, run: Run) -> float:
        """Return the memory that a call allocates at its peak beyond what exists before."""
        if self.device == "cpu":
            run()
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)

    def captured(self, run: Run, calls: int) -> Run:
        """Return the replay of a CUDA graph of some calls."""
        if self.device == "cpu":
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        return graph.replay

    def mhz(self, run: Run, calls: int) -> int:
        return 0 if self.device == "cpu" else mhz_under(run, calls)

    def microseconds(self, run: Run, calls: int = 3) -> dict[str, float]:
        """Return the time of each kernel in a call, by the profiler."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device == "cuda")
        with profile(activities=activities) as found:
            for _ in range(calls):
                run()
            self.synchronize()
        total: Counter[str] = Counter()
        for event in found.events() or ():
            if event.device_type == DeviceType.CUDA:
                total[event.name] += event.time_range.elapsed_us() / calls
        return {name[:90]: round(us, 1) for name, us in total.items()}


# Variants of the CUDA C++ kernels.


def call_from(given: dict[str, Any]) -> Call:
    """Return the checked call that rel_attention would make of `arguments_of`."""
    q, memory = given["q"], given["memory"]
    left, right = span(True, given.get("window"))
    scale = q.size(-1) ** -0.5
    tables = (given["r"], given["content_bias"], given["position_bias"])
    inputs = (q, given["k"], given["v"], *tables, *memory, None, None, None)
    return Call(*inputs, given.get("start"), None, None, left, right, 0, scale, 0.0, 0.0, scale, False)


def names_in(folder: Path) -> list[str]:
    """Return the names of the variants in a folder, today's first."""
    return sorted({x.parent.name for x in folder.glob("*/_cuda*.so")}, key=lambda name: (name != TODAY, name))


def load_variant(folder: Path, name: str) -> Any:
    """Return a compiled module, under a name of its own."""
    file = next((folder / name).glob("_cuda*.so"))
    spec = importlib.util.spec_from_file_location(f"variant_{name}.{file.name.partition('.')[0]}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    native_modules.connect(module)
    if tuple(module.FIELDS) != Call._fields:
        raise RuntimeError(f"{file} was built for other fields of Call")
    return module


@contextlib.contextmanager
def using(module: Any) -> Iterator[None]:
    """A context in which the cuda backend takes another module; what was planned is forgotten."""
    before = cuda.native.module, cuda.native.why_not_loaded
    cuda.native.module, cuda.native.why_not_loaded = module, None
    operators._known.clear()
    try:
        yield
    finally:
        cuda.native.module, cuda.native.why_not_loaded = before
        operators._known.clear()


def bare(module: Any, call: Call, dout: Tensor | None) -> Run:
    """Return a function that makes a call by the backend itself, without autograd; both ways if
    dout is given."""
    prepared = Prepared()

    def run() -> Any:
        before, cuda.native.module = cuda.native.module, module
        try:
            out, lse = cuda.forward(call, prepared, need_lse=dout is not None)
            return out if dout is None else (out, *cuda.backward(call, out, lse, dout, None, ALL, prepared))
        finally:
            cuda.native.module = before

    return run


class Small(NamedTuple):
    """A call whose results are compared with float64."""

    L: int
    M: int
    D: int
    options: Mapping[str, Any] = MappingProxyType({})
    B: int = 2
    H: int = 2
    dtype: torch.dtype = torch.bfloat16


SMALL = [
    *(Small(n, m, d) for d in (64, 128) for n, m in ((128, 128), (70, 90), (512, 512), (200, 1001), (257, 0))),
    *(Small(150, 300, d, {"window": 100}) for d in (64, 128)),
    *(Small(150, 200, d, {"intervals": x}) for d in (64, 128) for x in ("episodes", "random", "filled")),
    Small(130, 70, 64, {"causal": False}), Small(130, 70, 128, {"causal": False}),
    Small(130, 70, 64, dtype=torch.float16), Small(130, 70, 128, dtype=torch.float16),
    Small(3, 700, 64), Small(16, 300, 128), Small(128, 512, 64, B=40), Small(128, 512, 128, B=40),
    Small(100, 60, 40), Small(100, 60, 96),
]  # fmt: skip


def errors_of(session: Session, small: Small) -> dict[str, float]:
    """Return the errors of out, lse and the gradients, each relative to its norm in float64."""
    from cases import TENSORS, Case, as_call, make_inputs

    case = Case("", B=small.B, H=small.H, L=small.L, M=small.M, D=small.D, **small.options)
    inputs = make_inputs(case, small.dtype)
    exact = {n: x.detach().double().requires_grad_() if n in TENSORS else x for n, x in inputs.items()}
    drawn = torch.Generator("cpu").manual_seed(1)
    dout = torch.randn(inputs["q"].shape, generator=drawn, device="cpu").to(inputs["q"])

    def results(x: dict[str, Any], backend: str) -> dict[str, Tensor]:
        out, lse = rel_attention(**as_call(x), return_lse=True, backend=backend)
        grads = torch.autograd.grad(out, [x[name] for name in TENSORS], dout.to(out))
        found = {"out": out.detach(), "lse": lse.detach().nan_to_num(neginf=0.0)}
        return found | {f"d{name}": dx for name, dx in zip(TENSORS, grads, strict=True) if dx.numel()}

    wanted, got = results(exact, "reference"), results(inputs, "cuda")
    session.synchronize()
    return {part: float((got[part].double() - x).norm() / x.norm().clamp(min=1e-30)) for part, x in wanted.items()}


def sdpa(work: Work, backend: Any, device: str) -> Run:
    """Return a function that runs torch's SDPA for L queries and M + L / 2 keys, without a mask:
    over as many pairs as the causal call has."""
    make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    q, *kv = (make(work.B, work.H, n, work.D) for n in (work.L, *2 * [work.M + work.L // 2]))
    dout = torch.randn_like(q)

    def run() -> Any:
        with sdpa_kernel(backend), torch.set_grad_enabled(work.backward):
            # New leaves each time: a leaf's gradient node belongs to the stream where it was made.
            leaves = [x.detach().requires_grad_(work.backward) for x in (q, *kv)]
            out = F.scaled_dot_product_attention(*leaves)
            return torch.autograd.grad(out, leaves, dout) if work.backward else out

    return run


TIMED = [
    *(Work(8, 16, n, n, d, backward=back) for n in (512, 2048) for d in (64, 128) for back in (False, True)),
    Work(1, 8, 128, 3800, 64, backward=False),
]  # fmt: skip


def errors(session: Session, folder: Path, name: str) -> None:
    """Errors of one variant against float64, in a process of its own: a variant may hang, or end
    the CUDA context."""
    module = load_variant(folder, name)
    torch.set_default_device(session.device)
    for small in SMALL[:2] if session.rehearse else SMALL:
        case = {**small._asdict(), "options": dict(small.options), "dtype": str(small.dtype)}
        where = {"what": "error", "variant": name, "case": case}
        if session.is_over(**where):
            break
        with session.attempt(**where), using(module):
            found = errors_of(session, small)
            right = all(x <= MAX_ERROR for x in found.values())
            session.figure(**where, right=right, errors={part: float(f"{x:.2e}") for part, x in found.items()})
            session.failed |= not right
    torch.set_default_device(None)
    session.synchronize()  # raises if the context is lost


def variants(session: Session, folder: Path) -> None:
    """Errors of each variant, then its times beside torch's SDPA in turns, then those of its
    kernels. A variant that hangs or loses the CUDA context is not timed."""
    modules = {}
    for name, (code, said) in in_processes(session, folder, names_in(folder)).items():
        if code in (0, 1):
            with session.attempt(what="load", variant=name):
                modules[name] = load_variant(folder, name)
        session.figure(what="variant", variant=name, right=code == 0, timed=name in modules, exit=code, end=said)
    tiny = [Work(1, 1, 64, 64, 64, backward=back) for back in (False, True)]
    timed = tiny if session.rehearse else TIMED
    for work in timed:
        if session.is_over(what="time", **sizes_of(work)):
            break
        with session.attempt(what="time", **sizes_of(work)):
            in_turns(session, work, modules)
    for work in (x for x in timed if x.backward):
        for name, run in ways_of(session, work, modules).items():
            if session.is_over(what="kernels", way=name, **sizes_of(work)):
                return
            with session.attempt(what="kernels", way=name, **sizes_of(work)):
                run()
                session.figure(what="kernels", way=name, us=session.microseconds(run), **sizes_of(work))


def in_processes(session: Session, folder: Path, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Run the step `errors` of all variants at once; return exit status (1: wrong; -9: ended at the
    limit) and last line of each."""
    limit = 600 if session.rehearse else ERRORS_LIMIT
    end, found = time.monotonic() + limit, {}
    command = [sys.executable, __file__, "errors", "--variants", str(folder), "--seconds", str(limit - 10)]
    command += ["--rehearse"] * session.rehearse + ([] if session.out is None else ["--out", str(session.out)])
    running = {}
    for name in names:
        running[name] = subprocess.Popen(
            [*command, "--only", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for name, process in running.items():
        try:
            said, _ = process.communicate(timeout=max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        print(said, flush=True)
        found[name] = process.returncode, (said.strip().splitlines() or [""])[-1][-300:]
    return found


def sizes_of(work: Work) -> dict[str, Any]:
    return {"B": work.B, "H": work.H, "L": work.L, "M": work.M, "D": work.D, "backward": work.backward}


def ways_of(session: Session, work: Work, modules: dict[str, Any]) -> dict[str, Run]:
    """Return the ways to compute a call: the variants, and torch's SDPA without positions."""
    with torch.no_grad():
        given = arguments_of(work._replace(backward=False), session.device)
        if session.rehearse:
            given = {n: x.normal_() if torch.is_tensor(x) else tuple(y.normal_() for y in x) for n, x in given.items()}
        call = call_from(given)
        dout = torch.randn_like(call.q) if work.backward else None
        found = {name: bare(module, call, dout) for name, module in modules.items()}
    others = {"SDPA": SDPBackend.MATH} if session.rehearse else SDPA
    return found | {name: sdpa(work, backend, session.device) for name, backend in others.items()}


ROUNDS = 7
GRAPH_MS = 4.0  # of one replay, about


def in_turns(session: Session, work: Work, modules: dict[str, Any]) -> None:
    """Yield the time of each way by replays of CUDA graphs, in turns, so that all see the same
    clocks."""
    replays: dict[str, tuple[Run, int]] = {}
    for name, run in ways_of(session, work, modules).items():
        with session.attempt(what="time", way=name, **sizes_of(work)):
            run()
            session.synchronize()
            session.once(run)
            calls = max(1, min(40, int(GRAPH_MS / session.once(run))))
            replays[name] = session.captured(run, calls), calls
            replays[name][0]()
            session.synchronize()
    times: dict[str, list[float]] = {name: [] for name in replays}
    for n in range(2 if session.rehearse else ROUNDS):
        names = list(replays)
        for name in names[n % len(names) :] + names[: n % len(names)]:
            replay, calls = replays[name]
            times[name].append(session.once(replay) * 1e3 / calls)
    for name, (replay, calls) in replays.items():
        us = {"us": round(statistics.median(times[name]), 2), "min_us": round(min(times[name]), 2)}
        mhz = session.mhz(replay, 10)
        session.figure(what="time", way=name, **us, calls_a_graph=calls, sm_mhz=mhz, **sizes_of(work))


# Short segments.


@contextlib.contextmanager
def prefill_of_few(wanted: bool) -> Iterator[None]:
    """A context in which the cuda backend takes the Hopper prefill kernels for up to 16 queries,
    too, if wanted. Plans of both kinds are forgotten."""
    before = cuda.make_plan
    operators._known.clear()
    if wanted:
        cuda.make_plan = cuda.prefill_plan
    try:
        yield
    finally:
        cuda.make_plan = before
        operators._known.clear()


def queries(session: Session) -> None:
    """Few queries: each kernel's time in a CUDA graph, and eager calls on the clock."""
    works = [FEW_QUERIES[1]._replace(M=100, H=2)] if session.rehearse else FEW_QUERIES
    for work in works:
        given = arguments_of(work, session.device)
        if session.rehearse:
            given = {n: torch.randn_like(x) if torch.is_tensor(x) else x for n, x in given.items()}
        for way, backend in (("decode", "cuda"), ("prefill", "cuda"), ("triton", "triton")):
            if session.is_over(what="time", way=way, **sizes_of(work)):
                return

            def run(backend: str = backend, given: dict[str, Any] = given) -> Tensor:
                with torch.no_grad():
                    return rel_attention(**given, backend=backend)

            with session.attempt(what="time", way=way, **sizes_of(work)), prefill_of_few(way == "prefill"):
                for _ in range(3):
                    run()
                session.synchronize()
                eager = []
                for _ in range(5):
                    begun, count = time.perf_counter(), 1 if session.rehearse else 100
                    for _ in range(count):
                        run()
                    session.synchronize()
                    eager.append((time.perf_counter() - begun) * 1e6 / count)
                replay = session.captured(run, 20)
                replay()
                graph = [session.once(replay) * 1e3 / 20 for _ in range(2 if session.rehearse else 9)]
                us = {"graph_us": round(statistics.median(graph), 2), "eager_us": round(statistics.median(eager), 2)}
                session.figure(what="time", way=way, **us, **sizes_of(work))
    dense_and_reference(session)


def dense_and_reference(session: Session) -> None:
    """The reference backend beside SDPA with a dense bias, forward."""
    from harness.case import Shape
    from implementations.attention import dense_bias_sdpa, fused, make_inputs

    shape = Shape(1, 2, 40, 40, 64) if session.rehearse else Shape(8, 16, 2048, 2048, 64)
    fields = {"what": "dense", **dict(zip("BHLMD", shape, strict=True))}
    x = {name: t.detach() for name, t in make_inputs(shape, torch.bfloat16, session.device).items()}
    ways = {"reference": functools.partial(fused, x, "reference"), "SDPA with dense bias": lambda: dense_bias_sdpa(x)}
    for way, run in ways.items():
        if session.is_over(way=way, **fields):
            return
        with session.attempt(way=way, **fields), torch.no_grad():
            found = session.milliseconds(run, 1.0, 10)
            session.figure(way=way, **found, peak_mib=session.peak_mib(run), **fields)


# Inkling's attention.

FLEX = "FlexAttention"


def both_ways(x: dict[str, Any], compute: Callable[[dict[str, Any]], Tensor], backward: bool) -> Run:
    """Return a function that computes forward, and the gradients of the tensors that need them."""
    leaves = [t for t in x.values() if torch.is_tensor(t) and t.requires_grad]
    dout = torch.randn_like(x["q"])

    def run() -> Any:
        with torch.set_grad_enabled(backward):
            out = compute(x)
            return torch.autograd.grad(out, leaves, dout, allow_unused=True) if backward else out

    return run


def _dense(x: dict[str, Any]) -> Tensor:
    """SDPA with the positional terms as a bias [B, H, L, L]."""
    length, rows = x["q"].size(2), x["r"].size(1)
    at = torch.arange(length, device=x["q"].device)
    d = at[:, None] - at
    hidden = d < 0 if x["window"] is None else (d < 0) | (d >= x["window"])
    profile = x["q_pos"] @ x["r"].mT
    bias = profile.gather(3, d.clamp(0, rows - 1).expand(*profile.shape[:2], -1, -1))
    bias = bias.masked_fill(d >= rows, 0.0).masked_fill(hidden, -torch.inf)
    k, v = (x[name].repeat_interleave(GROUP, 1) for name in "kv")
    return F.scaled_dot_product_attention(x["q"], k, v, bias)


def _plain(x: dict[str, Any], repeated: bool) -> Tensor:
    """cuDNN's causal attention without positions."""
    k, v = (x[name].repeat_interleave(GROUP, 1) if repeated else x[name] for name in "kv")
    backend = SDPBackend.MATH if x["q"].device.type == "cpu" else SDPBackend.CUDNN_ATTENTION
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(x["q"], k, v, is_causal=True, enable_gqa=not repeated)


def inkling(session: Session) -> None:
    """Inkling's attention on Triton, as SDPA with a dense bias, and cuDNN's without positions."""
    ours: Callable[[dict[str, Any]], Tensor] = lambda x: rel_attention(**x, backend=_ours(session))  # noqa: E731
    ways: dict[str, Callable[[dict[str, Any]], Tensor]] = {
        "ours, triton": ours,
        "cuDNN without positions, enable_gqa": functools.partial(_plain, repeated=False),
        "cuDNN without positions, keys repeated": functools.partial(_plain, repeated=True),
        "SDPA with dense bias": _dense,
    }
    _inkling(session, ways)


def _ours(session: Session) -> str:
    return "reference" if session.rehearse and not triton.interpreted() else "triton"


def _inkling(session: Session, ways: dict[str, Callable[[dict[str, Any]], Tensor]]) -> None:
    works = [x._replace(H=3, L=64, D=32, window=x.window and 20) for x in INKLING[:2]] if session.rehearse else INKLING
    for work in works:
        for way, compute in ways.items():
            if (way.startswith("cuDNN") and work.window) or ("dense" in way and work.L > 8192):
                continue
            for backward in (False, True)[: 1 if session.rehearse and way == FLEX else 2]:  # it has none on a CPU
                fields = {"way": way, "window": work.window, **sizes_of(work._replace(backward=backward))}
                if session.is_over(**fields):
                    return
                with session.attempt(**fields):
                    torch.manual_seed(0)
                    x = arguments_of(work, session.device)
                    if session.rehearse:
                        x = {
                            n: t.detach().normal_().requires_grad_() if torch.is_tensor(t) else t for n, t in x.items()
                        }
                    x.setdefault("window", None)
                    run = both_ways(x, compute, backward)
                    found = session.milliseconds(run, 0.5, 10)
                    session.figure(**found, peak_mib=session.peak_mib(run), **fields)
                run = x = None  # type: ignore[assignment]


def flex(session: Session) -> None:
    """Inkling's attention by FlexAttention, whose score_mod reads a dense profile [B, H, L, rows]
    of each query's positional terms by distance. Compiled for each shape and direction."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = flex_attention if session.rehearse else torch.compile(flex_attention, dynamic=False)

    @functools.cache
    def mask_of(length: int, window: int | None) -> Any:
        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) if window is None else (i >= j) & (i - j < window)

        return create_block_mask(seen, None, None, length, length, device=session.device, _compile=length > 8192)

    def compute(x: dict[str, Any]) -> Tensor:
        rows = x["r"].size(1)
        if session.rehearse:
            x = {n: t.detach() if torch.is_tensor(t) else t for n, t in x.items()}
        profile = x["q_pos"] @ x["r"].mT

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            d = i - j
            return score + torch.where(d < rows, profile[b, h, i, torch.clamp(d, 0, rows - 1)], 0.0)

        mask = mask_of(x["q"].size(2), x["window"])
        out = compiled(x["q"], x["k"], x["v"], score_mod=score_mod, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    _inkling(session, {FLEX: compute})


# A Conformer's layer.


class Rope(nn.Module):
    """A layer of attention with rotary positions by SDPA, with the projections of the Conformer's
    but the one of positions."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, size = heads, heads * width
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.register_buffer("rates", 10000.0 ** -(torch.arange(0, width, 2) / width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        angle = torch.arange(x.size(1), device=x.device)[:, None] * self.rates.float()
        cos, sin = (f(torch.cat([angle, angle], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        q, k = (y * cos + torch.cat([-y[..., y.size(-1) // 2 :], y[..., : y.size(-1) // 2]], -1) * sin for y in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def conformer(session: Session) -> None:
    """The attention layer of Parakeet's encoder, forward and backward: as transformers has it, on
    these kernels, and a layer of the same width with rotary positions."""
    import transformers
    from transformers.models.parakeet import modeling_parakeet as m

    from txl_kernels.integrations import peers, source_hash

    peer = next(x for x in peers() if x.name == "ParakeetEncoder")
    digest = source_hash(m.ParakeetEncoderAttention)
    known = {version: x for version, x in peer.hashes.items() if x == digest}
    session.figure(what="class", transformers=transformers.__version__, hash=digest, known=known)
    sizes = [(b, t) for b in (16, 64) for t in (250, 750, 1500)]
    for dtype in (torch.bfloat16, torch.float16):
        for width in (128, 64):
            for batch, frames in [(2, 30)] if session.rehearse else sizes:
                if session.is_over(D=width, B=batch, T=frames, dtype=str(dtype)):
                    return
                with session.attempt(D=width, B=batch, T=frames, dtype=str(dtype)):
                    _conformer(session, m, 8, width, batch, frames, dtype)


@functools.cache
def _layers(m: Any, heads: int, width: int) -> tuple[Any, nn.Module, nn.Module, nn.Module]:
    """Return a configuration, the layer of transformers, the same accelerated, and one with rotary
    positions, on the CPU. A layer of an unknown release is accelerated if it computes the same."""
    from txl_kernels.integrations import accelerate

    torch.manual_seed(0)
    config = m.ParakeetEncoderConfig(
        hidden_size=heads * width, num_attention_heads=heads, num_key_value_heads=heads, attention_dropout=0.0,
        attention_bias=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"  # the encoder's default
    theirs = m.ParakeetEncoderAttention(config, 0)
    for bias in (theirs.bias_u, theirs.bias_v):
        nn.init.normal_(bias, 0.0, 0.3)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours, verify=True)
    if not report.accelerated:
        raise RuntimeError(str(report))
    return config, theirs, ours, Rope(heads, width)


def _conformer(session: Session, m: Any, heads: int, width: int, batch: int, frames: int, dtype: torch.dtype) -> None:
    fields = {"H": heads, "D": width, "B": batch, "T": frames, "dtype": str(dtype)}
    config, *layers = _layers(m, heads, width)
    theirs, ours, rope = (copy.deepcopy(x).to(session.device, dtype) for x in layers)
    x = torch.randn(batch, frames, heads * width, device=session.device, dtype=dtype).requires_grad_()
    encodings = m.ParakeetEncoderRelPositionalEncoding(config).to(session.device)(x)
    lengths = torch.randint(frames // 2, frames + 1, (batch,))
    lengths[0] = frames
    real = (torch.arange(frames) < lengths[:, None]).to(session.device)
    square = (real[:, None, :] & real[:, :, None])[:, None]  # [B, 1, T, T], as the encoder makes it
    keys = real[:, None, None, :]
    dout = torch.randn_like(x) * real[..., None]

    def step(layer: nn.Module, call: Callable[[], Any]) -> Run:
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]

        def run() -> Any:
            out = call()
            return torch.autograd.grad(out if torch.is_tensor(out) else out[0], leaves, dout, allow_unused=True)

        return run

    ways = {
        "ours": step(ours, lambda: ours(x, encodings, attention_mask=square)),
        "ours, a mask for each call": step(ours, lambda: ours(x, encodings, attention_mask=square.clone())),
        "ours, no mask": step(ours, lambda: ours(x, encodings)),
        "transformers, sdpa": step(theirs, lambda: theirs(x, encodings, attention_mask=square)),
        "transformers, sdpa, no mask": step(theirs, lambda: theirs(x, encodings)),
        "RoPE, SDPA": step(rope, lambda: rope(x, keys)),
        "RoPE, SDPA, no mask": step(rope, lambda: rope(x, None)),
    }
    for way, run in ways.items():
        if session.is_over(way=way, **fields):
            return
        with session.attempt(way=way, **fields):
            found = session.milliseconds(run, 0.15, 9)
            more = {"fallbacks": dict(ours.fallbacks)} if way.startswith("ours") else {}
            session.figure(way=way, **found, peak_mib=session.peak_mib(run), **more, **fields)
    if dtype == torch.bfloat16 and batch <= 16 and frames <= 750:
        with session.attempt(what="difference", **fields), torch.no_grad():
            a, b = (f(x, encodings, attention_mask=square)[0].float() for f in (ours, theirs))
            away = float(((a - b) * real[..., None]).norm() / (b * real[..., None]).norm())
            session.figure(what="difference", of_the_norm=round(away, 5), **fields)


# What Nsight Compute watches.


def launches(session: Session, folder: Path) -> None:
    """Forward at width 64 and both ways at width 128 of today's module, L 512, once more after a
    first time; only these launches lie in the profiler's range."""
    module, runs = load_variant(folder, TODAY), []
    for width, backward in ((64, False), (128, True)):
        length = 64 if session.rehearse else 512
        work = Work(1, 1, length, length, width) if session.rehearse else Work(8, 16, length, length, width)
        runs.append(ways_of(session, work._replace(backward=backward), {TODAY: module})[TODAY])
    for run in runs:
        run()
    session.synchronize()
    if session.device == "cuda":
        torch.cuda.profiler.start()
    for run in runs:
        run()
    session.synchronize()
    if session.device == "cuda":
        torch.cuda.profiler.stop()
    session.figure(what="launched")


NCU = ("ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw")
KERNELS = "regex:forward_kernel|backward_queries_kernel"
METRICS = (
    "regex:smsp__average_warps_issue_stalled_.*_per_issue_active", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "regex:sm__inst_executed_pipe_tensor.*sum$", "smsp__inst_executed.sum", "sm__cycles_elapsed.max",
    "smsp__issue_active.avg.pct_of_peak_sustained_active", "launch__registers_per_thread", "gpu__time_duration.sum",
)  # fmt: skip
SECTIONS = (
    "WarpStateStats",
    "InstructionStats",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "SpeedOfLight",
    "LaunchStats",
)


def ncu(session: Session, folder: Path) -> None:
    """Stall reasons of two kernels' warps, by Nsight Compute: whole sections, then single
    metrics. All that it says goes to a file beside the figures."""
    what: dict[str, list[str]] = {
        "sections": [x for name in SECTIONS for x in ("--section", name)],
        "metrics": ["--metrics", ",".join(METRICS)],
    }
    for name, options in what.items():
        if session.is_over(what=name):
            return
        with session.attempt(what=name), tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch, "ncu.csv")
            command = [*NCU, *options, "--kernel-name", KERNELS, "--log-file", str(log), sys.executable, __file__]
            command += ["launches", "--variants", str(folder)]
            left = max(session.end - time.monotonic(), 5.0)
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
            told = log.read_text() if log.exists() else ""
            if session.out is not None:
                with session.out.with_name("ncu.csv").open("a") as file:
                    file.write(f"# {name}\n{told}\n")
            rows = metrics_in(told)
            for kernel, metrics in rows:
                session.figure(what=name, kernel=kernel, metrics=metrics)
            if done.returncode or not rows:
                raise RuntimeError(f"exit status {done.returncode}: {(done.stderr or done.stdout + told)[-300:]}")


def metrics_in(told: str) -> list[tuple[str, dict[str, str]]]:
    """Return kernels and their metrics from Nsight Compute's table: below its head a line of units,
    then one line for each kernel."""
    rows = csv.DictReader(line for line in told.splitlines() if line.startswith('"'))
    wanted = ("issue_stalled", "wavefronts_mem_shared", "pipe_tensor", "smsp__inst_executed.sum", "cycles_elapsed",
              "issue_active", "launch__", "time_duration")  # fmt: skip
    return [
        (str(row["Kernel Name"])[:80], {name: x for name, x in row.items() if any(w in name for w in wanted)})
        for row in rows
        if row.get("ID")
    ]


STEPS: dict[str, Callable[..., None]] = {
    "errors": errors, "variants": variants, "queries": queries, "inkling": inkling, "flex": flex, "conformer": conformer,
    "ncu": ncu, "launches": launches,
}  # fmt: skip


def emulate(folder: Path) -> None:
    """For a rehearsal: the CUDA C++ kernels in the emulation, as two variants in `folder`."""
    import shutil

    import pytest
    from cuda_cases import use
    from cuda_emulation import build

    module = build()
    use(pytest.MonkeyPatch(), module)
    for name in (TODAY, "A"):
        if not (folder / name).is_dir():
            (folder / name).mkdir(parents=True)
            shutil.copy(module.__file__, folder / name / "_cuda_emulated.so")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--out", type=Path, help="the file to which figures are appended")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no figure is begun")
    parser.add_argument("--variants", type=Path, default=VARIANTS, help="folder of the compiled variants")
    parser.add_argument("--only", default=TODAY, help="of errors: the variant")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    given = parser.parse_args(arguments)
    session = Session(given.step, given.out, given.seconds, given.rehearse)
    more = dict.fromkeys(("variants", "ncu", "launches"), (given.variants,)) | {"errors": (given.variants, given.only)}
    if given.rehearse:
        if given.step in ("errors", "variants", "launches", "queries"):
            emulate(given.variants)
    else:
        properties = torch.cuda.get_device_properties(0)
        session.figure(what="machine", gpu=properties.name, torch=torch.__version__, triton_cache=adopt_carried())
    with session.attempt():
        STEPS[given.step](session, *more.get(given.step, ()))
    return int(session.failed)


if __name__ == "__main__":
    sys.exit(main())
