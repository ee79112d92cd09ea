"""The benchmarks as users run them: a wrong kernel gets no time, the interpreter is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str, first_on_path: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """pytest --benchmark-only from the root of the project, outside of this process's workers."""
    path = os.pathsep.join([str(first_on_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: x for name, x in os.environ.items() if "XDIST" not in name} | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "--benchmark-only", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def test_the_interpreter_must_be_asked_for() -> None:
    done = run("benchmarks/", "--device", "interpreter")
    assert done.returncode != 0
    assert "--device interpreter needs TRITON_INTERPRET=1" in done.stderr


WRONG_KERNEL = """
import txl_kernels.backends.cpu as native

right = native.forward

def forward(call, prepared=None, need_lse=True):
    out, lse = right(call, prepared, need_lse)
    return out.mul_(1.001), lse

native.forward = forward
"""


def test_a_wrong_kernel_gets_no_time(tmp_path: Path) -> None:
    """On a kernel that is a thousandth off."""
    (tmp_path / "wrong_kernel.py").write_text(WRONG_KERNEL)
    record = tmp_path / "record.json"
    selected = ["benchmarks/groups/test_attention.py", "--device", "cpu", "-k", "test_length and L128 and not backward"]
    done = run(*selected, "-p", "wrong_kernel", "-q", "--record", str(record), first_on_path=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 5 passed" in done.stdout
    rows = {row["implementation"]: row for row in json.loads(record.read_text())["rows"]}
    wrong = rows.pop("rel_attention, native")
    assert wrong["status"] == "failed"
    assert "out is wrong" in wrong["error"]
    assert not any(key in wrong for key in ("median_ms", "gflops"))
    assert all("median_ms" in row for row in rows.values())
