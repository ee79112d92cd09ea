"""Faults planted in PTX, each at one place of a kernel's text."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class PlantedFault(NamedTuple):
    name: str  # the kind, and the number of the place
    ptx: str
    line: int


# kind -> (pattern, replacement)
KINDS: dict[str, tuple[str, str]] = {
    "barrier left out": (r"\bbar\.sync\s+0;", ";"),
    "wait for copies left out": (r"\bcp\.async\.wait_group\s+0x0;|\bcp\.async\.wait_group\s+\d+;", ";"),
    "wait for products left out": (r"\bwgmma\.wait_group\.sync\.aligned\s+\d+;", ";"),
    "wait for an mbarrier left out": (r"@!complete bra\.uni waitLoop;|mbarrier\.try_wait[^;]*;", ";"),
    "fence for TMA left out": (r"\bfence\.proxy\.async[^;]*;", ";"),
    "fence for products left out": (r"\bwgmma\.fence[^;]*;", ";"),
    "mbarrier for one more arrival": (r"(mbarrier\.init[^,;]*),\s*1;", r"\1, 2;"),
    "fewer bytes to come": (r"(expect_tx[^;]*,\s*)(\d+);", r"\g<1>8;"),
    "load without its mask": (r"@%p\d+ (ld\.global)", r"\1"),
    "store without its mask": (r"@%p\d+ (st\.global)", r"\1"),
    "copy to another place": (r"(cp\.async\.c[ag]\.shared\.global \[\s*%r\d+\s*\+)\s*0\s*\]", r"\1 16 ]"),
    "load from another place": (r"(ld\.shared\.[\w.]+\s+\{?[^\[;]*\[%r\d+)(\+\d+)?\]", r"\1+16]"),
    "matrix at another place": (r"(ldmatrix[^;]*\[%r\d+)(\+\d+)?\]", r"\1+32]"),
    "shuffle with another lane": (r"(shfl\.sync\.bfly\.b32[^;]*,\s*)(\d+)(,\s*31,)", r"\g<1>31\3"),
}


def places(ptx: str, kind: str) -> Iterator[PlantedFault]:
    """Yield one fault for each place of a kind."""
    pattern, replacement = KINDS[kind]
    for n, m in enumerate(re.finditer(pattern, ptx)):
        changed = m.expand(replacement)
        if changed != m[0]:
            yield PlantedFault(
                f"{kind} {n}", ptx[: m.start()] + changed + ptx[m.end() :], ptx.count("\n", 0, m.start()) + 1
            )
