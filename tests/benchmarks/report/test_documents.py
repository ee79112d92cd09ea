"""Documents made from records, with failures; unchanged files are not written."""

import io
import subprocess
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from report import charts, documents
from report.documents import PLOTS, README
from report.records import load, published


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the documents to a temporary folder."""
    files = {
        "README": "README.md",
        "SPEED": "speed.md",
        "ACCELERATE": "accelerate.md",
        "REPORT": "REPORT.md",
        "PLOTS": "plots",
    }
    for name, file in files.items():
        monkeypatch.setattr(documents, name, tmp_path / file)
    for file in ("README.md", "speed.md", "accelerate.md"):
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


def test_page_on_speed_has_a_heading_for_each_machine_and_group(folder: Path, elsewhere: Path) -> None:
    documents.write(load(sorted(folder.glob("*.json"))))
    text = (elsewhere / "speed.md").read_text()
    for line in (
        "## Attention",
        "| A processor, 2 threads, avx2; B1 H1 L1 M1 D1, float32 | 2.00 / 3.00 |  |  | 50% / disturbed |  / disturbed |",
        "## A processor, 2 threads, avx2",
        "### Attention, A processor, 2 threads, avx2",
        "| ours | 2.00, 50% |",
        "### Evaluation, A processor, 2 threads, avx2",
        "| 3,800 | 1,874x |  | 1,900x / 3,800x |  |  |",
    ):
        assert f"\n{line}\n" in text, line
    pictures = [line.split("plots/")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert sorted(pictures) == sorted(path.name for path in (elsewhere / "plots").iterdir())
    assert pictures
    for name in pictures:
        assert (elsewhere / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_unchanged_files_are_not_written(folder: Path, elsewhere: Path) -> None:
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


@pytest.mark.slow
def test_plots_agree_with_the_published_records() -> None:
    """Plots have the same pixels with the matplotlib of requirements.txt, which drew them. A
    processor with other vector instructions may round smoothed edges otherwise (AVX2 and AVX-512:
    by 1 of 255 in 14 pixels)."""
    listed = subprocess.run(["git", "ls-files", "."], capture_output=True, text=True, cwd=PLOTS, check=True)
    drawn = charts.draw(load(published()))
    assert drawn.keys() == set(listed.stdout.split())
    if f"matplotlib=={matplotlib.__version__}\n" in (README.parent / "requirements.txt").read_text():
        for name, png in drawn.items():
            difference = np.abs(imread(io.BytesIO(png)) - imread(PLOTS / name)).max()
            assert difference <= 4 / 255, f"{name} differs by {255 * difference:.0f} of 255"
