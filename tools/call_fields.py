"""Writes the fields of `txl_kernels.call.Call` for C++ and C: csrc/call_fields.h, and the fields
between two marks in csrc/include/txl_attention.h. It takes no arguments.

The modules hold the names, too, and one with other fields is not loaded.
"""

import typing
from pathlib import Path

from txl_kernels.call import BOUNDS, INPUT, INPUTS, SETTINGS, TAKEN_BY, Call

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
    letters = dict.fromkeys(letter for x in INPUT.values() for letter in x.axes.split())
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
        "// X(letter) for each size.",
        _macro("TXL_SIZES", [f"X({letter})" for letter in letters]),
        "",
        "// X(name, letters of the axes, whether it is float32 beside any type, whether its last axis may have any stride)",
        "// for each input.",
        _macro("TXL_INPUT_SHAPES", [f'X({n}, "{INPUT[n].axes}", {flags[n]})' for n in INPUTS]),
        "// clang-format on",
    ]
    return "\n".join(lines) + "\n"


def c_fields() -> tuple[str, str]:
    """Return the fields of txl_call, those that the CPU kernels take, and those of txl_gradients,
    in txl_attention.h."""
    types = typing.get_type_hints(Call)
    taken = [name for name in Call._fields if "native" in TAKEN_BY.get(name, ())]
    axes = {n: x.axes.split() for n, x in INPUT.items() if n in taken}
    letters = dict.fromkeys(letter for x in axes.values() for letter in x)
    tensors = "".join(f"  txl_tensor {n}; /* [{', '.join(axes[n])}] */\n" for n in INPUTS if n in taken)
    sizes = f"  int64_t {', '.join(letters)};\n"
    settings = "".join(f"  {TYPES[types[n]]} {n};\n" for n in SETTINGS if n in taken)
    bounds = "".join(f"  txl_tensor {n}; /* [B, L], int32_t */\n" for n in BOUNDS if n in taken)
    return sizes + settings + tensors + bounds, tensors


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
