"""The few figures the README quotes, from the newest records of each machine."""

from records import PAPER, Device, Measured, attention_length, number, same_segments, sources

QUOTED = ("evaluation speed", "forward", "forward+backward", "decode", "training step", "peak memory", "padding")
EVALUATION = {
    "vanilla, eager as published": "as published",
    "vanilla, flash SDPA": "with flash SDPA",
    "vanilla, compiled, last layer for one token": "compiled, last layer cut to one token",
    "Transformer-XL, original algorithm, segments of 128": "Transformer-XL, original algorithm",
}
SEGMENTS = ("ours, cached keys and values, segments of 128", "ours, cached keys and values, segments of 512")


def lines(devices: list[Device]) -> list[str]:
    found: list[str] = []
    for device in devices:
        quoted = [race for race in device.races if race.group in QUOTED]
        found += [
            "",
            f"**{device.name}** ({sources(quoted)}; medians, contestants in turns)",
        ]
        found += evaluation(device) + attention(device) + decode(device) + sentences(device)
    return [*found, "", "Everything, with spreads, failures and plots: [benchmarks/REPORT.md](benchmarks/REPORT.md)."]


def evaluation(device: Device) -> list[str]:
    races = [race for race in device.group("evaluation speed") if race.case.startswith("enwik8-base")]
    if not races:
        return []
    found = [
        "",
        "Evaluation of the paper's 12-layer enwik8 model, speed-up per token (Table 9), segments of 128 / 512 tokens:",
        "",
    ]
    found += [
        "| attention length | the paper | " + " | ".join(f"over {x}" for x in _labels()) + " |",
        "|---|---|" + "---|" * len(EVALUATION),
    ]
    for race in races:
        length = attention_length(race.case)
        cells = []
        for name in EVALUATION:
            pairs = [(mine, race.ratio(name, mine)) for mine in SEGMENTS if same_segments(name, mine)]
            cells.append(" / ".join(race.why_not(mine) or "?" if r is None else f"{number(r)}x" for mine, r in pairs))
        found.append(f"| {length:,} | {PAPER[length]:,}x | " + " | ".join(cells) + " |")
    return found


def _labels() -> list[str]:
    return [label if label.startswith("Transformer") else f"vanilla {label}" for label in EVALUATION.values()]


def attention(device: Device) -> list[str]:
    forward = {race.case: race for race in device.group("forward")}
    backward = {race.case: race for race in device.group("forward+backward")}
    found = []
    for case, race in forward.items():
        both = backward.get(case)
        found += ["", f"| {case}, ms | forward | forward and backward |", "|---|---|---|"]
        for name, row in race.rows.items():
            if "limit" in row:
                continue
            other = both.rows.get(name, {}) if both else {}
            found.append(f"| {name} | {_cell(row)} | {_cell(other)} |")
    return [*found, "", "In brackets: the share of the machine's peak, measured in the same race."] if found else []


def _cell(row: dict[str, float]) -> str:
    if "median_ms" not in row:
        return str(row.get("status", ""))
    share = f" ({row['share_of_operations']:.0%})" if "share_of_operations" in row else ""
    return f"{number(row['median_ms'])}{share}"


def decode(device: Device) -> list[str]:
    races = device.group("decode")
    if not races:
        return []
    found = ["", "| one query, caches cold, ms (share of a plain read) | " + " | ".join(r.case for r in races) + " |"]
    found.append("|---|" + "---|" * len(races))
    for name in races[0].rows:
        if not name.startswith("limit"):
            found.append(f"| {name} | " + " | ".join(_read(race, name) for race in races) + " |")
    return found


def _read(race: Measured, name: str) -> str:
    row = race.rows.get(name, {})
    return (
        f"{number(row['median_ms'])} ({row['share_of_bytes']:.0%})" if "share_of_bytes" in row else race.why_not(name)
    )


def sentences(device: Device) -> list[str]:
    """Training, memory, windows, padding, small calls and start-up, where they were measured."""
    said = []
    for race in device.group("training step"):
        ratio = race.ratio("original algorithm, [q, k, b, h]", "ours")
        bound = race.ratio("original algorithm, [q, k, b, h]", "bound: all but the attention")
        if ratio and bound:
            said.append(
                f"Training step ({race.case.removesuffix(', one token')}): {ratio:.1f} times the tokens a second of "
                f"the original algorithm; attention that cost nothing would make it {bound:.1f} times."
            )
    for race in device.group("peak memory"):
        mine, theirs = (race.rows.get(n, {}).get("peak_mib") for n in ("ours", "original algorithm, [q, k, b, h]"))
        if mine and theirs:
            said.append(
                f"Peak memory ({race.case}): {number(mine)} MiB against {number(theirs)}, {theirs / mine:.1f} times less."
            )
    for race in device.group("padding"):
        name = next(iter(race.rows))
        ratio = race.ratio("Conformer as commonly written", name)
        if ratio:
            said.append(
                f"Padding ({race.case}): {number(race.ms(name) or 0)} ms; as commonly written {number(ratio)} times that."
            )
    for race in device.group("call overhead"):
        name = next(iter(race.rows))
        if race.ms(name):
            said.append(f"A small call ({race.case}): {1e3 * (race.ms(name) or 0):.0f} us.")
    for race in device.group("start-up"):
        mine, theirs = race.ms("import txl_kernels"), race.ms("yardstick: import torch")
        if mine and theirs:
            said.append(f"`import txl_kernels`: {mine / 1e3:.1f} s, of which `import torch` {theirs / 1e3:.1f} s.")
    return ["", *(f"- {line}" for line in said)] if said else []
