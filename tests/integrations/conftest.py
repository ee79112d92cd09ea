"""The peers' packages before all others, for a run of these tests alone (`make test-integrations`):
another transformers than the one that other tests compare with."""

import pytest

from implementations import bare_peers

bare_peers.use()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if bare_peers.AVAILABLE:
        return
    for item in items:
        if item.get_closest_marker("peers"):
            item.add_marker(pytest.mark.skip(reason="other libraries' layers: run `make test-integrations`"))
