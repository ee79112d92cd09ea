"""What docs/speed.md says in a sentence each: training, softmax, memory, padding, small calls and
start-up."""

from report.formats import number, prose
from report.records import Device, Measured, ratio


def sentences(device: Device) -> list[str]:
    """A list of those that were measured."""
    said = []
    for group, sentence in _SENTENCES.items():
        said += [sentence(measured) for measured in device.group(group)]
    found = [line for sentence in said if sentence for line in prose(f"- {sentence}", "  ")]
    return ["", *found] if found else []


def training(step: Measured) -> str | None:
    original = step.find(algorithm="original")
    gain, bound = ratio(original, step.find(role="ours")), ratio(original, step.find(algorithm="without-attention"))
    if gain is None or bound is None:
        return None
    return (
        f"Training step ({step.case.work}): {gain:.1f} times the tokens a second of the original algorithm;"
        f" attention that cost nothing would make it {bound:.1f} times."
    )


def softmax(step: Measured) -> str | None:
    mine, narrow = step.find(algorithm="adaptive"), step.find(algorithm="adaptive-4")
    over_full = ratio(step.find(algorithm="full-softmax"), mine)
    gains = ratio(step.find(algorithm="torch-adaptive"), mine), ratio(step.find(algorithm="torch-adaptive-4"), narrow)
    if over_full is None or None in gains:
        return None
    return (
        f"Softmax of a training step ({step.case.work}): {over_full:.1f} times the tokens a second of a full softmax,"
        f" {gains[0]:.1f} times those of `nn.AdaptiveLogSoftmaxWithLoss` ({gains[1]:.1f} times with div_val 4)."
    )


def memory(step: Measured) -> str | None:
    full = step.find(algorithm="full-softmax")
    rows = step.find(role="ours"), full or step.find(algorithm="original")
    mine, theirs = (None if row is None else row.get("peak_mib") for row in rows)
    if step.case.model is None or not mine or not theirs:
        return None
    return (
        f"Peak memory ({step.case.work}): {number(mine)} MiB against {number(theirs)}"
        f"{' of a full softmax' if full else ''}, {theirs / mine:.1f} times less."
    )


def padding(batch: Measured) -> str | None:
    mine = batch.find(role="ours")
    slower = ratio(batch.find(algorithm="conformer"), mine)
    if mine is None or slower is None:
        return None
    return (
        f"Padding ({batch.case.work}): {number(mine['median_ms'])} ms; as commonly written {number(slower)} times that."
    )


def small_call(call: Measured) -> str | None:
    mine = call.find(role="ours")
    if mine is None or "median_ms" not in mine:
        return None
    return f"A small call ({call.case.work}): {1e3 * mine['median_ms']:.0f} us."


def start_up(processes: Measured) -> str | None:
    mine, torch = processes.find(algorithm="import txl_kernels"), processes.find(algorithm="import torch")
    if mine is None or torch is None or "median_ms" not in mine or "median_ms" not in torch:
        return None
    more, alone = (mine["median_ms"] - torch["median_ms"]) / 1e3, f"({torch['median_ms'] / 1e3:.1f} s)"
    if more <= 0:
        return f"`import txl_kernels`: no more than torch itself {alone}."
    return f"`import txl_kernels`: {more:.2f} s more than `import torch` {alone}."


_SENTENCES = {
    "training step": training,
    "softmax": softmax,
    "peak memory": memory,
    "padding": padding,
    "call overhead": small_call,
    "start-up": start_up,
}
