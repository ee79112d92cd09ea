"""A folder with three records of one machine: an old one, a new one, and one of the interpreter."""

from pathlib import Path

import pytest
from benchmark_records import SHAPE, ours, row, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = tmp_path / "results"
    records.mkdir()
    forward = {"unit": "call", "direction": "forward", "shape": SHAPE}
    backward = forward | {"direction": "forward+backward"}
    old = [ours("attention", forward, "ours", 9.0), ours("window", {"unit": "call", "note": "w"}, "ours", 7.0)]
    write(records, "2026-01-01", old)
    new = [
        ours("attention", forward, "ours", 2.0, gflops=50.0, share_of_operations=0.5),
        row("attention", forward, "other", 5.0),
        row("attention", forward, "wrong", error="AssertionError: out is wrong"),
        row("attention", forward, "FMA peak", 1.0, role="limit", gflops=100.0, limit="operations"),
        ours("attention", backward, "ours", 3.0, gflops=50.0),
        row("attention", backward, "FMA peak", 1.5, role="limit", gflops=99.0, limit="operations", disturbed=1.5),
    ]
    for length, slow in ((800, 400.0), (3800, 3800.0)):
        case = {"unit": "token", "model": "enwik8-base", "layers": 12, "attn_len": length}
        where = ("evaluation speed", case)
        new += [ours(*where, f"ours in {n}s", 256.0 / n, segment=n) for n in (128, 256)]
        new += [row(*where, "vanilla-flash", slow), row(*where, "original", 8.0, segment=128)]
    for n in (512, 1024):
        case = {"unit": "call", "direction": "forward+backward", "shape": SHAPE | {"L": n, "M": n}}
        new += [ours("peak memory", case, "ours", 1.0, peak_mib=float(n)), row("peak memory", case, "other", 1.0)]
    step = {"unit": "token", "direction": "forward+backward", "model": "wt103-base", "note": "267,735 words"}
    new += [ours("softmax", step, "adaptive", 2.0), ours("softmax", step, "adaptive-4", 1.0)]
    for name, ms in (("torch-adaptive", 3.0), ("torch-adaptive-4", 0.9), ("full-softmax", 12.0)):
        new.append(row("softmax", step, name, ms))
    step = {"unit": "step", "model": "wt103-base", "note": "softmax"}
    new += [ours("peak memory", step, "adaptive", 1.0, peak_mib=500.0)]
    new += [row("peak memory", step, "full-softmax", 1.0, peak_mib=2000.0)]
    write(records, "2026-02-02", new, commit="def")
    write(records, "2026-03-03", [ours("attention", forward, "ours", 1.0)], kind="interpreter")
    return records
