"""`generate()` of transformers' old TransfoXL beside txl.hf's, for docs/how-to/transformers.md."""

from report.formats import number, sources, table, times
from report.records import Device, ratio

GROUP = "generate()"


def lines(devices: list[Device]) -> list[str]:
    """A row for each case, of each machine that has been measured."""
    shown: list[str] = []
    for device in devices:
        found, rows = device.group(GROUP), []
        for measured in found:
            mine, theirs = measured.find(role="ours"), measured.find(role="other")
            if mine is None or theirs is None or not (gain := ratio(theirs, mine)):
                continue
            rows.append([str(measured.case.note), *(number(x["median_ms"]) for x in (theirs, mine)), times(gain)])
        if rows:
            head = [
                "greedy, enwik8-base of random weights",
                "old class, ms a token",
                "`txl.hf`, ms a token",
                "times as fast",
            ]
            shown += ["", f"{device.name} ({sources(found)}):", "", "\n".join(table(head, rows)).strip("\n"), ""]
    return shown
