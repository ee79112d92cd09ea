"""Records become a report: the newest of each race and machine, failures shown, documents that can be checked."""

import json
from pathlib import Path
from typing import Any

import pytest
import records

import report

ABOUT = {
    "kind": "cpu", "device": "A processor", "threads": 2, "isa": "avx2", "torch": "2.13.0", "dtype": "float32",
    "commit": "abc", "uncommitted_changes": False,
}  # fmt: skip


def row(group: str, case: str, contestant: str, ms: float | None = None, **more: Any) -> dict[str, Any]:
    times = (
        {"median_ms": ms, "quartiles_ms": [ms, ms], "rounds": 5, "status": "measured"} if ms else {"status": "failed"}
    )
    return {"group": group, "case": case, "contestant": contestant} | times | more


def write(folder: Path, date: str, rows: list[dict[str, Any]], **about: Any) -> None:
    record = {"about": ABOUT | {"date": date} | about, "rows": rows}
    (folder / f"{date}.json").write_text(json.dumps(record))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    case = "B1 H1 L1 M1 D1"
    old = [row("forward", case, "ours", 9.0), row("window", "w", "ours", 7.0)]
    write(tmp_path, "2026-01-01", old)
    new = [
        row("forward", case, "ours", 2.0, gflops=50.0, share_of_operations=0.5),
        row("forward", case, "other", 5.0),
        row("forward", case, "wrong", error="AssertionError: out is wrong"),
        row("forward", case, "limit: FMA peak", 1.0, gflops=100.0, limit="operations"),
    ]
    for length, slow in ((800, 400.0), (3800, 3800.0)):
        where = ("evaluation speed", f"enwik8-base, 12 layers, attention length {length}, one token")
        new += [row(*where, "ours, cached keys and values, segments of 128", 2.0)]
        new += [row(*where, "ours, cached keys and values, segments of 512", 1.0)]
        new += [row(*where, "vanilla, flash SDPA", slow)]
    new += [row("peak memory", f"attention, L = M = {n}", "ours", 1.0, peak_mib=float(n)) for n in (512, 1024)]
    new += [row("speed against length, forward", f"B1 H8 L{n} M{n} D64", "ours", float(n)) for n in (128, 256)]
    write(tmp_path, "2026-02-02", new, commit="def")
    write(tmp_path, "2026-03-03", [row("forward", case, "ours", 1.0)], kind="rehearsal")
    return tmp_path


def test_newest_of_each_race(folder: Path) -> None:
    (device,) = records.load(sorted(folder.glob("*.json")))
    assert device.name == "A processor, 2 threads, avx2"
    assert [race.ms("ours") for race in device.group("forward")] == [2.0]
    assert [race.about["commit"] for race in device.group("window")] == ["abc"]
    race = device.group("evaluation speed")[1]
    assert race.ratio("vanilla, flash SDPA", "ours, cached keys and values, segments of 512") == 3800
    assert race.ratio("nobody", "ours, cached keys and values, segments of 512") is None


def test_not_a_record(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match=r"x\.json is not a benchmark record"):
        records.load([tmp_path / "x.json"])


def test_report(folder: Path, tmp_path: Path) -> None:
    plots = tmp_path / "plots"
    text = report.documents(records.load(sorted(folder.glob("*.json"))), plots)[report.REPORT]
    assert "| other | 5.00 [5.00, 5.00] | 2.50 |" in text
    assert "| ours | 2.00 [2.00, 2.00] | 1.00 | 50% |" in text
    assert "failed: AssertionError: out is wrong" in text
    assert "| 3,800 | 1,874x | 1.00 | 3,800x |" in text
    assert "| ours | 512 | 1,024 |" in text
    assert "2026-01-01, commit abc" in text
    assert "2026-02-02, commit def" in text
    for line in text.splitlines():
        if line.startswith("!["):
            picture = plots / line.split("plots/")[1].rstrip(")")
            assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(list(plots.iterdir())) == text.count("![")
    again = report.documents(records.load(sorted(folder.glob("*.json"))), None)[report.REPORT]
    assert again == text  # with or without drawing


def test_documents_say_what_the_records_say() -> None:
    for path, text in report.documents(records.load(records.published()), None).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} differs from the records: make report"
