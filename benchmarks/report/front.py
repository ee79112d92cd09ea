"""The first tables of pages: what the README, docs/speed.md and docs/how-to/accelerate.md begin
with."""

from harness.case import SPEED_UP, Row, Shape
from report import charts
from report.records import Device, Measured, ratio
from report.tables import LAYERS, number, pivot, prose, share, sources

PLOTS_FROM_SPEED = "pictures/plots"
SEGMENT = 512  # of the README's evaluation
# Columns of attention, each with the fields that select its row in a comparison.
COLUMNS: dict[str, dict[str, str]] = {
    "ours": {"role": "ours"},
    "plain SDPA": {"implementation": "baseline: plain SDPA"},
    "SDPA with dense bias": {"implementation": "SDPA with dense bias"},
}


def headline(devices: list[Device]) -> list[str]:
    """Format the README's tables, of the newest record of a CPU and of a GPU: evaluation beside the
    paper's speed-up, and attention."""
    speed_up = newest([(device, longest_evaluation(device)) for device in devices])
    calls = newest([(device, first_attention(device)) for device in devices])
    measured = dict.fromkeys(f"{device.name}: {measured_at(found)}" for device, found in (*speed_up, *calls))
    return (
        [*front_evaluation(speed_up), *front_attention(calls), *prose(f"Measured: {'; '.join(measured)}.")]
        if measured
        else []
    )


def in_short(devices: list[Device]) -> list[str]:
    """Format the first part of docs/speed.md: for each group a plot of the newest machine that has
    it, and a table of all machines."""
    parts = {
        ("Attention", "length-forward"): front_attention([(x, first_attention(x)) for x in devices]),
        ("Evaluation with a KV cache", "table-9"): front_evaluation([(x, longest_evaluation(x)) for x in devices]),
        ("Decode: one query", "share-decode"): front_decode(devices),
        ("Training", None): front_training(devices),
        ("Peak memory", "memory"): front_memory(devices),
        ("Layers of other libraries", None): libraries(devices),
    }
    lines, files = [], charts.files(devices)
    for (title, plot), table in parts.items():
        lines += ["", f"## {title}", ""]
        lines += [f"![{title}]({PLOTS_FROM_SPEED}/{files[plot]})"] if plot in files else []
        lines += table
    return lines


def newest(found: list[tuple[Device, list[Measured]]]) -> list[tuple[Device, list[Measured]]]:
    """Return the device with the newest comparisons among CPUs, and among GPUs, of those that have
    any; each with its comparisons."""
    dated = sorted((x for x in found if x[1]), key=lambda x: str(x[1][0].about["date"]))
    of_kind = {x[1][0].about["kind"] == "cpu": x for x in dated}  # the last of each kind
    return [of_kind[is_cpu] for is_cpu in (True, False) if is_cpu in of_kind]


def measured_at(found: list[Measured]) -> str:
    """List dates, commits and versions of torch of the given measurements."""
    said = (
        f"{x.about['date'][:10]}, commit {x.about['commit']}, torch {x.about['torch'].partition('+')[0]}" for x in found
    )
    return "; ".join(dict.fromkeys(said))


def longest_evaluation(device: Device) -> list[Measured]:
    """Return the evaluation of enwik8-base with the largest number of keys, if segments of 512 were
    measured."""
    group = device.group("evaluation speed")
    return [x for x in group if (x.case.model, x.case.attn_len) == ("enwik8-base", max(SPEED_UP)) and _front(x)]


def first_attention(device: Device) -> list[Measured]:
    """Return both directions of the first inputs of attention."""
    found = device.group("attention")
    return [x for x in found if x.case.shape == found[0].case.shape]


def front_evaluation(chosen: list[tuple[Device, list[Measured]]]) -> list[str]:
    """Format the speed-up of evaluation at the longest attention length: over the vanilla model as
    published, and over the fastest vanilla implementation."""
    cells: dict[tuple[str, str], str] = {}
    for device, found in chosen:
        for measured in found:
            published, mine = measured.find(implementation=charts.PUBLISHED), _front(measured)
            for column, row in (
                ("over vanilla as published", published),
                ("over the fastest vanilla", charts.fastest(measured)),
            ):
                times = ratio(row, mine)
                cells[device.name, column] = "" if times is None else f"{number(times)}x"
            cells[device.name, "the paper, over its own"] = f"{max(SPEED_UP.values()):,}x"
    title = (
        f"Evaluation with a KV cache, enwik8-base, 12 layers, {max(SPEED_UP):,} keys, segments of {SEGMENT} tokens: "
        "throughput as a multiple of a vanilla model's, which reads its window anew for each token (Table 9)."
    )
    return ["", *prose(title), *pivot("machine", cells)] if cells else []


def _front(measured: Measured) -> Row | None:
    """Return this package's row in segments of the default length, if it was measured."""
    return next((row for row in measured.ours() if row["segment"] == SEGMENT and "median_ms" in row), None)


def front_attention(chosen: list[tuple[Device, list[Measured]]]) -> list[str]:
    """Format a table of attention, forward and forward + backward, a row for each machine."""
    cells: dict[tuple[str, str], str] = {}
    for device, found in ((device, found) for device, found in chosen if found):
        inputs = f"{device.name}; {found[0].case.shape}, {found[0].about['dtype']}"
        for column, fields in COLUMNS.items():
            rows = [x.find(**fields) or {} for x in found]
            times = [number(row["median_ms"]) if "median_ms" in row else "failed" for row in rows]
            cells[inputs, column] = " / ".join(times) if set(times) != {"failed"} else ""
        for column in ("ours", "plain SDPA"):
            shares = ("disturbed" if x.disturbed else "".join(share(x.find(**COLUMNS[column]) or {})) for x in found)
            cells[inputs, f"{column}, % of peak"] = " / ".join(shares)
    title = (
        "Attention, forward / forward + backward, milliseconds; plain SDPA has no positions. % of peak FLOP/s: ours needs "
        "three products a visible pair forward and eight backward, SDPA two and five."
    )
    notes = dict.fromkeys(device.note for device, found in chosen if found and device.note)
    return [
        "",
        *prose(title),
        *pivot("machine and inputs", cells),
        *(line for note in notes for line in ("", *prose(note), "")),
    ]


def _fastest(measured: Measured, start: str, key: str = "median_ms") -> Row | None:
    """Return the row with the least time or memory, of implementations in the comparison's own
    dtype whose names begin with `start`."""
    rows = [
        row for name, row in measured.rows.items()
        if name.startswith(start) and key in row and not name.endswith("bfloat16")
    ]  # fmt: skip
    return min(rows, key=lambda row: float(row[key]), default=None)


def _front_rows(
    devices: list[Device], group: str, shape: Shape, columns: dict[str, str], key: str
) -> dict[tuple[str, str], str]:
    """Return cells of the comparisons of a group with this shape, a row for each machine. columns:
    titles, each with the beginning of the implementations' names."""
    cells: dict[tuple[str, str], str] = {}
    for device in devices:
        for measured in (x for x in device.group(group) if x.case.shape == shape and x.case.model is None):
            for column, start in columns.items():
                row = _fastest(measured, start, key)
                name = f"{device.name}, {measured.about['dtype']}"
                cells[name, column] = "" if row is None else ", ".join([number(row[key]), *share(row)])
    return cells


def front_decode(devices: list[Device]) -> list[str]:
    """Format the latency of one query, the fastest row of each kind."""
    shape = Shape(1, 8, 1, 3800, 64)
    columns = {
        "ours": "rel_attention",
        "plain SDPA": "baseline: plain SDPA",
        "SDPA with dense bias": "SDPA with dense bias",
    }
    cells = _front_rows(devices, "decode", shape, columns, "median_ms")
    title = (
        f"Latency in milliseconds, {shape}, the faster of eager calls and calls in a CUDA graph; % of the bandwidth of a "
        "plain read. Ours also reads the table of positions."
    )
    return ["", *prose(title), *pivot("machine", cells)] if cells else []


def front_memory(devices: list[Device]) -> list[str]:
    """Format the peak memory of forward and backward."""
    shape = Shape(1, 8, 2048, 2048, 64)
    columns = {"ours": "rel_attention", "the paper's PyTorch code": "the paper's PyTorch code",
               "SDPA with dense bias": "SDPA with dense bias", "plain SDPA": "baseline: plain SDPA"}  # fmt: skip
    cells = _front_rows(devices, "peak memory", shape, columns, "peak_mib")
    title = f"Peak memory of forward + backward beyond the inputs, MiB, {shape}."
    return ["", *prose(title), *pivot("machine", cells)] if cells else []


def front_training(devices: list[Device]) -> list[str]:
    """Format the throughput of training, in tokens a second."""
    cells: dict[tuple[str, str], str] = {}
    for device in devices:
        for measured in device.group("training step"):
            for column, start in (("ours", "ours"), ("the paper's PyTorch code", "the paper's")):
                row = _fastest(measured, start)
                what = f"{device.name}; {measured.case.network}, {measured.case.shape}"
                cells[what, column] = "" if row is None else f"{1000 / row['median_ms']:,.0f}"
    title = "Throughput of training steps in tokens/s, the faster of eager steps and steps in CUDA graphs."
    return ["", *prose(title), *pivot("machine and model", cells)] if cells else []


def libraries(devices: list[Device]) -> list[str]:
    """Format how many times as fast layers of other libraries are on the newest CPU that had them,
    and by how much less memory they take, on their longest inputs."""
    cells: dict[tuple[str, str], str] = {}
    for device in devices:
        layers = [x for x in device.group(LAYERS) if x.find(role="ours", status="measured")]
        memory = [x for x in device.group(f"peak memory of {LAYERS}") if x.find(role="ours", status="measured")]
        if layers:
            longest = max((x.case.shape for x in layers), key=lambda shape: shape.L)
            for measured in (*layers, *memory):
                theirs, ours = measured.find(role="other"), measured.find(role="ours")
                key = "median_ms" if measured in layers else "peak_mib"
                if measured.case.shape == longest and theirs and ours and key in theirs and key in ours:
                    what = "peak memory, " if measured in memory else "time, "
                    cells[measured.case.network, what + str(measured.case.direction)] = (
                        f"{number(theirs[key] / ours[key])}x"
                    )
            title = f"One layer, {longest}, as a multiple of the accelerated one's; {device.name} ({sources(layers)})."
            return ["", *prose(title), *pivot("layer", cells)]
    return []
