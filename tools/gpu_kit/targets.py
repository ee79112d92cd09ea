"""What was asked for, held against what was measured."""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from gpu_kit.cases import SAME_BITS
from gpu_kit.records import Row

SMALLER, LARGER = "<=", ">="
LENGTHS = (512, 1024, 2048, 8192)
FORWARD_TO_FLASH, BOTH_TO_FLASH = 1.6, 2.0
# (direction, other implementation, L = M, times slower than ours at least)
OTHERS = [
    ("forward", "sdpa-dense-bias", 2048, 4.0), ("forward+backward", "sdpa-dense-bias", 2048, 5.0),
    ("forward", "flex", 512, 2.0), ("forward+backward", "flex", 512, 2.0),
    ("forward", "original-bhls", 2048, 10.0), ("forward+backward", "original-bhls", 2048, 10.0),
]  # fmt: skip
DECODE = {1: 0.48, 8: 0.84, 64: 0.98}  # shares of a copy's rate by tools/decode_model.py, M 3,800
DECODE_WITHIN = 0.75


class Line(NamedTuple):
    """held: None where nothing was measured, `measured` says why then."""

    name: str
    target: str
    measured: str
    held: bool | None


def against_flash(times: list[Row]) -> list[Line]:
    """Ours by plain flash SDPA, the faster of with a mask and without, and by cuDNN's for
    information."""
    found = []
    for direction, most in (("forward", FORWARD_TO_FLASH), ("forward+backward", BOTH_TO_FLASH)):
        for width in (64, 128):
            pairs = []
            for length in LENGTHS:
                ours = _least(times, ("ours", SAME_BITS), length, width, direction)
                flash = _least(times, ("flash SDPA", "flash SDPA, unmasked"), length, width, direction)
                cudnn = _least(times, ("cuDNN SDPA", "cuDNN SDPA, unmasked"), length, width, direction)
                if ours and flash:
                    pairs.append((length, ours / flash, f" (cuDNN {ours / cudnn:.2f})" if cudnn else ""))
            name = f"{direction} / flash SDPA, D{width}"
            if not pairs:
                found.append(Line(name, f"{SMALLER} {most}", _why(times, "times"), None))
                continue
            text = ", ".join(f"{length}: {ratio:.2f}{more}" for length, ratio, more in pairs)
            found.append(Line(name, f"{SMALLER} {most}", text, all(ratio <= most for _, ratio, _ in pairs)))
    return found


def atomics(times: list[Row]) -> list[Line]:
    """What dr by atomics gains; less than 10% would decide against it."""
    found = []
    for width in (64, 128):
        ratios = []
        for length in LENGTHS:
            slow, fast = (_least(times, (name,), length, width, "forward+backward") for name in (SAME_BITS, "ours"))
            if slow and fast:
                ratios.append(slow / fast)
        text = ", ".join(f"{x:.2f}" for x in ratios) or _why(times, "times")
        held = statistics.median(ratios) >= 1.1 if ratios else None
        found.append(Line(f"the same bits / atomics, D{width}", f"{LARGER} 1.1", text, held))
    return found


def against_others(official: dict[str, Any] | None) -> list[Line]:
    """From the official record."""
    found = []
    for direction, other, length, least in OTHERS:
        name, target = f"{other} / ours, {direction}, L{length}", f"{LARGER} {least:g}"
        if official is None:
            found.append(Line(name, target, "not measured: there is no gpu.json", None))
            continue
        shape = {"B": 8, "H": 16, "L": length, "M": length, "D": 64}
        attention = [row for row in official["rows"] if row["group"] == "attention"]
        cases = [(row["case"].get("shape"), row["case"].get("direction")) for row in attention]
        same = [row for row, case in zip(attention, cases, strict=True) if case == (shape, direction)]
        ours = [row for row in same if row["algorithm"] == "rel_attention"]
        theirs = [row for row in same if row["algorithm"] == other]
        ms, other_ms = (min((x["median_ms"] for x in y if "median_ms" in x), default=None) for y in (ours, theirs))
        if ms and other_ms:
            found.append(Line(name, target, f"{other_ms / ms:.2f}", other_ms / ms >= least))
        else:
            why = next((x["error"][:60] for x in [*ours, *theirs] if "error" in x), "the record has no such row")
            found.append(Line(name, target, f"not measured: {why}", None))
    return found


def decode(times: list[Row], machine: list[Row]) -> list[Line]:
    """Keys, values and r once, in the time of the kernels, as a share of a copy's rate."""
    copied = next((row["gb_per_s"] for row in machine if row.get("item") == "copy" and "gb_per_s" in row), None)
    found = []
    for batch, share in DECODE.items():
        rates = {
            backend: row["gb_per_s"] / copied
            for backend in ("triton", "cuda") for row in times
            if copied and row.get("item") == f"decode, {backend}, B{batch} H8 L1 M3800 D64" and "gb_per_s" in row
        }  # fmt: skip
        text = ", ".join(f"{name} {x:.0%}" for name, x in rates.items()) or _why(times, "decode")
        held = max(rates.values()) >= DECODE_WITHIN * share if rates else None
        found.append(Line(f"decode, B{batch} M3800: share of a copy", f"model {share:.0%}", text, held))
    return found


def determinism(bits: list[Row]) -> Line:
    ended = [row for row in bits if row.get("state") in ("measured", "failed") and "item" in row]
    if not ended:
        return Line("the same bits 20 times", "always", "not measured: call 1 did not get to it", None)
    bad = [
        f"{row['item']}: {row.get('differing') or row.get('reason', '')[:50]}"
        for row in ended
        if row.get("differing") != {}
    ]
    return Line("the same bits 20 times", "always", "; ".join(bad) or f"{len(ended)} calls", not bad)


def official_record(folder: Path) -> dict[str, Any] | None:
    path = folder / "gpu.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def training(official: dict[str, Any] | None) -> str:
    """Tokens a second of a training step, ours and the original."""
    rows = [row for row in (official or {"rows": []})["rows"] if row["group"] == "training step"]
    found = [f"{row['implementation']} {1000 / row['median_ms']:,.0f}" for row in rows if "median_ms" in row]
    return "training, tokens a second: " + ("; ".join(found) or "not measured")


def table_9(official: dict[str, Any] | None) -> str:
    """Evaluation a token: the fastest vanilla model's time by our fastest, for each attention
    length, beside the paper's."""
    rows = [
        row for row in (official or {"rows": []})["rows"] if row["group"] == "evaluation speed" and "median_ms" in row
    ]
    found = []
    for length in dict.fromkeys(row["case"]["attn_len"] for row in rows):
        same = [row for row in rows if row["case"]["attn_len"] == length]
        ours = [row["median_ms"] for row in same if row["role"] == "ours"]
        vanilla = [row for row in same if "paper_speedup" in row]
        if ours and vanilla:
            ratio = min(row["median_ms"] for row in vanilla) / min(ours)
            found.append(f"{length}: {ratio:,.0f} ({vanilla[0]['paper_speedup']:,})")
    return "Table 9, vanilla / ours (paper): " + (", ".join(found) or "not measured")


def _least(times: list[Row], names: tuple[str, ...], length: int, width: int, direction: str) -> float | None:
    """Milliseconds of the fastest of these."""
    items = [f"{name}, B8 H16 L{length} M{length} D{width}" for name in names]
    found = [row[direction]["ms"] for row in times if row.get("item") in items and direction in row]
    return min(found, default=None)


def _why(rows: list[Row], what: str) -> str:
    """The first failure, or how the step ended."""
    for row in rows:
        if row.get("state") in ("failed", "timeout", "not run") and row.get("reason"):
            return f"not measured: {row['reason'][:70]}"
    return f"not measured: no row of {what}"
