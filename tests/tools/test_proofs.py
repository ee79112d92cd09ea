"""Slow proofs of GPU code are left out where they have passed, and only there."""

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


def left_out() -> list[str]:
    """Return which of both tests a session would skip."""
    skipped: list[str] = []
    items = [SimpleNamespace(nodeid=x, add_marker=lambda mark, x=x: skipped.append(x)) for x in (PROOF, OTHER)]
    session: Any = proofs.Proofs()
    session.pytest_collection_modifyitems(items)
    return skipped


def finish(*outcomes: str, status: int = 0, keyword: str = "", **worker: Any) -> None:
    """A session in which the proof had these outcomes."""
    session: Any = proofs.Proofs()
    for told in outcomes:
        outcome, _, reason = told.partition(": ")
        report = SimpleNamespace(
            nodeid=PROOF, when="call", passed=outcome == "passed", outcome=outcome, longrepr=reason
        )
        session.pytest_runtest_logreport(report)
    config = SimpleNamespace(args=["tests"], option=SimpleNamespace(keyword=keyword), **worker)
    session.pytest_sessionfinish(SimpleNamespace(config=config), status)


def test_what_has_passed_is_left_out_until_something_changes(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_out() == []
    finish("passed", "skipped: none runs in sm_80")
    assert json.loads(record.read_text()) == HERE
    assert left_out() == [PROOF]
    monkeypatch.setattr(proofs, "present", lambda: HERE | {"triton": "3.9.0"})
    assert left_out() == []
    monkeypatch.setattr(proofs, "present", lambda: None)
    assert left_out() == []


def test_what_has_not_passed_is_not_recorded(record: Path) -> None:
    finish("passed", "failed", status=1)
    finish("passed", "skipped: needs nvcc")
    finish()
    finish("passed", status=2)
    finish("passed", workerinput={})
    finish("passed", keyword="one of them")
    assert not record.exists()


def test_the_hash_is_of_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builds.ROOT", tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.cu").write_text("1")
    seen = {proofs.hash_of([tmp_path / "a"], "3.8.0", [])}
    (tmp_path / "a" / "y.py").write_text("")
    seen.add(proofs.hash_of([tmp_path / "a"], "3.8.0", []))
    (tmp_path / "a" / "x.cu").write_text("2")
    seen.add(proofs.hash_of([tmp_path / "a"], "3.8.0", []))
    assert len(seen | {proofs.hash_of([tmp_path / "a"], "3.9.0", [])}) == 4
