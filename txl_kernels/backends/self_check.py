"""No silent wrong number on a GPU that nobody has tried: the first call there of a backend, dtype,
head width and direction computes a small case by the same kernels and by the reference.

What agreed is remembered on disk, by all that decides what runs. TXL_KERNELS_SELF_CHECK=off leaves
it out.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_kernels.backends import cuda, reference
from txl_kernels.backends.protocol import Kernels
from txl_kernels.call import INPUTS, Call, inputs_of, needs_gradients

SETTING = "TXL_KERNELS_SELF_CHECK"
FEW = cuda.MOST_QUERIES  # queries that have kernels of their own
# Of the norm of a result: ten times what kernels differ by; a fault of a kernel gives about 1.
# float32 may be computed in tf32.
MOST_WRONG = {torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 5e-2}
NAMES = ("out", "lse", *(f"gradient of {name}" for name in INPUTS))
ROOT = Path(__file__).resolve().parents[1]


class Kind(NamedTuple):
    """Calls that one small case stands for."""

    backend: str
    device: torch.device
    dtype: torch.dtype
    head_width: int
    few: bool
    gradients: bool


_compared: dict[Kind, str | None] = {}


def kind_of(backend: str, call: Call) -> Kind:
    """Of a call."""
    q = call.q
    return Kind(backend, q.device, q.dtype, q.size(3), q.size(2) <= FEW, needs_gradients(call))


def all_kinds_of(backend: str, call: Call) -> tuple[Kind, Kind]:
    """Of a call of any number of queries."""
    q, gradients = call.q, needs_gradients(call)
    many = Kind(backend, q.device, q.dtype, q.size(3), False, gradients)
    return Kind(backend, q.device, q.dtype, q.size(3), True, gradients), many


def is_wanted() -> bool:
    """Raises ValueError for a value of the setting that is none."""
    wanted = os.environ.get(SETTING, "on")
    if wanted not in ("on", "off"):
        raise ValueError(f"{SETTING} must be on or off, got {wanted!r}")
    return wanted == "on"


def can_run_now(device: torch.device) -> bool:
    """Not inside of a graph's capture, and not under who would take the small case for the
    user's."""
    if device.type != "cuda" or torch.compiler.is_compiling() or not torch.cuda.is_available():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return not torch.cuda.is_current_stream_capturing()


def is_settled(kind: Kind) -> bool:
    """Whether later calls would be told the same."""
    return kind in _compared or kind.device.type != "cuda" or not is_wanted()


def disagrees(kernels: Kernels, kind: Kind) -> str | None:
    """How a backend's results for the small case differ from the reference's; None if they agree,
    or cannot be compared now."""
    if kind in _compared:
        return _compared[kind]
    if not can_run_now(kind.device) or not is_wanted():
        return None
    note = _note_of(kind)
    found = None if note is not None and note.exists() else compare(kernels, kind)
    if found is None and note is not None:
        with contextlib.suppress(OSError):  # it is compared again in the next process
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
    _compared[kind] = found
    return found


def compare(kernels: Kernels, kind: Kind) -> str | None:
    """The small case by the kernels in their dtype and by the reference in float64."""
    exact = case_of(kind)
    moved: dict[str, Any] = {
        name: x.to(kind.device, kind.dtype) for name, x in exact._asdict().items() if isinstance(x, Tensor)
    }
    call = exact._replace(**moved)
    with torch.enable_grad():
        leaves = [x.requires_grad_(kind.gradients) for x in inputs_of(exact) if x is not None]
        out, lse = reference.forward(exact)
        dout, dlse = torch.cos(torch.arange(out.numel()).view(out.shape)).double(), torch.ones_like(lse)
        given = torch.autograd.grad((out, lse), leaves, (dout, dlse)) if kind.gradients else ()
    with torch.no_grad():
        got_out, got_lse = kernels.forward(call)
        got: list[Tensor | None] = [got_out, got_lse]
        if kind.gradients:
            assert got_lse is not None
            cotangents = dout.to(got_out), dlse.to(got_lse)
            got += kernels.backward(call, got_out, got_lse, *cotangents)
        for name, x, want in zip(NAMES, got, (out, lse, *given), strict=False):
            error = torch.inf if x is None else float((x.cpu().double() - want).norm() / want.norm())
            if not error <= MOST_WRONG[kind.dtype]:
                return (
                    f"its {name} for a small case in {str(kind.dtype).removeprefix('torch.')} at head width "
                    f"{kind.head_width} is off by {error:.2g} of its norm, where {MOST_WRONG[kind.dtype]:.2g} is allowed"
                )
    return None


def case_of(kind: Kind) -> Call:
    """More keys than a tile has, a memory that ends inside of one; values as the dtype has them, in
    float64."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, length, memory = (2, 2, 3, 150) if kind.few else (1, 2, 70, 90)

    def values(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(kind.dtype).double()

    width = kind.head_width
    q, k, v = (values(batch, heads, length, width) for _ in range(3))
    r, u, w = values(heads, memory + length, width), values(heads, width), values(heads, width)
    earlier = values(batch, heads, memory, width), values(batch, heads, memory, width)
    return Call(q, k, v, r, u, w, *earlier, None, None, None, None, 0, None, 0, width**-0.5, 0.0, 0.0)


def _note_of(kind: Kind) -> Path | None:
    """The empty file that says that these agreed; None where there is no place for one."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(home):
        return None
    key = repr((kind._replace(device=torch.device(kind.device.type)), _machine(kind.device), _sources()))
    return Path(home, "txl-kernels", "self-check", hashlib.sha256(key.encode()).hexdigest()[:32])


def _machine(device: torch.device) -> tuple[object, ...]:
    """What the kernels run on, and what compiles them."""
    properties = torch.cuda.get_device_properties(device)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return properties.name, properties.major, properties.minor, driver, triton, torch.__version__


@functools.cache
def _sources() -> str:
    """Hash of the package's own code, compiled modules' sources among it."""
    digest = hashlib.sha256()
    for file in _files():
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\n" + file.read_bytes())
    module = cuda.native.module
    return digest.hexdigest() + ("" if module is None else str(module.SOURCE_HASH))


def _files() -> Iterator[Path]:
    yield from sorted((ROOT / "backends").rglob("*.py"))
    yield ROOT / "call.py"
