"""Private state of the package that tests read or replace. Tests name it only here."""

from typing import Any, NamedTuple

import pytest

from txl_kernels import backends, linear, operators, prepare
from txl_kernels.backends import self_check, zero_biases
from txl_kernels.onnx import export


class Internal(NamedTuple):
    owner: Any
    name: str

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.name)

    def replace(self, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
        monkeypatch.setattr(self.owner, self.name, value)


ZERO_BIASES = Internal(zero_biases, "_stored")  # by shape, for biases that are None
WARN_ONCE = Internal(backends, "_warn_once")
PREPARED_CALLS = Internal(prepare, "_memo")  # by signature
FAST_FORWARD = Internal(operators, "_forward")
TRACED = Internal(export, "_traced")  # sizes that torch.onnx tells
# The self-check of the first call.
COMPARED = Internal(self_check, "_compared")
# Products by oneDNN.
ONEDNN = Internal(linear, "_onednn")
ONEDNN_SHAPES = Internal(linear, "_shapes")
MAX_ONEDNN_SHAPES = Internal(linear, "_MAX_SHAPES")
