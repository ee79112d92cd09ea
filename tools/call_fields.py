"""Writes the fields of `txl_kernels.call.Call` for C++ and C: csrc/call_fields.h, and the fields
between two marks in csrc/include/txl_attention.h. It takes no arguments.

The modules hold the names, too, and one with other fields is not loaded.
"""

import typing
from pathlib import Path

from txl_kernels.call import BOUNDS, INPUT, INPUTS, SETTINGS, SINCE, TAKEN_BY, Call

CSRC = Path(__file__).parents[1] / "csrc"
MEMBERS = {"content_bias": "u", "position_bias": "w"}  # members of txl::Attention with other names than the field
TYPES = {int: "int64_t", int | None: "int64_t", float: "double", bool: "int"}
BEGIN = "  /* clang-format off */\n  /* Written by tools/call_fields.py. */\n"
END = "  /* clang-format on */\n"


def _macro(name: str, rows: list[str]) -> str:
    return " \\\n  ".join([f"#define {name}(X)", *rows])


def call_fields() -> str:
    """Return the text of csrc/call_fields.h."""
    types = typing.get_type_hints(Call)
    inputs = [(name, MEMBERS.get(name, name), ", ".join(INPUT[name].axes.split())) for name in INPUTS]
    in_c = [name for new in _versions().values() for name in new]
    letters = dict.fromkeys(letter for name, x in INPUT.items() if name in in_c for letter in x.axes.split())
    flags = {name: f"{str(x.dtype == 'lse').lower()}, {str(x.any_strides).lower()}" for name, x in INPUT.items()}
    lines = [
        "// The fields of txl_kernels.call.Call, written by tools/call_fields.py from txl_kernels/call.py.",
        "#pragma once",
        "",
        "// clang-format off",
        "// X(enumerator, name, member of txl::Attention) for each input.",
        _macro("TXL_INPUTS", [f"X({n.upper()}, {n}, {m})  /* [{axes}] */" for n, m, axes in inputs]),
        "",
        "// X(enumerator, name) for each other field.",
        _macro("TXL_OTHER_FIELDS", [f"X({n.upper()}, {n})" for n in Call._fields[len(INPUTS) :]]),
        "",
        "// X(type, enumerator, name) for each field that is no tensor. An integer that is None is INT64_MAX.",
        _macro("TXL_SETTINGS", [f"X({TYPES[types[n]]}, {n.upper()}, {n})" for n in SETTINGS]),
        "",
        "// X(name) for each setting of txl_call.",
        _macro("TXL_C_SETTINGS", [f"X({n})" for n in SETTINGS if n in in_c]),
        "",
        "// X(letter) for each size of txl_call.",
        _macro("TXL_SIZES", [f"X({letter})" for letter in letters]),
        "",
        "// X(name, member of txl::Attention, letters of the axes, whether it is float32 beside any type, whether its last",
        "// axis may have any stride) for each input of txl_call.",
        _macro("TXL_C_INPUTS", [f'X({n}, {m}, "{INPUT[n].axes}", {flags[n]})' for n, m, _ in inputs if n in in_c]),
        "",
        "// X(last field of txl_call, last field of txl_gradients) for each version of the C interface.",
        _macro("TXL_C_VERSIONS", _last_fields()),
        "// clang-format on",
    ]
    return "\n".join(lines) + "\n"


def _versions() -> dict[int, list[str]]:
    """Return the fields that the CPU kernels take, by the version of the C interface that first had
    them."""
    taken = [name for name in Call._fields if "native" in TAKEN_BY.get(name, ())]
    versions = sorted({SINCE.get(name, 1) for name in taken})
    return {version: [name for name in taken if SINCE.get(name, 1) == version] for version in versions}


def c_fields() -> tuple[str, str]:
    """Return the fields of txl_call and those of txl_gradients in txl_attention.h. Those of a later
    version come behind all others, so that the first bytes are the struct of an older header."""
    types = typing.get_type_hints(Call)
    call, gradients, known = "", "", set[str]()
    for version, new in _versions().items():
        axes = {n: x.axes.split() for n, x in INPUT.items() if n in new}
        letters = [x for x in dict.fromkeys(letter for x in axes.values() for letter in x) if x not in known]
        known.update(letters)
        # An int at the end would leave padding, in which the next version's first field could lie.
        c_types = TYPES if version == 1 else TYPES | {bool: "int64_t"}
        tensors = "".join(f"  txl_tensor {n}; /* [{', '.join(axes[n])}] */\n" for n in INPUTS if n in new)
        call += f"  int64_t {', '.join(letters)};\n" if letters else ""
        call += "".join(f"  {c_types[types[n]]} {n};\n" for n in SETTINGS if n in new) + tensors
        call += "".join(f"  txl_tensor {n}; /* [B, L], int32_t */\n" for n in BOUNDS if n in new)
        gradients += tensors
    return call, gradients


def _last_fields() -> list[str]:
    """Return the last fields of txl_call and of txl_gradients in each version."""
    rows: list[str] = []
    last_gradient = ""
    for new in _versions().values():
        order = [n for names in (SETTINGS, INPUTS, BOUNDS) for n in names if n in new]
        last_gradient = next((n for n in reversed(order) if n in INPUTS), last_gradient)
        rows.append(f"X({order[-1]}, {last_gradient})")
    return rows


def c_header(text: str) -> str:
    """Return the text of txl_attention.h with these fields between its marks."""
    parts = text.split(BEGIN)
    rest = [part.split(END, 1)[1] for part in parts[1:]]
    return parts[0] + "".join(BEGIN + fields + END + after for fields, after in zip(c_fields(), rest, strict=True))


def texts() -> dict[Path, str]:
    """Return the files and what they should hold."""
    header = CSRC / "include" / "txl_attention.h"
    return {CSRC / "call_fields.h": call_fields(), header: c_header(header.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    for file, text in texts().items():
        file.write_text(text, encoding="utf-8")
