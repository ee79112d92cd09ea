"""Tests shared out to processes by hand: nearly all of their time goes into compiling kernels."""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_kit.records import Record


def run(record: Record, shards: int, seconds: float, marker: str, paths: list[str]) -> None:
    """Each shard is an item. After so many seconds those that still run are cut short: failures
    that they have printed count."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, "--backends", "triton"]
    deadline = time.monotonic() + seconds
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for n in range(1, shards + 1):
            record.add(step="tests", item=f"shard {n}/{shards}", state="begun")
            full = [*command, "--tb=no", "--shard", f"{n}/{shards}", *paths]
            output = Path(folder, f"shard-{n}")
            with open(output, "wb") as out:
                started.append((subprocess.Popen(full, stdout=out, stderr=subprocess.STDOUT), output))
        for n, (process, output) in enumerate(started, 1):
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
            text = output.read_text(errors="replace")
            print(text)
            values, reason = outcome(code, text)
            bad += reason is not None
            row = {"state": "measured"} if reason is None else {"state": "failed", "reason": reason}
            record.add(step="tests", item=f"shard {n}/{shards}", **row, **values)
    if bad:
        raise SystemExit(f"{bad} of {shards} shards failed or were cut short")


def outcome(code: int | None, text: str) -> tuple[dict[str, dict[str, int]], str | None]:
    """Counts that pytest printed, and why the shard is not right. code: None if it was killed."""
    last = text.strip().splitlines()[-1:] or [""]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last[0])}
    if code in (0, 5):  # 5: no test in this shard
        return {"counts": counts}, None
    failures = list(dict.fromkeys(re.findall(r"^(?:FAILED |ERROR |failed: ).*", text, re.MULTILINE)))
    done = (re.findall(r"\[ *(\d+%)\]", text) or ["0%"])[-1]
    how = f"exit status {code}" if code is not None else f"cut short after {done}"
    return {"counts": counts}, "; ".join([how, *failures])[:2000]
