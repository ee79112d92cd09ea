"""Forms of the attention beyond the paper's: compiled, with a seed of their own, refused."""

from typing import Any

import pytest
import torch
from cases import BY_NAME, DTYPES, Case, as_call, make_inputs
from oracle import attend
from tolerances import require_close
from torch import Tensor

from txl_kernels import rel_attention

COMPILED = (  # each a way through the code of its own
    "no biases, a table of more rows",
    "numbers alone for all heads, prefix, softcap",
    "numbers and a table for each batch row, chunks",
    "all at once",
)


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_a_break(name: str) -> None:
    torch.compiler.reset()
    x = make_inputs(BY_NAME[name], torch.float32)
    compiled = torch.compile(rel_attention, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**as_call(x), return_lse=True), attend(x), strict=True):
        require_close(got, want, name)


def test_a_seed_of_its_own_is_drawn_once_for_both_halves_of_a_prefix(backend: str) -> None:
    x = make_inputs(BY_NAME["prefix, both bounds, dropout"], DTYPES[backend])
    del x["dropout_seed"]
    torch.manual_seed(1)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,))
    torch.manual_seed(1)
    got = attend(x, backend=backend)
    want = attend(x, backend=backend, dropout_seed=seed)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "chunk a number": ({"chunk": 4, "causal": False}, TypeError, r"chunk must be None or a pair \(size, left\), got 4"),
    "chunk of nothing": ({"chunk": (0, 1), "causal": False}, ValueError, r"chunk\[0\] must be .* >= 1 .*, got 0"),
    "chunks ahead": ({"chunk": (2, -1), "causal": False}, ValueError, r"chunk\[1\] must be None or .*, got -1"),
    "causal chunks": ({"chunk": (2, 1)}, ValueError, r"chunk needs causal=False"),
    "prefix too long": ({"prefix": 12}, ValueError, r"prefix must be an integer from 0 to M \+ L = 11, got 12"),
    "prefix negative": ({"prefix": -1}, ValueError, r"prefix must be .*, got -1"),
    "prefix a float": ({"prefix": 1.5}, TypeError, r"prefix must be .*, got float"),
    "descending None": ({"r_descending": None}, TypeError, r"r_descending must be True or False, got NoneType"),
    "zero_row beyond a descending table": (
        {"r_descending": True, "zero_row": 16}, ValueError, r"zero_row must be a row of r \(0 to 15\) .*, got 16"),
    "r_bias of another length, for all heads": (
        {"r_bias": torch.zeros(1, 3)}, ValueError, r"r_bias must be \[H, T\] = \[2, 16\] or \[1, 16\], got .*\[1, 3\]"),
    "r of other heads": (
        {"r": torch.zeros(3, 16, 8), "outside": "clamp"}, ValueError, r"r must be \[H, T, D\] = .*got shape \[3, 16, 8\]"),
    "r of other texts": ({"r": torch.zeros(3, 2, 16, 8)}, ValueError, r"r must be .*, got shape \[3, 2, 16, 8\]"),
    "no row to repeat": (
        {"r": torch.zeros(2, 0, 8), "outside": "clamp"}, ValueError, r"r must have a row where outside='clamp'"),
    "distance beyond the table": (
        {"r_descending": True, "zero_row": 3}, ValueError, r"distances 0 to 10 are visible: r needs"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, error, message = REFUSED[name]
    given = make_inputs(Case("", rows=16, zero_row=5), torch.float32)
    x = {n: y.detach() if isinstance(y, Tensor) else y for n, y in given.items()}
    with pytest.raises(error, match=message):
        attend(x | changed)
