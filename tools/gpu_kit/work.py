"""A call of rel_attention as the three calls make it: sizes, options, tensors, and the choices of
the Triton backend that are replaced under it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from txl_kernels import rel_attention
from txl_kernels.backends.triton import config, plan

Make = Callable[..., Tensor]  # torch.randn, or torch.empty where values do not matter
Tile = tuple[int, int, int, int]  # queries, keys, warps, stages
GRADIENTS = ("q", "k", "v", "r", "u", "w", "k_mem", "v_mem")


@dataclass(frozen=True)
class Work:
    """causal, with all of the memory visible unless said otherwise. bounded: the segment's second
    half is a document of its own. atomics: None for the package's own choice. tile: of `kernel`,
    instead of the table's."""

    name: str
    B: int
    H: int
    L: int
    M: int
    D: int
    dtype: str = "bfloat16"
    backend: str = "triton"
    backward: bool = True
    causal: bool = True
    window: int | None = None
    bounded: bool = False
    dropout_p: float = 0.0
    atomics: bool | None = None
    pointers: bool = False
    kernel: str = ""
    tile: Tile | None = None

    @property
    def tiles(self) -> int:
        """64 x 64 tiles of pairs of which some pair is visible; of a causal call with L a multiple
        of 64."""
        rows, columns = -(-self.L // 64), -(-self.M // 64)
        return self.B * self.H * (rows * columns + rows * (rows + 1) // 2)

    @property
    def pairs(self) -> int:
        return self.B * self.H * (self.L * self.M + self.L * (self.L + 1) // 2)


def tensors(work: Work, device: torch.device | str, make: Make = torch.randn) -> dict[str, Any]:
    """q, k, v, r, u, w, k_mem, v_mem and dout; start, end and seed or None."""
    rows = work.M + work.L + (0 if work.causal else work.L - 1)
    sizes = dict.fromkeys(("q", "k", "v", "dout"), (work.B, work.H, work.L, work.D)) | {"r": (work.H, rows, work.D)}
    sizes |= dict.fromkeys(("u", "w"), (work.H, work.D)) | dict.fromkeys(
        ("k_mem", "v_mem"), (work.B, work.H, work.M, work.D)
    )
    dtype = getattr(torch, work.dtype)
    found: dict[str, Any] = {name: make(size, device=device, dtype=dtype) for name, size in sizes.items()}
    found |= {"start": None, "end": None, "seed": None}
    if work.bounded:
        here = torch.arange(work.L, device=device)
        start = torch.where(2 * here >= work.L, work.M + work.L // 2, 0).int()
        found["start"] = start.expand(work.B, work.L).contiguous()
        found["end"] = torch.full_like(found["start"], work.M + work.L)
    if work.dropout_p:
        found["seed"] = torch.tensor([1234], device=device)
    return found


def forward(work: Work, x: dict[str, Any], backend: str | None = None) -> Tensor:
    """out [B, H, L, D]."""
    seed = {"dropout_p": work.dropout_p, "dropout_seed": x["seed"]} if work.dropout_p else {}
    out: Tensor = rel_attention(
        x["q"], x["k"], x["v"], x["r"], x["u"], x["w"], (x["k_mem"], x["v_mem"]), causal=work.causal, window=work.window,
        start=x["start"], end=x["end"], zero_row=0 if work.causal else work.L - 1, backend=backend or work.backend, **seed,
    )  # fmt: skip
    return out


def both(work: Work, x: dict[str, Any], backend: str | None = None) -> dict[str, Tensor]:
    """out and, with `backward`, the gradients by name."""
    if not work.backward:
        with torch.no_grad():
            return {"out": forward(work, x, backend)}
    given = {name: x[name].detach().requires_grad_() for name in GRADIENTS}
    out = forward(work, x | given, backend)
    gradients = torch.autograd.grad(out, list(given.values()), x["dout"])
    return {"out": out.detach()} | dict(zip(given, gradients, strict=True))


@contextlib.contextmanager
def choices(work: Work) -> Iterator[None]:
    """The backend's choices replaced by the work's."""
    ours = config.choose

    def choose(which: str, *rest: Any, **more: Any) -> config.Config:
        return config.Config(*work.tile) if work.tile and which == work.kernel else ours(which, *rest, **more)

    def atomics() -> bool:
        return bool(work.atomics)

    def describable(x: Tensor) -> bool:
        return False

    with contextlib.ExitStack() as stack:
        if work.tile is not None:
            stack.enter_context(mock.patch.object(config, "choose", choose))
        if work.atomics is not None:
            stack.enter_context(mock.patch.object(config, "dr_by_atomics", atomics))
        if work.pointers:
            stack.enter_context(mock.patch.object(plan, "describable", describable))
        plan.forget()  # launches that were laid out by other choices
        stack.callback(plan.forget)
        yield
