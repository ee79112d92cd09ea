"""Records become documents, failures shown; nothing is written that did not change."""

import subprocess
from pathlib import Path

import matplotlib
import pytest
from benchmark_records import ours, row, write

from report import charts, documents
from report.documents import PLOTS, README, texts
from report.records import load, published


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Documents go to a folder of their own."""
    files = {
        "README": "README.md",
        "SPEED": "speed.md",
        "ACCELERATE": "accelerate.md",
        "TRANSFORMERS": "transformers.md",
        "REPORT": "REPORT.md",
        "PLOTS": "plots",
    }
    for name, file in files.items():
        monkeypatch.setattr(documents, name, tmp_path / file)
    for file in ("README.md", "speed.md", "accelerate.md", "transformers.md"):
        (tmp_path / file).write_text(f"before\n{documents.BEGIN}\nold\n{documents.END}\nafter\n")
    return tmp_path


def test_report(folder: Path, elsewhere: Path) -> None:
    documents.write(load(sorted(folder.glob("*.json"))))
    text = (elsewhere / "REPORT.md").read_text()
    for line in (
        "| other | 5.00 [5.00, 5.00], 2.50x |",
        "| ours | 2.00 [2.00, 2.00], 50% |",
        "| wrong | failed: AssertionError: out is wrong |",
        "| FMA peak | 1.00 [1.00, 1.00], 100 GFLOP/s |",
        "*disturbed: forward+backward, B1 H1 L1 M1 D1: the limit's median is 1.50 times its fastest round",
        "| 3,800 | 1,874x | 1,900x / 3,800x | 4.00x |",
        "| peak memory | forward+backward, B1 H1 L512 M512 D1 | forward+backward, B1 H1 L1024 M1024 D1 |",
        "| ours | 512 MiB | 1,024 MiB |",
        "| full-softmax | 12.0 [12.0, 12.0], 6.00x |",
        "| peak memory | wt103-base, softmax |",
        "| full-softmax | 2,000 MiB, 4.00x |",
        "2026-01-01, commit abc",
        "2026-02-02, commit def",
    ):
        assert line in text
    pictures = [line.split("plots/")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert sorted(pictures) == sorted(path.name for path in (elsewhere / "plots").iterdir())
    assert not any("share-backward" in name for name in pictures)  # all of it was disturbed
    for name in pictures:
        assert (elsewhere / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_speed(folder: Path, elsewhere: Path) -> None:
    documents.write(load(sorted(folder.glob("*.json"))))
    text = (elsewhere / "speed.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    for line in (
        "| attention | forward, B1 H1 L1 M1 D1 |",
        "| ours | 2.00 [2.00, 2.00], 50% |",
        "| 800 | 363x | 200x / 400x | 4.00x |",
        "| full-softmax | 2,000 MiB, 4.00x |",
        "| import torch | 1,300 [1,300, 1,300], 0.867x |",
    ):
        assert line in text


def test_readme(tmp_path: Path, elsewhere: Path) -> None:
    """A row a machine; an implementation that was not measured is left empty."""
    algorithms = {"original-qkbh": 9.0, "sdpa-dense-bias": 4.0, "sdpa": 1.6}
    records = []
    for date, isa, undisturbed in (("2026-01-01", "avx2", True), ("2026-02-02", "amx", False)):
        rows = []
        for direction, factor in (("forward", 1.0), ("forward+backward", 3.0)):
            case = {"unit": "call", "direction": direction, "shape": {"B": 1, "H": 1, "L": 8, "M": 1, "D": 1}}
            busy = not undisturbed and direction != "forward"
            share = {"disturbed": 1.5} if busy else {"share_of_operations": 0.6}
            rows.append(ours("attention", case, "ours", 2.0 * factor, **share))
            rows.append(ours("attention", case, "ours, bfloat16", 1.0 * factor, dtype="bfloat16"))
            known = algorithms if undisturbed else {"sdpa": 1.6}
            rows += [row("attention", case, name, factor * ms, **share) for name, ms in known.items()]
        other = {"unit": "call", "direction": "forward", "shape": {"B": 1, "H": 1, "L": 9, "M": 1, "D": 1}}
        rows.append(ours("attention", other, "ours", 77.0))
        records.append(write(tmp_path, date, rows, isa=isa, device="AMD EPYC"))
    documents.write(load(records))
    text = (elsewhere / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[0] == (
        "| machine | ours | the paper's PyTorch code | SDPA with dense bias | plain SDPA | share of the FMA peak, ours "
        "| share of the FMA peak, plain SDPA | measured |"
    )
    assert lines[2:] == [
        "| AMD EPYC, 2 threads, amx | 2.00 / 6.00 |  |  | 1.60 / 4.80 | 60% / disturbed | 60% / disturbed "
        "| 2026-02-02, commit abc |",
        "| AMD EPYC, 2 threads, avx2 | 2.00 / 6.00 | 9.00 / 27.0 | 4.00 / 12.0 | 1.60 / 4.80 | 60% / 60% | 60% / 60% "
        "| 2026-01-01, commit abc |",
    ]
    joined = " ".join(text.split())
    assert "`pytest benchmarks/ --benchmark-only`" in joined
    assert "B1 H1 L8 M1 D1, float32, torch 2.13.0, milliseconds" in joined


def test_shares_stand_beside_ratios_and_a_slow_sdpa_is_told(tmp_path: Path, elsewhere: Path) -> None:
    case = {"unit": "token", "model": "enwik8-base", "layers": 12, "attn_len": 3800}
    where = ("evaluation speed", case)
    rows = [ours(*where, f"ours in {n}s", 256.0 / n, segment=n, share_of_operations=n / 512) for n in (128, 256)]
    rows += [row(*where, "vanilla-flash", 3800.0, share_of_operations=0.4)]
    rows += [row(*where, "FMA peak", 1.0, role="limit", gflops=100.0, limit="operations")]
    record = write(tmp_path, "2026-01-01", rows, device="AMD EPYC", isa="avx512")
    documents.write(load([record]))
    for file in ("REPORT.md", "speed.md"):
        text = (elsewhere / file).read_text()
        assert "| 3,800 | 1,874x | 25% / 50% | 1,900x / 3,800x, 40% |" in text
        assert "over FMA peak" not in text
    for file in ("README.md", "REPORT.md", "speed.md"):
        assert "SDPA's too, are MKL's, which is slow on AMD's" in " ".join((elsewhere / file).read_text().split())


def test_without_a_new_record_no_file_changes(folder: Path, elsewhere: Path) -> None:
    devices = load(sorted(folder.glob("*.json")))

    def files() -> dict[Path, tuple[int, bytes]]:
        found = [path for path in elsewhere.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    names = {path.name for path in documents.write(devices)}
    assert {"README.md", "REPORT.md", "speed.md"} < names
    assert any(name.endswith(".png") for name in names)
    before = files()
    assert documents.write(load(sorted(folder.glob("*.json")))) == []
    assert files() == before
    picture = next((elsewhere / "plots").iterdir())
    picture.write_bytes(b"something else")
    assert documents.write(devices) == [picture]
    assert files()[picture][1] == before[picture][1]


LAYERS = "other libraries' layers"


def test_other_libraries(tmp_path: Path, elsewhere: Path) -> None:
    """A row a layer, a column a shape: its time and the accelerated one's."""
    rows = []
    for length, slow, fast in ((256, 30.0, 20.0), (1000, 400.0, 100.0)):
        case = {"unit": "call", "direction": "forward", "model": "Someone's"}
        case |= {"shape": {"B": 1, "H": 8, "L": length, "M": 0, "D": 64}}
        rows += [row(LAYERS, case, "accelerated", fast, role="ours", algorithm="accelerated")]
        rows += [row(LAYERS, case, "original", slow, algorithm="original")]
    documents.write(load([write(tmp_path, "2026-01-01", rows)]))
    text = (elsewhere / "accelerate.md").read_text()
    assert "other libraries' layers, forward, milliseconds, theirs / ours (as a multiple):" in text
    assert "|  | B1 H8 L256 M0 D64 | B1 H8 L1000 M0 D64 |" in text
    assert "| Someone's | 30.0 / 20.0 (1.50x) | 400 / 100 (4.00x) |" in text


def test_documents_say_what_the_published_records_say() -> None:
    """By the tracked records alone: a run on this machine may have left others."""
    devices = load(published())
    for path, text in texts(devices).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} differs from the records: make report"


def test_published_plots_are_those_of_the_published_records() -> None:
    """Byte for byte with the matplotlib they were drawn with, the one in requirements.txt."""
    listed = subprocess.run(["git", "ls-files", "."], capture_output=True, text=True, cwd=PLOTS, check=True)
    drawn = {name: png for device in load(published()) for name, png in charts.draw(device).items()}
    assert drawn.keys() == set(listed.stdout.split())
    if f"matplotlib=={matplotlib.__version__}\n" in (README.parent / "requirements.txt").read_text():
        assert [name for name, png in drawn.items() if (PLOTS / name).read_bytes() != png] == []
