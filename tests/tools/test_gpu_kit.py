"""The half-hour kit, without a GPU: steps that end as they should not, the summary of records with
known answers, and carried kernels that are found."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_kit import caches, cases, counters, model, shards, summary, targets
from gpu_kit.records import Record, work_through
from gpu_kit.steps import Step, run_all
from gpu_kit.work import Work, choices

ROOT = Path(__file__).parents[2]


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "call1.jsonl")


def ends(record: Record) -> dict[str, tuple[str, str]]:
    """How each step ended."""
    return {row["step"]: (row["state"], row["reason"] or "") for row in record.rows() if "item" not in row}


def test_a_step_that_fails_or_hangs_or_is_impossible_leaves_its_reason_and_the_others_run(record: Record) -> None:
    steps = [
        Step("fails", python("print('why'); raise SystemExit(3)"), 20),
        Step("hangs", python("import time; print('here', flush=True); time.sleep(60)"), 4),
        Step("impossible", ["no-such-tool"], 20, needs="no-such-tool"),
        Step("well", python("print('fine')"), 20),
    ]
    begun = time.monotonic()
    assert not run_all(steps, record, record.path.parent, 60)
    assert time.monotonic() - begun < 30
    assert ends(record) == {
        "fails": ("failed", "exit status 3: why"),
        "hangs": ("timeout", "killed at its limit of 4 s: here"),
        "impossible": ("not run", "there is no no-such-tool"),
        "well": ("done", ""),
    }
    assert "fine" in (record.path.parent / "log.txt").read_text()


def test_nothing_is_started_when_the_time_is_up(record: Record) -> None:
    steps = [Step("long", python("import time; time.sleep(60)"), 60), Step("late", python("print()"), 60)]
    assert not run_all(steps, record, record.path.parent, 5.5)
    assert ends(record)["long"][0] == "timeout"
    assert ends(record)["late"] == ("not run", "the time is up")


DIES = """
import os, sys, time
from pathlib import Path
from gpu_kit.records import Record, work_through

def die(how):
    if how == "killed":
        os.kill(os.getpid(), 9)
    if how == "hangs":
        time.sleep(60)
    if how == "raises":
        raise ValueError("no good")
    return {"value": how}

items = [(how, lambda how=how: die(how)) for how in ("one", "killed", "two", "raises", "hangs", "three")]
work_through(Record(Path(sys.argv[1])), "items", items)
"""


def test_a_process_that_dies_or_hangs_costs_one_item(record: Record) -> None:
    step = Step("items", python(DIES, record.path), 60, patience=2.5, env={"PYTHONPATH": str(ROOT / "tools")})
    assert run_all([step], record, record.path.parent, 60)
    found = {row["item"]: row for row in record.rows() if row.get("state") in ("measured", "failed") and "item" in row}
    assert {name: row["state"] for name, row in found.items()} == {
        "one": "measured", "two": "measured", "three": "measured",
        "killed": "failed", "raises": "failed", "hangs": "failed",
    }  # fmt: skip
    assert "SIGKILL" in found["killed"]["reason"]
    assert found["raises"]["reason"] == "ValueError: no good"
    assert "without a row" in found["hangs"]["reason"]


def test_a_step_waits_for_one_beside_it(record: Record, tmp_path: Path) -> None:
    made = tmp_path / "made"
    slow = python("import sys, time; time.sleep(1); open(sys.argv[1], 'w').close()", made)
    needs = python("import os, sys; raise SystemExit(not os.path.exists(sys.argv[1]))", made)
    steps = [
        Step("build", slow, 20, beside=True),
        Step("quick", python("print()"), 20),
        Step("use", needs, 20, after="build"),
    ]
    assert run_all(steps, record, tmp_path, 60)
    assert [row["step"] for row in record.rows()] == ["quick", "build", "use"]


def test_a_line_cut_short_is_passed_over(record: Record) -> None:
    work_through(record, "s", [("a", lambda: {"x": 1})])
    with open(record.path, "a") as lines:
        lines.write('{"step": "s", "item": "b", "sta')
    assert record.ended("s") == {"a"}
    assert record.lost("s") == []


def times(name: str, length: int, forward: float, both: float, **kernels: float) -> dict[str, Any]:
    work = Work(name, B=8, H=16, L=length, M=length, D=64)
    timed = [{"ms": ms, "kernels": kernels, "sm_mhz": 1700} for ms in (forward, both)]
    item = f"{name}, B8 H16 L{length} M{length} D64"
    return {"step": "times", "item": item, "state": "measured", "work": vars(work)} | dict(
        zip(("forward", "forward+backward"), timed, strict=True)
    )


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Records of a device with 100 multiprocessors."""
    record = Record(tmp_path / "call1.jsonl")
    limits = {"name": "a GPU", "capability": [9, 0], "multiprocessors": 100}
    record.add(step="machine", item="limits", state="measured", **limits)
    record.add(step="machine", item="copy", state="measured", gb_per_s=4000.0)
    record.add(step="machine", state="done", seconds=3.0, reason=None)
    tiles = Work("", B=8, H=16, L=2048, M=2048, D=64).tiles
    us = {"forward_kernel": 1000 * tiles / 170_000, "backward_keys_kernel": 4000 * tiles / 170_000}
    record.add(**times("ours", 2048, 3.0, 10.0, **us))
    record.add(**times("ours, the same bits", 2048, 3.0, 12.0))
    record.add(**times("flash SDPA", 2048, 2.0, 4.0))
    record.add(step="times", item="decode, triton, B8 H8 L1 M3800 D64", state="measured", gb_per_s=3000.0)
    record.add(step="smoke", item="D64 bounds", state="failed", reason="Wrong: q 0.3")
    record.add(step="same bits", item="D64", state="measured", runs=20, differing={"k": 3})
    record.add(step="times", state="timeout", seconds=210.0, reason="killed at its limit of 210 s: ")
    sweep = Record(tmp_path / "call2.jsonl")
    for name, us_of_it in (
        (cases.TABLE, 200.0),
        ("64x64, 8 warps, 2 stages", 150.0),
        ("32x32, 4 warps, 1 stages", 300.0),
    ):
        sweep.add(step="sweep", item=f"D64 backward_keys, {name}", state="measured", us=us_of_it)
    shape = {"B": 8, "H": 16, "L": 2048, "M": 2048, "D": 64}
    rows = [
        {
            "group": "attention",
            "case": {"shape": shape, "direction": "forward"},
            "algorithm": algorithm,
            "median_ms": ms,
        }
        for algorithm, ms in (("rel_attention", 3.0), ("sdpa-dense-bias", 15.0), ("original-bhls", 24.0))
    ]
    (tmp_path / "gpu.json").write_text(json.dumps({"about": {}, "rows": rows}))
    return tmp_path


def lines(folder: Path, predictions: Path) -> list[str]:
    """Of the summary, blanks as one."""
    return [" ".join(line.split()) for line in summary.text(folder, predictions).splitlines()]


def line(found: list[str], start: str) -> str:
    return next(x for x in found if x.startswith(start))


def test_summary(measured: Path, tmp_path: Path) -> None:
    predictions = tmp_path / "predictions.json"
    row = {"capability": 90, "dtype": "bfloat16", "width": 64, "kernel": "forward", "clocks": 1120.0, "unit": "shared"}
    rows = [row, row | {"kernel": "backward_keys", "clocks": 3000.0}, row | {"capability": 80, "clocks": 1.0}]
    predictions.write_text(json.dumps({"about": {}, "rows": rows}))
    found = lines(measured, predictions)
    assert line(found, "forward / flash SDPA, D64").endswith("<= 1.6 2048: 1.50 held")
    assert line(found, "forward+backward / flash SDPA, D64").endswith("<= 2.0 2048: 2.50 NOT HELD")
    assert line(found, "sdpa-dense-bias / ours, forward, L2048").endswith(">= 4 5.00 held")
    assert line(found, "original-bhls / ours, forward, L2048").endswith(">= 10 8.00 NOT HELD")
    assert "not measured" in line(found, "flex / ours, forward, L512")
    assert line(found, "the same bits / atomics, D64").endswith("1.20 held")
    assert line(found, "decode, B8").endswith("triton 75% held")
    assert "killed at its limit" in line(found, "forward / flash SDPA, D128")
    assert line(found, "the same bits 20 times").endswith("D64: {'k': 3} NOT HELD")
    assert line(found, "forward D64 ") == "forward D64 1,120 (shared) 1,000 0.89 held"
    assert line(found, "backward_keys D64 ") == "backward_keys D64 3,000 (shared) 4,000 1.33 NOT HELD"
    assert "not measured: the profiler saw no backward_table_kernel" in line(found, "backward_table D64 ")
    assert line(found, "predictions held") == "predictions held: 1 of 2"
    assert line(found, "D64 backward_keys:") == "D64 backward_keys: 64x64, 8 warps, 2 stages, 150 us, 0.75, of 3 tiles"
    assert line(found, "right against float64") == "right against float64: 0 of 1"


def test_summary_without_predictions(measured: Path) -> None:
    found = lines(measured, measured / "absent.json")
    assert line(found, "forward D64 ") == "forward D64 no prediction 1,000"
    assert line(found, "predictions held") == "predictions held: 0 of 0"


def test_summary_of_nothing(tmp_path: Path) -> None:
    text = summary.text(tmp_path, tmp_path / "absent.json")
    assert " held" not in text.replace("predictions held", "")
    assert "not measured" in text


def test_other_choices_lay_launches_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a sweep would time the first tile again and again."""
    from txl_kernels.backends.triton import plan

    forgotten: list[bool] = []
    monkeypatch.setattr(plan, "forget", lambda: forgotten.append(True))
    with choices(Work("", B=1, H=1, L=16, M=0, D=16, tile=(16, 16, 4, 1))):
        assert len(forgotten) == 1
    assert len(forgotten) == 2


def test_visible_tiles() -> None:
    """Four blocks of queries: 4 x 2 tiles of the memory, and a triangle of 10."""
    assert Work("", B=1, H=2, L=256, M=128, D=64).tiles == 2 * (8 + 10)
    assert model.clocks(10.0, 1700, 132, 100) == pytest.approx(10e-6 * 1.7e9 * 132 / 100)


def test_against_flash_takes_the_faster_of_its_two() -> None:
    rows = [
        times("ours", 512, 3.0, 6.0),
        times("flash SDPA", 512, 2.0, 4.0),
        times("flash SDPA, unmasked", 512, 1.0, 4.0),
    ]
    assert targets.against_flash(rows)[0].measured == "512: 3.00"


def test_shards() -> None:
    assert shards.outcome(0, "....\n12 passed, 3 skipped in 2 s") == ({"counts": {"passed": 12, "skipped": 3}}, None)
    assert shards.outcome(None, "..F [ 40%]\nfailed: a::b\n") == ({"counts": {}}, "cut short after 40%; failed: a::b")


def test_counters() -> None:
    names = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    text = f'==PROF== x\n{names}\n"0","forward_kernel","Duration","us","12.5"\n'
    assert counters.parse(text) == {"forward_kernel": {"Duration": "12.5 us"}}


IDENTITY = {"version": "3.6.0", "files": ["a", "b", "c"], "ptxas": "p", "environment": {}}


@pytest.mark.parametrize(("change", "said"), [
    ({}, None), ({"files": ["a", "x", "c"]}, None), ({"files": ["x", "y", "c"]}, "2 of Triton's files"),
    ({"files": ["a", "b"]}, "files differ"), ({"version": "3.7.0"}, "version"), ({"ptxas": "q"}, "ptxas"),
])  # fmt: skip
def test_whose_kernels_can_be_found(change: dict[str, Any], said: str | None) -> None:
    reason = caches.differences(IDENTITY | change, IDENTITY)
    assert (reason is None) if said is None else (said in str(reason))


CARRY = """
import json, sys
from pathlib import Path
from gpu_kit import caches, cases, dry, places

works = [w for w in cases.smallest() if w.name in ("D64 descriptors", "D64 decode")]
carried, cache = Path(sys.argv[1]), places.triton_cache()
if sys.argv[2] == "unpack":
    assert caches.adopt(carried, dry.CAPABILITY) is None
    caches.unpack(carried, cache)
each = [dry.compile_one(work) for work in works]
if sys.argv[2] == "pack":
    caches.pack(cache, {x for done in each for x in (*done.found, *done.made)}, carried, dry.CAPABILITY)
print(json.dumps([sum(len(getattr(x, name)) for x in each) for name in ("found", "made", "failed")]))
"""


@pytest.mark.slow
def test_carried_kernels_are_found(tmp_path: Path) -> None:
    """Compiled and packed in one place; in another nothing is compiled again, and one that was not
    carried is."""

    def counted(what: str, cache: str) -> list[int]:
        path = os.pathsep.join([str(ROOT / "tools"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path / cache)}
        done = subprocess.run(
            python(CARRY, tmp_path / "carried", what), env=env, capture_output=True, text=True, check=True
        )
        found: list[int] = json.loads(done.stdout.splitlines()[-1])
        return found

    made = counted("pack", "here")
    assert made[0] == made[2] == 0
    assert made[1] >= 6
    assert counted("unpack", "there") == [made[1], 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_rehearsal_in_the_interpreter(number: int, tmp_path: Path) -> None:
    """Everything but what only a device does, and the summary."""
    env = os.environ | {"INTERPRETER": "1", "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "tools/gpu_check.sh"), str(number), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "clocks a 64 x 64 tile" in done.stdout
    assert {state for state, _ in ends(Record(tmp_path / f"call{number}.jsonl")).values()} == {"done"}
