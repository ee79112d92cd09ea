"""Other libraries' packages are found before all others, for a run of these tests alone (`make
test-integrations`): another transformers than the one that other tests compare with."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from implementations import bare_peers
from txl_kernels.integrations import registry

bare_peers.use()
WARNINGS = (
    "flex_attention called without torch.compile",
    "Support for mismatched key_padding_mask and attn_mask",  # WavLM's
    ".*torch.cuda.amp.autocast",  # ModelScope's
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder `peers`, and skip them if the packages are not there."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("peers")
            for message in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"), append=False)
            if not bare_peers.AVAILABLE:
                item.add_marker(pytest.mark.skip(reason="other libraries' layers: run `make test-integrations`"))


@pytest.fixture
def any_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerates in float64, too, which no kernel for CPUs supports, but the reference."""
    for name in ("peer", "accelerate"):
        module = importlib.import_module(f"txl_kernels.integrations.{name}")
        monkeypatch.setattr(module, "has_kernel", lambda device, dtype: True)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets the peers that a test registers."""
    monkeypatch.setattr(registry, "_peers", dict(registry._peers))


@pytest.fixture(scope="session")
def hf() -> Any:
    import txl.hf

    return txl.hf
