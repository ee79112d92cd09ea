"""Dataclass fields: those that are options of `txl train`, and type checks of values read from
JSON."""

import dataclasses
import types
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from txl.errors import TxlError

# Ranges for `check_ranges`. float32 can represent the first; JSON, the last.
POSITIVE, RATE, COUNT = (1e-38, 1e38), (0, 0.999999), (1, 2**53)
_T = TypeVar("_T")
_NAMES: dict[Any, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple: "a list", dict: "an object",
}  # fmt: skip


def option(default: Any, panel: str, help: str, *names: str, **kind: Any) -> Any:
    """A dataclass field with its `--help` text under the heading `panel`.

    default: `dataclasses.MISSING` for a required option. names: the option's names, if they differ
    from the field's.
    kind: further keyword arguments of `typer.Option`.
    """
    metadata = {"panel": panel, "help": help, "names": names, "kind": kind}
    return dataclasses.field(default=default, metadata=metadata)


def options(config: type[Any]) -> Iterator[tuple[str, type[Any], dict[str, Any]]]:
    """The options of a configuration: name, type (int, float, bool or str), metadata."""
    for field in dataclasses.fields(config):
        if field.metadata:
            kinds = get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
            (kind,) = (k for k in kinds if k is not type(None))
            plain = str if get_origin(kind) in (Literal, tuple) else kind
            assert isinstance(plain, type)
            yield field.name, plain, dict(field.metadata)


def from_values(kind: type[_T], values: Any) -> _T:
    """Make a dataclass from a JSON object; unknown fields are ignored.

    Raises:
        TxlError: `values` is not an object, or a field is missing or has a value of the wrong type.
    """
    if not isinstance(values, dict):
        raise TxlError(f"{kind.__name__.lower()} must be an object, got {values!r:.40}")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    for field in fields:
        if field.name in values:
            check_type(field, values[field.name])
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise TxlError(f"{field.name} is missing")
    return kind(**{field.name: values[field.name] for field in fields if field.name in values})


def check_types(config: Any) -> None:
    """Raise TxlError if a field of a dataclass has a value of the wrong type."""
    for field in dataclasses.fields(config):
        check_type(field, getattr(config, field.name))


def check_ranges(config: Any, **ranges: tuple[float, float]) -> None:
    """Raise TxlError if a field of a dataclass is outside its range, ends included; None is in
    every range, NaN in none."""
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            bound = f"<= {high:,}" if value > high else "> 0" if low == POSITIVE[0] else f">= {low:,}"
            raise TxlError(f"{name} must be {bound}, got {value:,}")


def check_type(field: "dataclasses.Field[Any]", value: Any) -> None:
    """Raise TxlError if a value is not of a field's type; a list is accepted for a tuple."""
    if not _is_of(field.type, value):
        raise TxlError(f"{field.name} must be {_accepted(field.type)}, got {value!r:.80}")


def _is_of(kind: Any, value: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_is_of(each, value) for each in inner)
    if kind is Any:
        return True
    if origin is Literal:
        return value in inner
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(_is_of(inner[0], x) for x in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_of(inner[0], x) and _is_of(inner[1], y) for x, y in value.items())
    if kind is float:
        return type(value) is float or (type(value) is int and abs(value) < 2**1000)
    return type(value) is kind


def _accepted(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_accepted(each) for each in get_args(kind) if each is not types.NoneType)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return _NAMES.get(get_origin(kind) or kind, str(kind))
