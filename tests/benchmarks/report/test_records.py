"""The newest record of each comparison and machine counts; tests see tracked records only."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmark_records import ABOUT, SHAPE, ours, row, write

from harness.case import MOST_DISTURBED
from report import records
from report.records import Measured, load, published, ratio


def read(folder: Path) -> list[records.Device]:
    return load(sorted(folder.glob("*.json")))


def test_newest_of_each_comparison(folder: Path) -> None:
    (device,) = read(folder)
    assert device.name == "A processor, 2 threads, avx2"
    assert [measured.ours()[0]["median_ms"] for measured in device.group("attention", "forward")] == [2.0]
    assert [measured.about["commit"] for measured in device.group("window")] == ["abc"]
    measured = device.group("evaluation speed")[1]
    mine = measured.find(role="ours", segment=256)
    assert ratio(measured.find(algorithm="vanilla-flash"), mine) == 3800
    assert ratio(measured.find(algorithm="nobody"), mine) is None


@pytest.mark.parametrize(("told", "peak", "name"), [
    ({"isa": "avx512_bf16", "family": 25}, None, "AMD EPYC (Zen 4), 2 threads, avx512_bf16"),
    ({"isa": "avx512_bf16", "family": 26}, 236.0, "AMD EPYC (Zen 5), 2 threads, avx512_bf16"),
    ({"isa": "avx512_bf16", "family": 27}, None, "AMD EPYC (family 27), 2 threads, avx512_bf16"),
    ({"isa": "avx512_bf16"}, 236.0, "AMD EPYC (Zen 4), 2 threads, avx512_bf16"),
    ({"isa": "avx512_bf16"}, 550.0, "AMD EPYC (Zen 5), 2 threads, avx512_bf16"),
    ({"isa": "avx512_bf16"}, None, "AMD EPYC (Zen 5), 2 threads, avx512_bf16"),
    ({"isa": "avx512"}, None, "AMD EPYC (Zen 4), 2 threads, avx512"),
    ({"isa": "avx2", "family": 25}, None, "AMD EPYC, 2 threads, avx2"),
])  # fmt: skip
def test_processors_of_one_name(tmp_path: Path, told: dict[str, Any], peak: float | None, name: str) -> None:
    """Units with a peak of their own, such as bfloat16's, do not tell which it is."""
    case = {"unit": "call", "direction": "forward", "shape": SHAPE}
    rows = [ours("attention", case, "ours", 1.0)]
    for dtype, gflops in ((None, peak), ("bfloat16", 1000.0)):
        if gflops is not None:
            limit = row("attention", case, f"{dtype} peak", 1.0, role="limit", gflops=gflops, limit="operations")
            rows.append(limit | ({} if dtype is None else {"dtype": dtype}))
    (device,) = load([write(tmp_path, "2026-01-01", rows, device="AMD EPYC", **told)])
    assert device.name == name


@pytest.mark.parametrize("text", ["[]", "{}", '{"about": []}', "no JSON", '{"about": {}}'])
def test_not_a_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is not a benchmark record"):
        load([tmp_path / "x.json"])


@pytest.mark.parametrize("schema", [1, 3, None])
def test_other_schemas_are_refused(tmp_path: Path, schema: int | None) -> None:
    about = {k: x for k, x in (ABOUT | {"date": "2026-01-01", "schema": schema}).items() if x is not None}
    (tmp_path / "x.json").write_text(json.dumps({"about": about, "rows": []}))
    with pytest.raises(ValueError, match=rf"x\.json is a record of schema {schema or 1}, but .* reads schema 2"):
        load([tmp_path / "x.json"])


def published_comparisons() -> list[Measured]:
    return [measured for device in load(published()) for measured in device.comparisons]


def test_no_share_of_a_disturbed_limit_is_published() -> None:
    found = published_comparisons()
    assert any(measured.disturbed for measured in found)
    for measured in found:
        rows = measured.rows.values()
        slowed = [x["median_ms"] / x["fastest_ms"] > MOST_DISTURBED for x in rows if "limit" in x]
        assert bool(measured.disturbed) == any(slowed)
        assert not (measured.disturbed and any("share_of_operations" in x or "share_of_bytes" in x for x in rows))


def test_untracked_records_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the results in a repository of its own, where a run has left another record."""
    tracked = [path.name for path in published()]
    for path in published():
        shutil.copy(path, tmp_path)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    case = {"unit": "call", "direction": "forward", "shape": SHAPE}
    write(tmp_path, "2099-01-01", [ours("attention", case, "rel_attention, cuda", 1.0, backend="cuda")], kind="cuda")
    before = [device.name for device in load(published())]
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert [path.name for path in published()] == tracked
    assert [device.name for device in load(published())] == before
    assert len(records.present()) == len(tracked) + 1  # `make report` takes it


def test_without_git_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    with pytest.raises(RuntimeError, match="which records are published cannot be told without git"):
        published()
