"""A call of `rel_attention` before it is plain."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_kernels.checks.tensors import memory_pair


class Form(NamedTuple):
    """The arguments of `rel_attention`, as given; `return_lse` apart."""

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    content_bias: Tensor | None
    position_bias: Tensor | None
    memory: Any
    causal: bool
    window: Any
    chunk: Any
    prefix: int
    start: Tensor | None
    end: Tensor | None
    zero_row: int
    r_descending: bool
    clamp: bool
    r_bias: Tensor | None
    scale: float | None
    dropout_p: float
    dropout_seed: Tensor | None
    backend: str | None

    @property
    def memory_len(self) -> int:
        """M."""
        return 0 if self.memory is None else int(self.memory[0].size(2))


NO_SETTINGS = ("chunk", "prefix", "r_descending", "clamp", "r_bias")


def plain_arguments(form: Form) -> dict[str, Any]:
    """Of a form that has become plain."""
    return {name: value for name, value in form._asdict().items() if name not in NO_SETTINGS}


def is_special(q: Tensor, v: object, r: object) -> bool:
    """Whether tensors' shapes alone ask for more than a plain call: v of a width of its own, r
    shared by the heads or for each text."""
    if not isinstance(v, Tensor) or not isinstance(r, Tensor) or v.is_nested or r.is_nested:
        return False  # the plain call refuses it
    if q.dim() != 4 or v.dim() != 4:
        return False
    return v.size(3) != q.size(3) or r.dim() == 4 or (r.dim() == 3 and r.size(0) == 1 != q.size(1))


def check(form: Form) -> None:
    """What this package relies on; all else is checked in the plain calls.

    Raises:
        TypeError, ValueError: an argument, by name.
    """
    tensors = {"k": form.k, "v": form.v, "r": form.r}
    if form.memory is not None:
        tensors["k_mem"], tensors["v_mem"] = memory_pair(form.memory)
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    tensors["q"] = form.q
    for name, x in tensors.items():
        if x.layout != torch.strided or x.is_nested or x.is_quantized:
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else f"of layout {x.layout}"
            raise TypeError(f"{name} must be a dense (strided) tensor, got one that is {kind}")
        if x.device != form.q.device:
            raise ValueError(f"{name} must be on q's device {form.q.device}, got {x.device}")
    for name, x in tensors.items():
        if name != "r" and (x.dim() != 4 or x.size(3) == 0):
            shape = "[B, H, M, D]" if name.endswith("mem") else "[B, H, L, D]"
            raise ValueError(f"{name} must be {shape} with D >= 1, got shape {list(x.shape)}")
    batch, heads, length, _ = form.q.shape
    if form.v.shape[:3] != form.q.shape[:3]:
        raise ValueError(
            f"v must be [B, H, L, any] = [{batch}, {heads}, {length}, any], got shape {list(form.v.shape)}"
        )
    for name, x in (("k", form.k), ("k_mem", tensors.get("k_mem", form.k))):
        if x.size(3) != form.q.size(3):
            raise ValueError(f"{name} must be of q's width {form.q.size(3)}, got shape {list(x.shape)}")
    if form.memory is not None and tensors["v_mem"].size(3) != form.v.size(3):
        raise ValueError(f"v_mem must be of v's width {form.v.size(3)}, got shape {list(tensors['v_mem'].shape)}")
    width, table = form.q.size(3), form.r.shape
    sizes = (batch, heads)[-max(len(table) - 2, 0) :]
    if (
        len(table) not in (3, 4)
        or table[-1] != width
        or any(n not in (1, m) for n, m in zip(table, sizes, strict=False))
    ):
        raise ValueError(
            f"r must be [H, T, D] = [{heads}, T, {width}], [1, T, {width}] or [{batch}, {heads}, T, {width}], got shape "
            f"{list(table)}"
        )
    for name in ("content_bias", "position_bias"):
        bias = getattr(form, name)
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (heads, width)):
            got = f"shape {list(bias.shape)}" if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"{name} must be None or [H, D] = [{heads}, {width}], got {got}")
