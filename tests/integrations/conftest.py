"""The peers' packages before all others, for a run of these tests alone (`make test-integrations`):
another transformers than the one that other tests compare with."""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from implementations import bare_peers

bare_peers.use()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if bare_peers.AVAILABLE:
        return
    for item in items:
        if item.get_closest_marker("peers"):
            item.add_marker(pytest.mark.skip(reason="other libraries' layers: run `make test-integrations`"))


@pytest.fixture
def any_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerates in float64, too, which no kernel for CPUs takes, but the reference."""
    for name in ("peer", "accelerate"):
        module = importlib.import_module(f"txl_kernels.integrations.{name}")
        monkeypatch.setattr(module, "has_kernel", lambda device, dtype: True)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one process."""
    os.environ.pop("RANK", None)
    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
