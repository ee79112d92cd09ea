"""Agreement of CITATION.cff and other files with pyproject.toml."""

import re
from pathlib import Path

import build_wheel

import txl_kernels

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_citation() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {txl_kernels.__version__}\n" in citation
    assert f'\nversion = "{txl_kernels.__version__}"\n' in PROJECT
    assert '\nlicense = "Apache-2.0"\n' in PROJECT
    assert "\nlicense: Apache-2.0\n" in citation


def test_version_of_the_site_and_of_the_changelog() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.findall(r"txl-kernels (\d+\.\d+\.\d+)", site) == [txl_kernels.__version__] * 2
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (date,) = re.findall(
        rf"^## {re.escape(txl_kernels.__version__)} \((\d{{4}}-\d\d-\d\d)\)$", changelog, flags=re.MULTILINE
    )
    assert f"\ndate-released: {date}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_pythons() -> None:
    """Classifiers, wheels, CI and pages name the same Pythons."""
    minors = re.findall(r"Python :: 3\.(\d+)", PROJECT)
    span = f"3.{minors[0]} to 3.{minors[-1]}"
    for file in ("README.md", "docs/index.md", "docs/install.md", "Makefile", ".github/workflows/wheels.yml"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert set(re.findall(r"3\.\d+ to 3\.\d+", text)) == {span}, file
    wheels = re.search(r"\nbuild = (.*)\n", PROJECT)
    for platform in ("manylinux_aarch64", "macosx_arm64"):
        assert f'"cp31{{{",".join(minor[1:] for minor in minors)}}}-{platform}"' in wheels[1]
    assert set(build_wheel.VERSIONS) >= {f"3.{minor}" for minor in minors}
    ci = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert f"python-version: {[f'3.{minor}' for minor in minors]}".replace("'", '"') in ci
