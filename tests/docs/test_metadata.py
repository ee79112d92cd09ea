"""What CITATION.cff and the badges say is what pyproject.toml says."""

import re
from pathlib import Path

import txl_kernels

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def title(badge: str) -> str:
    found = re.search(r"<title>(.*)</title>", (ROOT / "docs" / "badges" / f"{badge}.svg").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def test_citation() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {txl_kernels.__version__}\n" in citation
    assert f'\nversion = "{txl_kernels.__version__}"\n' in PROJECT
    assert '\nlicense = "Apache-2.0"\n' in PROJECT
    assert "\nlicense: Apache-2.0\n" in citation


def test_badges() -> None:
    versions = re.findall(r"Python :: (3\.\d+)", PROJECT)
    minimum = re.search(r'"torch>=([\d.]+)"', PROJECT)
    assert minimum is not None
    assert title("license") == "license: Apache-2.0"
    assert title("python") == f"python: {versions[0]} to {versions[-1]}"
    assert title("torch") == f"torch: {minimum[1]} or newer"
