"""Shares of the machine's limits, and when a limit was too disturbed to give any."""

from typing import Any

Row = dict[str, Any]
MOST_DISTURBED = 1.2  # the median of a limit over its fastest round


def add_shares(rows: list[Row]) -> None:
    """Adds the shares of the limits measured in the same comparison, or marks the limit as
    disturbed and adds none.

    A limit does the same in every round: where its median is far above its fastest round, something
    else ran meanwhile.
    """
    limits = [row for row in rows if "limit" in row]
    for row in limits:
        slowed = row["median_ms"] / row["fastest_ms"]
        if slowed > MOST_DISTURBED:
            row["disturbed"] = slowed
    if disturbed(rows):
        return
    for what, rate in (("operations", "gflops"), ("bytes", "gb_per_s")):
        limit = next((row for row in limits if row["limit"] == what), None)
        for row in rows:
            # Units have a peak for each dtype; memory is read at one rate.
            same = limit is not None and (what == "bytes" or row.get("dtype") == limit.get("dtype"))
            if limit is not None and same and rate in row and "limit" not in row:
                row[f"share_of_{what}"] = row[rate] / limit[rate]


def disturbed(rows: list[Row]) -> str:
    """Why a comparison gives no shares of its limit; an empty string if it was not disturbed."""
    slowed = max((row.get("disturbed", 0.0) for row in rows), default=0.0)
    return f"the limit's median is {slowed:.2f} times its fastest round, so no shares" if slowed else ""
