"""The record of slow proofs of GPU code: those that passed with the same sources are skipped."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import proofs
import pytest

HERE = {"triton": "3.8.0", "sources and nvcc": "0123456789abcdef"}
PROOF, OTHER = "tests/txl_kernels/cuda/test_ptx.py::test_contract[x]", "tests/txl/test_ranks.py::test_y"


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proofs, "present", lambda: dict(HERE))
    monkeypatch.setattr(proofs, "RECORD", tmp_path / "slow_proofs.json")
    return tmp_path / "slow_proofs.json"


def skipped() -> list[str]:
    """Return which of both tests a session would skip."""
    found: list[str] = []
    items = [SimpleNamespace(nodeid=x, add_marker=lambda mark, x=x: found.append(x)) for x in (PROOF, OTHER)]
    session: Any = proofs.Proofs()
    session.pytest_collection_modifyitems(items)
    return found


def finish(*outcomes: str, status: int = 0, keyword: str = "", **worker: Any) -> None:
    """End a session in which the proof had these outcomes."""
    session: Any = proofs.Proofs()
    for given in outcomes:
        outcome, _, reason = given.partition(": ")
        report = SimpleNamespace(
            nodeid=PROOF, when="call", passed=outcome == "passed", outcome=outcome, longrepr=reason
        )
        session.pytest_runtest_logreport(report)
    config = SimpleNamespace(args=["tests"], option=SimpleNamespace(keyword=keyword), **worker)
    session.pytest_sessionfinish(SimpleNamespace(config=config), status)


def test_proofs_are_skipped_until_something_changes(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert skipped() == []
    finish("passed", "skipped: none runs in sm_80")
    assert json.loads(record.read_text()) == HERE
    assert skipped() == [PROOF]
    for here in (HERE | {"triton": "3.9.0"}, None):
        monkeypatch.setattr(proofs, "present", lambda here=here: here)
        assert skipped() == []


def test_incomplete_sessions_are_not_recorded(record: Path) -> None:
    finish("passed", "failed", status=1)
    finish("passed", "skipped: needs nvcc")
    finish()
    finish("passed", status=2)
    finish("passed", workerinput={})
    finish("passed", keyword="one of them")
    assert not record.exists()


def test_hash_covers_every_file_and_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builds.ROOT", tmp_path)
    found = set()
    for name, text in (("x.cu", "1"), ("y.py", ""), ("x.cu", "2")):
        (tmp_path / name).write_text(text)
        found.add(proofs.hash_of([tmp_path], "3.8.0", []))
    assert len(found | {proofs.hash_of([tmp_path], "3.9.0", [])}) == 4
