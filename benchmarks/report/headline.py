"""The README's picture and three figures, of the machine that they were measured on last."""

from harness import paper
from report import plots
from report.formats import number, prose, sources, times
from report.records import Device, Measured, ratio
from report.sentences import memory

PICTURE = "speed against length"


def lines(devices: list[Device]) -> list[str]:
    device = next((device for device in devices if device.group(PICTURE)), devices[0])
    parts = [part for part in (_length(device), _evaluation(device), _memory(device)) if part]
    found = [line for measured, said in parts for line in prose(f"- {said}", "  ")]
    quoted = [measured for measured, _ in parts]
    picture = [f"![{PICTURE}](benchmarks/plots/{name})" for name in plots.names(device).get(PICTURE, [])[-1:]]
    machine = f"{device.name} ({sources(quoted)}; medians, implementations in turns):"
    return ["", *picture, *([""] if picture else []), *prose(machine), "", *found, ""]


def _length(device: Device) -> tuple[Measured, str] | None:
    found = device.group(PICTURE, "forward+backward")
    if not found:
        return None
    longest = max(found, key=lambda measured: measured.case.shape.L if measured.case.shape else 0)
    mine = longest.find(role="ours")
    plain, original = (longest.find(algorithm=name) for name in ("sdpa", "original-qkbh"))
    gain = ratio(original, mine)
    if mine is None or plain is None or "median_ms" not in plain or gain is None:
        return None
    return longest, (
        f"Attention ({longest.case.work}): {number(mine['median_ms'])} ms, where plain SDPA, which has no positions, "
        f"takes {number(plain['median_ms'])} ms; {times(gain)} the speed of the paper's PyTorch code."
    )


def _evaluation(device: Device) -> tuple[Measured, str] | None:
    found = [measured for measured in device.group("evaluation speed") if measured.case.model == "enwik8-base"]
    if not found:
        return None
    longest = max(found, key=lambda measured: measured.case.attn_len or 0)
    flash = longest.find(algorithm="vanilla-flash")
    gains = [gain for mine in longest.ours() if (gain := ratio(flash, mine))]
    length = longest.case.attn_len or 0
    if not gains:
        return None
    return longest, (
        f"Evaluation of the paper's 12-layer enwik8 model at {length:,} keys: {times(min(gains))} to "
        f"{times(max(gains))} the speed of a vanilla model with flash SDPA (Table 9 of the paper: "
        f"{paper.SPEED_UP[length]:,}x)."
    )


def _memory(device: Device) -> tuple[Measured, str] | None:
    found = [(measured, memory(measured)) for measured in device.group("peak memory") if measured.case.model]
    return next(((measured, said) for measured, said in found if said and "softmax" not in said), None)
