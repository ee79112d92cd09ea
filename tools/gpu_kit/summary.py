"""One screen of what the calls' records say: what ran, which targets and predictions held, which
tiles won."""

from pathlib import Path

from gpu_kit import cases, model, targets
from gpu_kit.places import ROOT
from gpu_kit.records import Record, Row

PREDICTIONS = ROOT / "tools" / "ptx" / "predictions.json"
MOST = 8  # lines of one kind
VERDICT = {True: "held", False: "NOT HELD", None: ""}


def text(folder: Path, predictions: Path = PREDICTIONS) -> str:
    """The screen."""
    rows = [row for number in (1, 2, 3) for row in Record(folder / f"call{number}.jsonl").rows()]
    by_step: dict[str, list[Row]] = {}
    for row in rows:
        by_step.setdefault(row.get("step", ""), []).append(row)
    official = targets.official_record(folder)
    times, machine = by_step.get("times", []), by_step.get("machine", [])
    lines = [*_head(machine), *_troubles(rows), *_smoke(by_step), *_ceilings(machine, by_step.get("rates", []))]
    lines.append("targets")
    checks = [
        *targets.against_flash(times), *targets.against_others(official), *targets.atomics(times),
        *targets.decode(times, machine), targets.determinism(by_step.get("same bits", [])),
    ]  # fmt: skip
    lines += [f"  {x.name:48} {x.target:10} {x.measured}  {VERDICT[x.held]}".rstrip() for x in checks]
    lines += [targets.training(official), targets.table_9(official)]
    lines += _predictions(times, machine, predictions)
    lines += _winners(by_step.get("sweep", []))
    return "\n".join(lines)


def _item(rows: list[Row], name: str) -> Row:
    return next((row for row in rows if row.get("item") == name and row.get("state") == "measured"), {})


def _head(machine: list[Row]) -> list[str]:
    versions, limits = _item(machine, "versions"), _item(machine, "limits")
    said = [
        limits.get("name", "no device was seen"),
        f"torch {versions.get('torch')}",
        f"triton {versions.get('triton')}",
    ]
    return [", ".join([*said, f"driver {versions.get('driver')}", f"commit {versions.get('commit')}"])]


def _troubles(rows: list[Row]) -> list[str]:
    """Steps and items that did not end well."""
    steps = [row for row in rows if "item" not in row]
    bad = [row for row in steps if row.get("state") != "done"]
    found = [f"steps: {len(steps) - len(bad)} of {len(steps)} done"]
    found += [f"  {row['step']}: {row['state']}: {_ends(row.get('reason') or '')}" for row in bad]
    elsewhere = ("sweep", "smoke", "smoke, CUDA C++")
    failed = [row for row in rows if row.get("state") == "failed" and "item" in row and row["step"] not in elsewhere]
    found += _shortened([f"  {row['step']}, {row['item']}: {row['reason'].splitlines()[0][:90]}" for row in failed])
    for row in rows:
        if row.get("step") == "kernels" and "item" in row:
            state = "carried names" if row["not_adopted"] is None else row["not_adopted"]
            found.append(f"  kernels of {row['item']}: {row['found']} found, {row['compiled']} compiled, {state}")
    return found


def _ends(text: str) -> str:
    """The first line, and the last, where a traceback names its error."""
    lines = text.strip().splitlines() or [""]
    return lines[0][:60] + (f" ... {lines[-1].strip()[:80]}" if lines[1:] else "")


def _shortened(lines: list[str]) -> list[str]:
    """At most so many: a screen is short."""
    return lines if len(lines) <= MOST else [*lines[:MOST], f"  and {len(lines) - MOST} more"]


def _smoke(by_step: dict[str, list[Row]]) -> list[str]:
    rows = [x for step in ("smoke", "smoke, CUDA C++") for x in by_step.get(step, []) if "item" in x]
    ended = [row for row in rows if row["state"] in ("measured", "failed")]
    wrong = [row for row in ended if row["state"] == "failed"]
    found = [f"right against float64: {len(ended) - len(wrong)} of {len(ended)}"]
    return found + _shortened([f"  {row['item']}: {row['reason'].splitlines()[0][:100]}" for row in wrong])


def _ceilings(machine: list[Row], rates: list[Row]) -> list[str]:
    copy, products = _item(machine, "copy"), _item(machine, "matrix products")
    parts = [f"copy {copy['gb_per_s']:,.0f} GB/s"] if copy else []
    parts += (
        [f"matrix products {products['tflops']:,.0f} TFLOP/s at {products.get('sm_mhz', '?')} MHz"] if products else []
    )
    parts += [f"{x['item']} {x['gb_per_s']:,.0f} GB/s" for x in rates if x.get("state") == "measured"]
    return ["ceilings: " + (", ".join(parts) or "not measured")]


def _predictions(times: list[Row], machine: list[Row], path: Path) -> list[str]:
    limits = _item(machine, "limits")
    kernels = [(width, kernel) for width in cases.WIDTHS for kernel in model.KERNELS]
    major, minor = limits.get("capability", (9, 0))
    compared = model.compare(times, model.read(path, 10 * major + minor), kernels, limits.get("multiprocessors", 0))
    found = ["clocks a 64 x 64 tile    predicted  measured  ratio"]
    for x in compared:
        predicted = "no prediction" if x.predicted is None else f"{x.predicted:,.0f} ({x.unit})"
        if x.measured is None:
            found.append(f"  {x.kernel:31} D{x.width:<4} {predicted:>16}  {x.why}")
            continue
        ratio = "" if x.predicted is None else f"{x.measured / x.predicted:.2f}"
        line = f"  {x.kernel:31} D{x.width:<4} {predicted:>16} {x.measured:9,.0f} {ratio:>6}  {VERDICT[x.held]}"
        found.append(line.rstrip())
    decided = [x.held for x in compared if x.held is not None]
    return [*found, f"  predictions held: {sum(decided)} of {len(decided)}"]


def _winners(sweep: list[Row]) -> list[str]:
    """By kernel and width: the fastest tile and its time by that of the table's."""
    found = ["tiles: the fastest, its time / the table's"]
    for width in cases.WIDTHS:
        for kernel in cases.KERNELS:
            prefix = f"D{width} {kernel}, "
            timed = [row for row in sweep if row.get("item", "").startswith(prefix) and "us" in row]
            us = {row["item"].removeprefix(prefix): row["us"] for row in timed}
            if cases.TABLE not in us:
                found.append(f"  {prefix[:-2]}: not measured")
                continue
            best = min(us, key=lambda name: us[name])
            ratio = us[best] / us[cases.TABLE]
            found.append(f"  {prefix[:-2]}: {best}, {us[best]:.0f} us, {ratio:.2f}, of {len(us)} tiles")
    return found
