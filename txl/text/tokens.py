"""Tokens as arrays, in the smallest type that holds a vocabulary."""

import hashlib
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""[n], of `token_dtype(len(vocabulary))`."""

Unit = Literal["bytes", "words"]


def token_dtype(size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest of uint8, uint16, uint32 that holds the tokens of a vocabulary of `size`."""
    if size <= 1 << 8:
        return np.uint8
    return np.uint16 if size <= 1 << 16 else np.uint32


def content(tokens: Tokens) -> str:
    """SHA-256 of a text's tokens."""
    return hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest()


SHOWN = 5  # of what is wrong, in a message


def name_lines(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN])) + (", .." if len(numbers) > SHOWN else "")
    return f"line {shown} is" if len(numbers) == 1 else f"lines {shown} are"
