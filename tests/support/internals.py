"""Private state of the package that tests look at or replace: no test names it but through this."""

from typing import Any, NamedTuple

import pytest

from txl_kernels import backends, linear, operators, prepare
from txl_kernels.backends import native_modules, self_check, zero_biases


class Internal(NamedTuple):
    owner: Any
    name: str

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.name)

    def replace(self, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
        monkeypatch.setattr(self.owner, self.name, value)


ZERO_BIASES = Internal(zero_biases, "_stored")  # by shape, of biases that are left out
WARN_ONCE = Internal(backends, "_warn_once")
PREPARED_CALLS = Internal(prepare, "_memo")  # by signature
FAST_FORWARD = Internal(operators, "_forward")
IMPORT = Internal(native_modules, "_import")
INSTALLED = Internal(native_modules, "_installed")
# Of the first call's check.
COMPARED = Internal(self_check, "_compared")
# Of products by oneDNN.
ONEDNN = Internal(linear, "_onednn")
ONEDNN_SHAPES = Internal(linear, "_shapes")
BY_ONEDNN = Internal(linear, "_by_onednn")
MOST_ONEDNN_SHAPES = Internal(linear, "_MAX_SHAPES")
