"""Calls with arguments that nobody should pass: an error that names one of them, or the result that
the reference gives."""

import inspect
import warnings
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from cases import Case, as_call, make_inputs

from txl_kernels import rel_attention

NAMES = tuple(inspect.signature(rel_attention).parameters)
TENSORS = ("q", "k", "v", "r", "content_bias", "position_bias")
SCALARS = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**70, -(2**70), 0.0, 0.5, 1.0, -1.5, 1e-320, 1e300, float("nan"),
    float("inf"), 2 + 1j, "", "native", "reference", "cuda", "\udcff", b"x", [], [1], {}, (), (None, None), object(),
    np.int64(2), np.float32(2.5), np.array(3), np.zeros(2), Fraction(5, 2), Decimal("2.5"), torch.tensor(2),
    torch.tensor([1.0]), torch.tensor([7]), torch.tensor([7], dtype=torch.int32), torch.float32, int, len,
)  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool, torch.complex64)


def prepare(folder: Path) -> None:
    """Nothing."""


def attempt(random: Random, folder: Path) -> None:
    case = Case("", L=random.choice((1, 4, 7)), M=random.choice((0, 5)), intervals=random.choice(("", "random")))
    call = as_call(make_inputs(case, torch.float32))
    for _ in range(random.choice((1, 1, 2))):
        name = random.choice(NAMES)
        call[name] = _odd(random, call.get(name))
    backend = call.pop("backend", random.choice((None, "native")))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = rel_attention(**call, backend=backend)
    except (TypeError, ValueError, RuntimeError) as error:
        told = str(error)
        assert any(name in told for name in (*NAMES, "k_mem", "v_mem")), f"names no argument: {told}"
        assert len(told) < 600, told
        return
    _same_as_reference(call, result)


def _odd(random: Random, given: Any) -> Any:
    """Something else for an argument."""
    if isinstance(given, tuple) and len(given) == 2 and random.random() < 0.7:
        pair = list(given)
        pair[random.randrange(2)] = _odd(random, pair[0])
        return random.choice((tuple, list))(pair)
    if not isinstance(given, torch.Tensor) or given.is_nested or random.random() < 0.3:
        return random.choice(SCALARS)
    x, axis = given.detach(), random.randrange(max(given.dim(), 1))
    size = x.size(axis) if x.dim() else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changes = (
            lambda: x.unsqueeze(axis),
            lambda: x.select(axis, 0),
            lambda: x.narrow(axis, 0, random.randrange(size)),
            lambda: torch.cat([x, x], axis),
            lambda: x.expand(*x.shape[:axis], 3, *x.shape[axis + 1 :]),
            lambda: x.to(random.choice(DTYPES)),
            lambda: x.to("meta"),
            lambda: x.to_sparse(),
            lambda: x.transpose(axis, -1),
            lambda: x.new_empty(0),
            lambda: x.flatten(),
            lambda: x[..., ::2],
            lambda: torch.cat([x, x], -1)[..., ::2],
            lambda: x.narrow(axis, 0, 1).expand_as(x),
            lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
            lambda: torch.nn.Parameter(x),
            lambda: x.conj(),
            lambda: x * (10 ** random.randint(-5, 5)) if x.dtype.is_floating_point else x - 10**9,
            lambda: torch.arange(8.0).as_strided((2, 2, 4, 8), (0, 0, 0, 1)),
            lambda: torch.nested.nested_tensor([torch.zeros(2, 4, 8), torch.zeros(2, 3, 8)]),
            lambda: x.numpy(),
            lambda: x.tolist(),
        )
        try:
            return random.choice(changes)()
        except (RuntimeError, ValueError, IndexError, TypeError):  # no such change of this tensor
            return None


def _same_as_reference(call: dict[str, Any], result: Any) -> None:
    if call.get("dropout_p") and call.get("dropout_seed") is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = rel_attention(**call, backend="reference")
    pairs = zip(result, want, strict=True) if isinstance(want, tuple) else [(result, want)]
    for got, wanted in pairs:
        assert (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device)
        if got.device.type != "meta":
            low = got.dtype in (torch.float16, torch.bfloat16)
            torch.testing.assert_close(
                got, wanted, rtol=0.05 if low else 2e-3, atol=0.05 if low else 2e-3, equal_nan=True
            )
