"""Python in new processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, *, cwd: Path = ROOT, **environment: str) -> str:
    """Return what the code prints in a new process, which must succeed within two minutes."""
    command, variables = [sys.executable, "-c", code], os.environ | environment
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
