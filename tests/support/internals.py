"""Private state of the package that tests read or replace. Tests name it only here."""

from typing import Any, NamedTuple

import pytest

from txl_kernels import backends, functional, linear, operators
from txl_kernels.backends import self_check


class Internal(NamedTuple):
    owner: Any
    name: str

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.name)

    def replace(self, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
        monkeypatch.setattr(self.owner, self.name, value)


KEPT_ZEROS = Internal(functional, "_kept_zeros")  # by shape, for biases that are None
WARN_ONCE = Internal(backends, "_warn_once")
KNOWN_CALLS = Internal(operators, "_known")  # the choice for each signature
FAST_FORWARD = Internal(operators, "_forward")
# The self-check of the first call.
COMPARED = Internal(self_check, "_compared")
# Products by oneDNN.
ONEDNN = Internal(linear, "_onednn")
ONEDNN_SHAPES = Internal(linear, "_shapes")
MAX_ONEDNN_SHAPES = Internal(linear, "_MAX_SHAPES")
