"""Holds the machine code of the CUDA kernels, as built into txl_kernels._cuda, against
tools/cuda_table.json.

    python tools/cuda_lint.py                 fails on a spill, a missing 128-bit load, growth,
                                              serialised wgmma
    python tools/cuda_lint.py --update        rewrites the table for the nvcc that built the module
    python tools/cuda_lint.py --show          prints every kernel

No GPU is needed. cuobjdump comes with Triton; it repeats what `ptxas -v` said, where a stack means
spilled registers.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TABLE = Path(__file__).with_name("cuda_table.json")
GROWTH = 1.05  # maximum ratio of instruction counts
THREADS, REGISTERS = 128, 65536  # threads of a block, as in csrc/cuda/simt.h; registers of a multiprocessor
ROWS = 4  # rows of a tile that a thread loads
NO_COUNTER = 7  # the counter field of an instruction that uses none
MORE_TRIPS = 2  # allowed increase of round trips over the table: ptxas moves a load or two
Kernels = dict[str, dict[str, Any]]


def readable(mangled: str) -> str:
    """Return a readable kernel name: part_kernel<Shape<Bf16, 8, 1, 4, true>> -> "part bf16 width 64
    queries 4"; for Hopper backward_keys_kernel<KeysShape<Bf16, 64, ..>> -> "hopper backward_keys
    bf16 width 64"."""
    hopper = re.search(r"\d(forward|backward_queries|backward_keys)_kernel.*?(Bf16|F16)ELi(\d+)E", mangled)
    if hopper is not None:
        return f"hopper {hopper[1]} {hopper[2].lower()} width {hopper[3]}"
    kind = re.search(r"(part|merge|finish)_kernel", mangled)
    dtype = re.search(r"(Bf16|F16)", mangled)
    if kind is None:
        raise ValueError(f"not a kernel of csrc/cuda: {mangled}")
    name = f"{kind[1]} {dtype[1].lower() if dtype else 'f32'}"
    shape = re.search(r"Li(\d+)ELi(\d+)ELi(\d+)ELb([01])", mangled)
    if shape is None:
        return name
    lanes, chunks, queries, aligned = map(int, shape.groups())
    width = lanes * chunks * (8 if dtype else 4)
    return f"{name} width {width} queries {queries}{'' if aligned else ' unaligned'}"


def groups_of(name: str) -> int:
    """Return the number of consumer warpgroups of a block, besides the producer; see
    csrc/cuda/hopper."""
    if "backward" in name:
        return 1 if "width 128" in name else 2
    return 3 if "width 64" in name else 2


def _by_kernel(text: str) -> dict[str, str]:
    """Split cuobjdump's output by kernel: "sm_90 part ..." -> the kernel's section."""
    arch, name, pieces = "", "", {}
    for line in text.splitlines():
        if m := re.match(r"\s*arch = (\w+)", line):
            arch, name = m[1], ""
        elif m := re.match(r"\s*Function\s*:?\s+(\w+)", line):
            name = f"{arch.rstrip('a')} {readable(m[1])}"
            pieces[name] = ""
        elif name:
            pieces[name] += line + "\n"
    return pieces


def measure(binary: Path) -> Kernels:
    """Return for each kernel: registers, stack (bytes), instructions, wide (number of 128-bit
    loads), ahead (those before the first barrier), trips (round trips to global memory, see
    `trips`)."""

    def told(option: str) -> dict[str, str]:
        done = subprocess.run([CUOBJDUMP, option, binary], capture_output=True, text=True, check=True)
        return _by_kernel(done.stdout)

    usage, sass = told("-res-usage"), told("-sass")
    if not usage or usage.keys() != sass.keys():
        raise RuntimeError(f"cuobjdump found no kernels in {binary}, or not the same ones twice")
    found: Kernels = {}
    for name, text in sorted(usage.items()):
        said = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
        if said is None:
            raise RuntimeError(f"cuobjdump said nothing of the registers of {name}: {text}")
        placed = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", sass[name], re.MULTILINE)
        code = [x for _, x in placed]
        barrier = next((n for n, x in enumerate(code) if "BAR.SYNC" in x), len(code))
        wide = [n for n, x in enumerate(code) if re.search(r"\bLDG\.E\.128", x)]
        products = [x for x in code if x.startswith("HGMMA")]
        found[name] = {
            "registers": int(said[1]),
            "stack": int(said[2]) + int(said[4]),
            "shared": int(said[3]),  # static; the launch adds dynamic shared memory
            "instructions": len(code),
            "wide": len(wide),
            "ahead": sum(n < barrier for n in wide),
            "trips": trips(sass[name]),
        }
        if products:
            found[name] |= {"products": len(products), "waits": sum("gsb0" in x for x in products)}
        found[name] |= _handed_over({int(at, 16): x for at, x in placed}, groups_of(name))
    return found


def trips(sass: str) -> int:
    """Count how often the code, read from top to bottom, waits for a load from global memory that
    was issued after the previous such wait. The second word of an instruction names which of six
    counters it raises until its result is available, and which counters it waits for."""
    found = re.findall(r"\*/\s+(?:@!?U?P\w+ )?(\w+)[^;]*;\s+/\* 0x\w+ \*/\s+/\* 0x(\w{16}) \*/", sass)
    began: dict[int, int] = {}  # the last load that raised each counter
    count, resumed = 0, -1
    for n, (op, word) in enumerate(found):
        control = int(word, 16) >> 41
        raises, awaited = control >> 5 & 7, control >> 11 & 63
        over = [began.pop(x) for x in list(began) if awaited >> x & 1]
        if any(x > resumed for x in over):
            count, resumed = count + 1, n
        if raises != NO_COUNTER:
            began.pop(raises, None)
            if op == "LDG":
                began[raises] = n
    return count


def _handed_over(code: dict[int, str], groups: int) -> dict[str, int]:
    """Return how warpgroups redistribute registers (setmaxnreg): the number per thread that the
    producer `keeps` and that each consumer `takes`, the number of consumer warpgroups, and the
    number that the producer has `used` (its highest register + 1)."""
    kept = {at: int(m[1], 16) for at, x in code.items() if (m := re.match(r"USETMAXREG\.DEALLOC\S* (\w+)", x))}
    taken = [int(m[1], 16) for x in code.values() if (m := re.match(r"USETMAXREG\.TRY_ALLOC\S* UP\d, (\w+)", x))]
    if not kept and not taken:
        return {}
    if len(kept) != 1 or len(taken) != 1:
        raise RuntimeError(f"registers are handed over {len(kept)} and {len(taken)} times, not once")
    ((start, keeps),) = kept.items()
    numbers = (int(n) for at in reached(code, start) for n in re.findall(r"\bR(\d+)\b", code[at]))
    return {"keeps": keeps, "takes": taken[0], "groups": groups, "used": max(numbers, default=-1) + 1}


def reached(code: dict[int, str], start: int) -> set[int]:
    """Return the addresses of the instructions that can run after the one at `start`."""
    places = sorted(code)
    following = dict(itertools.pairwise(places))
    found, left = set(), [start]
    while left:
        at = left.pop()
        if at in found or at not in code:
            continue
        found.add(at)
        text = code[at]
        if re.match(r"(@!?U?P\w+ )?(BRX|JMX|RET)", text):
            raise RuntimeError(f"where {text} leads is not known")
        if re.search(r"\b(BRA|CALL|WARPSYNC\.COLLECTIVE|BSSY)", text):
            left += [int(x, 16) for x in re.findall(r"\b0x[0-9a-f]+\b", text)]
        if not re.match(r"(EXIT|BRA 0x)", text):
            left.append(following.get(at, -1))
    return found


def blocks(kernel: dict[str, Any]) -> int:
    """Return the number of blocks that fit on a multiprocessor by their registers."""
    return REGISTERS // (-(-kernel["registers"] // 8) * 8 * THREADS)


def complaints(name: str, now: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    found = []
    # backward_queries at width 128 spills 48 bytes; an H100 found it faster (docs/log.md).
    if now["stack"] > (0 if before is None else before["stack"]):
        found.append(f"{now['stack']} bytes of registers spilled")
    # A product with a depth of 64 is four instructions, the last of which commits the group.
    if now.get("waits", 0) * 4 > now.get("products", 0):
        found.append(f"{now['waits']} of {now['products']} wgmma end a group: the compiler has serialised them")
    if "keeps" in now:
        asked, had = now["keeps"] + now["groups"] * now["takes"], (now["groups"] + 1) * now["registers"]
        if asked > had:
            found.append(f"warpgroups ask for {asked} registers a thread of the {had} they have: one waits for ever")
        if now["used"] > now["keeps"]:
            found.append(f"register {now['used'] - 1} is used where {now['keeps']} were kept")
    if " part " in name and "unaligned" not in name:
        per_row = 2 if "f32 width 256" in name else 1
        tile = ROWS * per_row  # number of loads
        if now["wide"] < 6 * tile:
            found.append(
                f"{now['wide']} 128-bit loads, {6 * tile} are wanted: a first tile and the next, of k, r and v"
            )
        if now["ahead"] < 2 * tile:  # of three tiles; ptxas for sm_100 moves one behind the barrier if rows are wide
            found.append(f"{now['ahead']} loads in flight before the first barrier, {2 * tile} are wanted")
    if before is None:
        return found
    if now["ahead"] < before["ahead"]:
        found.append(f"{now['ahead']} loads in flight before the first barrier, before {before['ahead']}")
    if now["trips"] > before["trips"] + MORE_TRIPS:
        found.append(f"{now['trips']} trips to global memory one after the other, before {before['trips']}")
    if blocks(now) < blocks(before):
        found.append(
            f"{now['registers']} registers, before {before['registers']}: {blocks(now)} blocks a multiprocessor"
        )
    if now["instructions"] > GROWTH * before["instructions"]:
        found.append(f"{now['instructions']} instructions, before {before['instructions']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--if-built", action="store_true", help="no complaint where the module was not built")
    a = parser.parse_args()
    from txl_kernels.backends import cuda

    if cuda.native.module is None:
        print(cuda.native.why_not_loaded, file=sys.stderr)
        return 0 if a.if_built else 1
    compiler = cuda.native.module.compiler
    binary = Path(cuda.native.module.__file__)
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    now = measure(binary)
    before = now if a.update else table.get(compiler)
    bad = 0
    if before is None:
        print(f"the table has nothing of {compiler}: growth is not checked; run with --update")
        before = {}
    elif now.keys() != before.keys():
        bad += 1
        print(f"other kernels than in the table, run with --update: {sorted(now.keys() ^ before.keys())}")
    for name, kernel in now.items():
        if a.show:
            print(name, kernel, f"{blocks(kernel)} blocks a multiprocessor")
        for text in complaints(name, kernel, before.get(name)):
            bad += 1
            print(f"{name}: {text}")
    if a.update:
        table[compiler] = now
        rows = {c: ",\n".join(f'  "{k}": {json.dumps(x)}' for k, x in t.items()) for c, t in sorted(table.items())}
        TABLE.write_text("{\n" + ",\n".join(f' "{c}": {{\n{x}\n }}' for c, x in rows.items()) + "\n}\n")
    print(f"{compiler}: {len(now)} kernels, {binary.stat().st_size / 1e6:.1f} MB, {bad} complaints")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
