"""The figures of docs/speed.md, from the newest records of each machine."""

from collections.abc import Callable
from typing import Any

from harness import paper
from report.formats import number, prose, sources, times
from report.records import Device, Measured, comparable, ratio
from report.sentences import sentences

Row = dict[str, Any]
QUOTED = (
    "evaluation speed", "attention", "decode", "training step", "softmax", "peak memory", "padding", "call overhead",
    "start-up",
)  # fmt: skip
# Of the evaluation speed: algorithms and their titles.
EVALUATION = {
    "vanilla-eager": "vanilla as published",
    "vanilla-flash": "vanilla with flash SDPA",
    "vanilla-last": "vanilla compiled, last layer cut to one token",
    "original": "Transformer-XL, original algorithm",
}


def lines(devices: list[Device]) -> list[str]:
    found: list[str] = []
    for device in devices:
        quoted = [measured for measured in device.comparisons if measured.group in QUOTED]
        found += ["", *prose(f"**{device.name}** ({sources(quoted)}; medians, implementations in turns)")]
        found += evaluation(device) + attention(device) + decode(device) + sentences(device)
    return found


def evaluation(device: Device) -> list[str]:
    found = [measured for measured in device.group("evaluation speed") if measured.case.model == "enwik8-base"]
    if not found:
        return []
    segments = " / ".join(str(mine["segment"]) for mine in found[0].ours())
    title = (
        f"Evaluation of the paper's 12-layer enwik8 model, speed-up per token (Table 9), segments of {segments} tokens:"
    )
    lines = [
        "",
        *prose(title),
        "",
        "| attention length | the paper | " + " | ".join(f"over {x}" for x in EVALUATION.values()) + " |",
        "|---|---|" + "---|" * len(EVALUATION),
    ]
    for measured in found:
        length = measured.case.attn_len or 0
        cells = " | ".join(_speed_ups(measured, algorithm) for algorithm in EVALUATION)
        lines.append(f"| {length:,} | {paper.SPEED_UP[length]:,}x | {cells} |")
    return lines


def _speed_ups(measured: Measured, algorithm: str) -> str:
    """Over one algorithm, of each of ours that may be compared with it."""
    cells = []
    for mine in measured.ours():
        for row in measured.rows.values():
            if row["algorithm"] == algorithm and row["role"] != "ours" and comparable(row, mine):
                found = ratio(row, mine)
                cells.append(times(found) if found else _failed(row) or _failed(mine))
    return " / ".join(cells)


def _failed(row: Row) -> str:
    """failed or unavailable; empty if it was measured."""
    status = str(row["status"])
    return "" if status == "measured" else status


def attention(device: Device) -> list[str]:
    backward = {measured.case.shape: measured for measured in device.group("attention", "forward+backward")}
    found = []
    for forward in device.group("attention", "forward"):
        both = backward.get(forward.case.shape)
        found += ["", f"| {forward.case.shape}, ms | forward | forward and backward |", "|---|---|---|"]
        for name, row in forward.rows.items():
            if row["role"] != "limit":
                other = both.rows.get(name) if both else None
                found.append(f"| {name} | {_with_share(row)} | {_with_share(other) if other else ''} |")
        found += _disturbed([forward, *([both] if both else [])], lambda x: str(x.case.direction))
    return (
        [*found, "", "In brackets: the share of the machine's peak, measured in the same comparison."] if found else []
    )


def _with_share(row: Row) -> str:
    share = next((f" ({row[key]:.0%})" for key in ("share_of_operations", "share_of_bytes") if key in row), "")
    return f"{number(row['median_ms'])}{share}" if "median_ms" in row else str(row["status"])


def _disturbed(found: list[Measured], name: Callable[[Measured], str]) -> list[str]:
    said = [f"disturbed: {name(measured)}: {measured.disturbed}" for measured in found if measured.disturbed]
    return ["", *(part for line in said for part in prose(f"{line}."))] if said else []


def decode(device: Device) -> list[str]:
    found = device.group("decode")
    if not found:
        return []
    shapes = " | ".join(str(measured.case.shape) for measured in found)
    lines = ["", f"| one query, caches cold, ms (share of a plain read) | {shapes} |", "|---|" + "---|" * len(found)]
    for name, row in found[0].rows.items():
        if row["role"] != "limit":
            cells = (_with_share(measured.rows[name]) if name in measured.rows else "" for measured in found)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines + _disturbed(found, lambda x: str(x.case.shape))
