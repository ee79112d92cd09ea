"""Selection of the newest measurement of each comparison and machine, from tracked records."""

import subprocess
from pathlib import Path

import pytest
from benchmark_records import SHAPE, ours, row, write

from report import records
from report.records import load, published, ratio


def read(folder: Path) -> list[records.Device]:
    return load(sorted(folder.glob("*.json")))


def test_newest_measurement_of_each_comparison(folder: Path) -> None:
    (device,) = read(folder)
    assert device.name == "A processor, 2 threads, avx2"
    assert [measured.ours()[0]["median_ms"] for measured in device.group("attention", "forward")] == [2.0]
    assert [measured.about["commit"] for measured in device.group("window")] == ["abc"]
    measured = device.group("evaluation speed")[1]
    mine = measured.find(role="ours", segment=256)
    assert ratio(measured.find(implementation="vanilla-flash"), mine) == 3800
    assert ratio(measured.find(implementation="another"), mine) is None


def test_comparison_of_which_nothing_was_available_is_left_out(tmp_path: Path) -> None:
    """An older measurement of it stays."""
    case = {"unit": "call", "direction": "forward", "shape": SHAPE}
    write(tmp_path, "2026-01-01", [ours("layers", case, "ours", 1.0)])
    write(tmp_path, "2026-01-02", [row("layers", case, "ours", status="unavailable", error="not installed")])
    (device,) = read(tmp_path)
    assert [measured.about["date"] for measured in device.group("layers")] == ["2026-01-01"]


@pytest.mark.parametrize(("isa", "family", "name"), [
    ("avx512_bf16", 25, "AMD EPYC (Zen 4), 2 threads, avx512_bf16"),
    ("avx512_bf16", 27, "AMD EPYC (family 27), 2 threads, avx512_bf16"),
    ("avx2", 25, "AMD EPYC, 2 threads, avx2"),
])  # fmt: skip
def test_processors_with_equal_names(tmp_path: Path, isa: str, family: int, name: str) -> None:
    rows = [ours("attention", {"unit": "call", "direction": "forward", "shape": SHAPE}, "ours", 1.0)]
    (device,) = load([write(tmp_path, "2026-01-01", rows, device="AMD EPYC", isa=isa, family=family)])
    assert device.name == name


CALL = {"unit": "call", "direction": "forward", "shape": SHAPE}


@pytest.mark.parametrize(("group", "case", "old", "now", "new"), [
    ("forms", CALL, "padded, told of lengths", "variants", "padded, with end"),
    ("step", {"unit": "token", "note": "10 s of sound"}, "bound: all but the attention", "step",
     "lower bound: a step without attention"),
    ("attention", CALL, "FlexAttention, captured bias", "attention", "FlexAttention, captured bias, default block sizes"),
], ids=["variants", "audio", "FlexAttention"])  # fmt: skip
def test_old_names(tmp_path: Path, group: str, case: dict[str, str], old: str, now: str, new: str) -> None:
    (measured,) = load([write(tmp_path, "2026-01-01", [row(group, case, old, 1.0)])])[0].group(now)
    assert list(measured.rows) == [new]
    assert "note" not in case or measured.case.note == "10 s of audio"


@pytest.mark.parametrize(("isa", "limit", "name", "has_share"), [
    ("amx", "bfloat16 peak", "bfloat16 peak, products of zeros", False),
    ("amx", "bfloat16 peak, random values", "bfloat16 peak, random values", True),
    ("avx512_bf16", "bfloat16 peak", "bfloat16 peak", True),
])  # fmt: skip
def test_shares_of_a_limit_that_multiplied_zeros_are_left_out(
    tmp_path: Path, isa: str, limit: str, name: str, has_share: bool
) -> None:
    """Shares of the limit of float32 stay."""
    case = {"unit": "call", "direction": "forward", "shape": SHAPE}
    rows = [
        ours("attention", case, "float32", 2.0, share_of_operations=0.5),
        ours("attention", case, "bfloat16", 1.0, share_of_operations=0.5, dtype="bfloat16"),
        row("attention", case, f"limit: {limit}", 1.0, role="limit", limit="operations", dtype="bfloat16"),
    ]
    (measured,) = load([write(tmp_path, "2026-01-01", rows, isa=isa)])[0].comparisons
    assert list(measured.rows) == ["float32", "bfloat16", f"limit: {name}"]
    assert "share_of_operations" in measured.rows["float32"]
    assert ("share_of_operations" in measured.rows["bfloat16"]) == has_share


@pytest.mark.parametrize("text", ["no JSON", '{"about": {}}'])
def test_not_a_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is not a benchmark record"):
        load([tmp_path / "x.json"])


def test_other_schemas_are_refused(tmp_path: Path) -> None:
    record = write(tmp_path, "2026-01-01", [], schema=2)
    with pytest.raises(ValueError, match=r"2026-01-01\.json is a record of schema 2, but .* reads schema 3"):
        load([record])


def test_untracked_records_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary repository, in which a run has left another record."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    rows = [ours("attention", {"unit": "call", "direction": "forward", "shape": SHAPE}, "ours", 1.0)]
    tracked = write(tmp_path, "2026-01-01", rows)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    write(tmp_path, "2026-01-02", rows)
    assert published() == [tracked]
