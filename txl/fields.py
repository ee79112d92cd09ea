"""Fields of configurations that are options of `txl train`, too."""

import dataclasses
import types
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin


def option(default: Any, panel: str, help: str, *names: str, **kind: Any) -> Any:
    """Dataclass field with what `--help` says of it under the heading `panel`.

    default: `dataclasses.MISSING` for none. names: of the option, where they are not the field's.
    kind: what typer's Option takes besides.
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
