"""PYTEST_ADDOPTS is for the pytest that a user runs, and for none that a test or a tool runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_what_tests_pass_on() -> None:
    """Run by the test below with the variable set."""
    assert "PYTEST_ADDOPTS" not in os.environ


@pytest.mark.parametrize("processes", ["0", "1"])
def test_options_are_not_passed_on(processes: str) -> None:
    environment = {name: x for name, x in os.environ.items() if "XDIST" not in name} | {"PYTEST_ADDOPTS": "--maxfail=1"}
    only = f"{__file__}::{test_what_tests_pass_on.__name__}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", processes, only]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
