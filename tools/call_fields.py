"""Writes csrc/call_fields.h, the fields of `txl_kernels.call.Call` for C++. It takes no arguments.

The modules hold the names, too, and one with other fields is not loaded.
"""

from pathlib import Path

from txl_kernels.call import INPUT, INPUTS, Call

HEADER = Path(__file__).parents[1] / "csrc" / "call_fields.h"
MEMBERS = {"content_bias": "u", "position_bias": "w"}  # members of txl::Attention with other names than the field


def text() -> str:
    """Return the header's text."""
    inputs = [(name, MEMBERS.get(name, name), f"[{INPUT[name].axes.replace(' ', ', ')}]") for name in INPUTS]
    others = Call._fields[len(INPUTS) :]
    lines = [
        "// The fields of txl_kernels.call.Call, written by tools/call_fields.py from txl_kernels/call.py.",
        "#pragma once",
        "",
        "// clang-format off",
        "// X(enumerator, name, member of txl::Attention) for each input.",
        " \\\n  ".join(
            ["#define TXL_INPUTS(X)", *(f"X({n.upper()}, {n}, {m})  /* {axes} */" for n, m, axes in inputs)]
        ),
        "",
        "// X(enumerator, name) for each other field.",
        " \\\n  ".join(["#define TXL_OTHER_FIELDS(X)", *(f"X({n.upper()}, {n})" for n in others)]),
        "// clang-format on",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    HEADER.write_text(text(), encoding="utf-8")
