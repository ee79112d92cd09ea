"""The documents made from records: what each should hold, and writing those that do not hold it
yet."""

from pathlib import Path

from report import generation, headline, libraries, plots, sections, summary
from report.records import Device

HERE = Path(__file__).parents[1]
REPORT, PLOTS = HERE / "REPORT.md", HERE / "plots"
README, DOCS = HERE.parent / "README.md", HERE.parent / "docs"
SPEED, ACCELERATE = DOCS / "speed.md", DOCS / "how-to" / "accelerate.md"
TRANSFORMERS = DOCS / "how-to" / "transformers.md"
BEGIN, END = "<!-- figures: written by `make report` -->", "<!-- end of figures -->"


def texts(devices: list[Device]) -> dict[Path, str]:
    """What the report, the README and docs/speed.md should say, and the pages on other
    libraries."""
    lines = [sections.INTRODUCTION]
    for device in devices:
        lines += sections.section(device)
    return {
        REPORT: "\n".join(lines).rstrip() + "\n",
        README: _with_figures(README, headline.lines(devices)),
        SPEED: _with_figures(SPEED, summary.lines(devices)),
        ACCELERATE: _with_figures(ACCELERATE, libraries.lines(devices)),
        TRANSFORMERS: _with_figures(TRANSFORMERS, generation.lines(devices)),
    }


def _with_figures(path: Path, lines: list[str]) -> str:
    """A document's text with these figures between its marks."""
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    figures = "\n".join(lines)
    return f"{before}{BEGIN}\n{figures}\n{END}{rest.split(END)[1]}"


def write(devices: list[Device]) -> list[Path]:
    """Writes the documents and plots that differ from what they should hold; returns those."""
    wanted = {path: text.encode() for path, text in texts(devices).items()}
    for device in devices:
        wanted |= {PLOTS / name: png for name, png in plots.draw(device).items()}
    changed = [path for path, data in wanted.items() if not path.exists() or path.read_bytes() != data]
    for path in changed:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(wanted[path])
    return changed
