"""Speed of greedy `generate()`: txl.hf's TransfoXL against that of transformers 4.37.2,
enwik8-base.

make peers
PEERS=.peers pytest benchmarks/groups/test_generation.py --benchmark-only
"""

import functools

from harness.case import Case
from harness.comparison import Comparison, Implementation, comparisons
from harness.machine import Machine
from implementations import generation


@comparisons("cpu", backend=None)
def test_generation(machine: Machine, full: bool) -> list[Comparison]:
    found = []
    for mem_len, batch in ((512, 1), (512, 8), (3800, 1)) if full else ((512, 1),):
        implementations = [
            Implementation(name, name, functools.partial(generation.entry, way, mem_len, batch), role)
            for name, way, role in ((generation.NEW, "new", "ours"), (generation.OLD, "old", "other"))
        ]
        note = f"{generation.TOKENS} tokens after 128, batch {batch}, memory {mem_len}"
        case = Case(unit="token", model="enwik8-base", layers=12, note=note)
        found.append(Comparison("generate()", case, implementations, clock="own", seconds=20, minimum=3, maximum=20))
    return found
