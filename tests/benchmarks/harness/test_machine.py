"""Which commit a record is of."""

import pytest

from harness.machine import Machine


@pytest.mark.parametrize(
    ("given", "commit", "changed"), [("abc123", "abc123", False), ("abc123-dirty", "abc123", True)]
)
def test_a_tree_without_its_history_is_told_its_commit(
    given: str, commit: str, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCHMARK_COMMIT", given)
    about = Machine("cpu").about()
    assert (about["commit"], about["uncommitted_changes"]) == (commit, changed)
