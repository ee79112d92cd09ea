"""The table of the kernels that take a field of a call: a field that it does not give to a kernel
is refused there by name."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import Case, as_fields, make_inputs

from txl_kernels.backends import route
from txl_kernels.backends.limits import DECODE, NATIVE, PREFILL, TRITON, Limits
from txl_kernels.call import TAKEN_BY, TENSORS, Call, refused_by

KERNELS = ("native", "triton", "decode", "prefill", "onnx")
SETTINGS = {"dropout_p": 0.25, "softcap": 5.0, "position_scale": 0.5, "zero_outside": True}
FIELDS = [name for name in Call._fields if name in TENSORS or name in SETTINGS]


def call_with(field: str, length: int = 2) -> Call:
    """Return a call that gives a field, and of the others as few as it can."""
    case = Case(B=1, H=2, L=length, M=5, D=64, sink="B H L", intervals="filled", r_bias="H T")
    given = as_fields(make_inputs(case, torch.bfloat16))
    values: dict[str, Any] = {
        "seed": torch.zeros(1, dtype=torch.int64),
        "end": given.start,
        "q_pos": given.q,
    } | SETTINGS
    absent = {x: None for x in ("r_bias", "sink", "start") if x != field}
    call = given._replace(**absent)
    return call._replace(**{field: values[field]}) if field in values else call


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def why_not(limits: Limits, call: Call) -> str | None:
    reason = route.why_not(call, limits)
    return None if reason is None else reason.text


def why_not_onnx(call: Call) -> str | None:
    onnxscript = pytest.importorskip("onnxscript", reason="needs the extra `onnx`")
    from txl_kernels.onnx import export

    as_value = onnxscript.ir.Value(type=onnxscript.ir.TensorType(onnxscript.ir.DataType.FLOAT))
    try:
        export._check(call._replace(q=as_value, seed=None if call.dropout_p == 0 else call.seed))
    except ValueError as error:
        return str(error)
    return None


WHY_NOT: dict[str, Callable[[Call], str | None]] = {
    **{x.kernels: partial(why_not, x) for x in (NATIVE, TRITON, DECODE, PREFILL)},
    "onnx": why_not_onnx,
}


def derive_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive again what modules have derived from the table when they were imported."""
    monkeypatch.setattr(route, "_REFUSED", route._refused())
    try:
        from txl_kernels.onnx import export
    except ImportError:
        return
    monkeypatch.setattr(export, "_REFUSED", refused_by("onnx"))


def is_refused(why_not: str | None, field: str) -> bool:
    """Whether a reason is the table's: the name alone for a tensor, with its value for a number."""
    ending = f"{field}, got {SETTINGS[field]}" if field in SETTINGS else field
    return why_not is not None and why_not.endswith(ending)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_the_table_does_not_give_is_refused_by_name(
    field: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, why_not = call_with(field), WHY_NOT[kernels]
    if kernels in TAKEN_BY[field]:
        assert not is_refused(why_not(call), field)
        monkeypatch.setitem(TAKEN_BY, field, tuple(x for x in TAKEN_BY[field] if x != kernels))
        derive_again(monkeypatch)
    if (field, kernels) in (("dropout_p", "onnx"), ("seed", "onnx")):
        assert "model.eval()" in str(why_not(call_with("dropout_p")))
    else:
        assert is_refused(why_not(call), field)


@pytest.mark.parametrize("name", ["native", "triton", "cuda"])
def test_a_new_field_is_refused_by_all_but_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TAKEN_BY, "sink")
    derive_again(monkeypatch)
    call = call_with("sink")
    assert str(route.why_not_call(name, call)).partition(";")[0].endswith("not take sink")
    assert route.why_not_call("reference", call) is None


def test_every_field_is_in_the_table() -> None:
    assert set(Call._fields) == set(TAKEN_BY)
    assert {x for taken in TAKEN_BY.values() for x in taken} == set(KERNELS)


def test_the_operator_of_onnx_runtime_has_the_tensors_that_it_takes() -> None:
    library = importlib.import_module("txl_kernels.onnx.library")
    assert set(library.INPUTS) == {name for name in TENSORS if "onnx" in TAKEN_BY[name]}


def test_a_field_that_the_cpu_kernels_do_not_take_is_not_in_the_c_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    import call_fields

    assert " sink;" in call_fields.c_fields()[0]
    monkeypatch.delitem(TAKEN_BY, "sink")
    assert " sink;" not in "".join(call_fields.c_fields())
