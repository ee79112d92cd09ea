"""Machine code of the GPU kernels, compared with tools/machine_code.json. No GPU is needed.

    python tools/machine_code.py                    Triton's kernels; those of csrc/cuda if built
    python tools/machine_code.py triton --only "backward_keys sm_90"
    python tools/machine_code.py cuda --update      the table gets what this compiler makes
    python tools/machine_code.py triton --show --tile forward=64,64,8,2 --only "forward sm_90"

Fails on a new spill, serialised wgmma, growth, and for csrc/cuda on a missing 128-bit load. Triton
compiles the calls of VARIANTS as it would on a GPU; the kernels of csrc/cuda are those in the
library of txl_kernels._cuda.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # kernels are not compiled if it is set
sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

import hopper_kernels
import networkx
import torch
import triton
from cases import BIAS_ALONE, NO_BIASES, Case, as_call, make_inputs
from pretended_gpu import capability_of, compiling

from txl_kernels import rel_attention
from txl_kernels.backends import cuda, native_modules
from txl_kernels.backends.triton import config, plan

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
TABLE = Path(__file__).with_name("machine_code.json")
GROWTH = 1.05  # maximum ratio of instruction counts to the table's
Figures = dict[str, Any]  # of a kernel

# Triton's kernels.

# maximum KiB of shared memory of a program, by compute capability or AMD's architecture
AMD: dict[int | str, int] = {"gfx90a": 64, "gfx942": 64, "gfx950": 160, "gfx1100": 64, "gfx1201": 64}
NVIDIA: dict[int | str, int] = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
SHARED_LIMIT = NVIDIA | AMD
RDNA_SPILL = 32  # maximum number of registers that a kernel spills on RDNA, up to head width 128
# One kernel spills more with Triton 3.9, most of it outside of loops. 16 warps would spill 25, and
# execute twice the instructions for each pair.
MORE_SPILL = {"backward_queries gfx1100 bf16 D128": 56}
PLAIN = ("forward", "backward_queries", "backward_keys")


class Variant(NamedTuple):
    """A call to compile, and the kernels of it to record.

    Attributes:
        architectures: compute capabilities, such as 90, and AMD's architectures.
        decode: no gradients, and split keys.
        same_bits: sum dr in `backward_table`, not by atomics.
        pointers: load by pointers where descriptors could be used.
    """

    case: Case
    architectures: tuple[int | str, ...] = (80, 90, "gfx942", "gfx1100")
    kernels: tuple[str, ...] = PLAIN
    dtype: torch.dtype = torch.bfloat16
    precision: str = "highest"  # of float32 products
    decode: bool = False
    same_bits: bool = False
    pointers: bool = False


def case(name: str, D: int, **options: Any) -> Case:
    """Make a case of sizes that Triton does not specialise on."""
    return Case(name, **{"B": 3, "H": 2, "L": 70, "M": 91, "D": D, **options})


INKLING: dict[str, Any] = {
    "Hkv": 1, "Dp": 16, "r": "1 T Dp", "T": 41, "zero_row": 0, "outside": "zero", "sink": "B H L", "position_scale": 1.0,
    **NO_BIASES,
}  # fmt: skip
VARIANTS = (
    Variant(case("bf16 D64", 64), (*NVIDIA, *AMD)),
    Variant(case("bf16 D64 decode", 64, L=3), (*NVIDIA, "gfx942", "gfx1201"), ("forward",), decode=True),
    Variant(
        case("bf16 D64 same bits", 64),
        (*NVIDIA, "gfx942", "gfx1100"),
        ("backward_queries", "backward_table"),
        same_bits=True,
    ),
    Variant(case("bf16 D128", 128), (80, 89, 90, 120, "gfx942", "gfx1100", "gfx1201")),
    Variant(case("bf16 D256", 256)),
    Variant(case("fp32 D64", 64), (80, "gfx942", "gfx1100"), dtype=torch.float32),
    Variant(case("tf32 D64", 64), (90,), dtype=torch.float32, precision="high"),
    Variant(case("bf16 D64 pointers", 64), (90,), pointers=True),
    # Rows of 80 bytes, whose alignment Triton does not derive by itself.
    Variant(case("bf16 D40", 40), (120,)),
    Variant(case("bf16 D64 bounds dropout", 64, intervals="random", dropout_p=0.1)),
    Variant(
        case("bf16 D64 r_bias softcap values 128", 64, **BIAS_ALONE, softcap=5.0, Dv=128), (90, "gfx942", "gfx1201")
    ),
    Variant(case("bf16 D128 Inkling", 128, **INKLING)),
)


class Compiled(NamedTuple):
    """A kernel as Triton compiled it, and the arguments of its launch."""

    kernel: Any
    arguments: dict[str, Any]


def compile_call(variant: Variant, architecture: int | str) -> dict[str, Compiled]:
    """Return the kernels that a call launches, by name."""
    found: dict[str, Compiled] = {}

    def launch(function: Any, kernel: Any, grid: object, arguments: dict[str, Any]) -> None:
        found[function.fn.__name__.removesuffix("_kernel")] = Compiled(kernel, arguments)

    inputs = make_inputs(variant.case, variant.dtype)
    before = torch.get_float32_matmul_precision()
    with (
        mock.patch.object(config, "dr_by_atomics", return_value=not variant.same_bits),
        mock.patch.object(plan, "describable", (lambda form: False) if variant.pointers else plan.describable),
        torch.set_grad_enabled(not variant.decode),
        compiling(architecture, launch, multiprocessors=132 if variant.decode else 1),
    ):
        torch.set_float32_matmul_precision(variant.precision)
        out = rel_attention(**as_call(inputs), backend="triton")
        if not variant.decode:
            out.backward(torch.empty_like(out))
        torch.set_float32_matmul_precision(before)
    return found


def names(variant: Variant, architecture: int | str) -> dict[str, str]:
    """Return the kernels to record of a call: their names in the table, and their functions."""
    target = architecture if isinstance(architecture, str) else f"sm_{architecture}"
    return {f"{kernel} {target} {variant.case}": kernel for kernel in variant.kernels}


def measure_call(variant: Variant, architecture: int | str) -> dict[str, Figures]:
    """Return the figures of a call's kernels, by their names in the table."""
    made = compile_call(variant, architecture)
    return {
        name: measure_amd(made[kernel]) if isinstance(architecture, str) else measure_triton(made[kernel], architecture)
        for name, kernel in names(variant, architecture).items()
    }


def tile_of(arguments: dict[str, Any]) -> list[int]:
    """Return queries, keys, warps and stages of a launch."""
    square = arguments.get("BLOCK")
    tile = (arguments.get("BM", square), arguments.get("BN", square), arguments["num_warps"], arguments["num_stages"])
    return list(tile)


def measure_amd(made: Compiled) -> Figures:
    """Return the figures of a kernel for an AMD GPU, as of `measure_triton` those that its assembly
    states. spill: vector registers."""
    text: str = made.kernel.asm["amdgcn"]
    counts = dict(re.findall(r"^\s+\.(\w+_count):\s+(\d+)$", text, re.MULTILINE))
    loops = inner_loops_amd(text)
    return {
        "tile": tile_of(made.arguments),
        "registers": int(counts["vgpr_count"]),
        "spill": int(counts["vgpr_spill_count"]),
        "shared": made.kernel.metadata.shared,
        "loop": max(map(len, loops), default=0),
        "products": max((sum(bool(re.match(MATRIX, x)) for x in loop) for loop in loops), default=0),
    }


MATRIX = r"v_(mfma|s?wmma)"  # AMD's instructions of matrix products


def inner_loops_amd(text: str) -> list[list[str]]:
    """Return the instructions of every innermost loop that has products."""
    labels, code = parsed(text, r"(\.LBB\w+):", r"\s+([a-z]+_\w+.*)")
    # Code that a branch has moved out of a loop jumps back unconditionally.
    back = ((at, re.match(r"s_cbranch\w* (\.LBB\w+)", x)) for at, x in enumerate(code))
    loops = [(labels[m[1]], at) for at, m in back if m and labels[m[1]] <= at]
    return innermost(code, loops, rf"{MATRIX}|v_(pk_|dual_)?fma")


def parsed(text: str, label: str, instruction: str) -> tuple[dict[str, int], list[str]]:
    """Return the number of the instruction behind each label, and the instructions.

    label, instruction: patterns of the lines that hold them, each with one group.
    """
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in text.splitlines():
        if m := re.match(label, line):
            labels[m[1]] = len(code)
        elif m := re.match(instruction, line):
            code.append(m[1])
    return labels, code


def innermost(code: list[str], loops: list[tuple[int, int]], product: str) -> list[list[str]]:
    """Return the instructions of the loops with products that hold no other such loop.

    loops: the first and last instruction of each. product: the pattern of a product.
    """
    found = [(a, b) for a, b in loops if any(re.match(product, x) for x in code[a : b + 1])]
    return [code[a : b + 1] for a, b in found if not any((c, d) != (a, b) and c >= a and d <= b for c, d in found)]


def measure_triton(made: Compiled, architecture: int) -> Figures:
    """Return the figures of a kernel.

    tile: queries, keys, warps, stages. spill: bytes stored and loaded. shared: bytes. serialised:
    ptxas's warnings. loop, products: instructions of the inner loop with the most, and the matrix
    products among them.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "k.cubin"), Path(folder, "k.ptx")
        cubin.write_bytes(made.kernel.asm["cubin"])
        ptx.write_text(made.kernel.asm["ptx"])
        usage, sass = _output("cuobjdump", "-res-usage", cubin), _output("nvdisasm", "-c", cubin)
        newer = architecture >= 100 or plan.TRITON_VERSION >= (3, 9)
        ptxas = "ptxas-blackwell" if newer and (BIN / "ptxas-blackwell").exists() else "ptxas"
        target = f"sm_{architecture}{'a' if architecture >= 90 else ''}"
        text = _output(ptxas, "-v", f"--gpu-name={target}", ptx, "-o", os.devnull)
    spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.search(r"REG:(\d+)", usage)
    if spill is None or registers is None:
        raise RuntimeError(f"ptxas printed no registers or spills:\n{text}\n{usage}")
    loops = inner_loops(sass, architecture)
    return {
        "tile": tile_of(made.arguments),
        "registers": int(registers[1]),
        "spill": int(spill[1]) + int(spill[2]),
        "shared": made.kernel.metadata.shared,
        "serialised": sorted(set(re.findall(r"\((C75\d+)\).*?serialized", text))),
        "loop": max(map(len, loops), default=0),
        "products": max((sum("MMA" in x for x in loop) for loop in loops), default=0),
    }


def _output(program: str, *arguments: str | Path) -> str:
    """Run one of the programs that come with Triton; return what it prints."""
    done = subprocess.run([BIN / program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def inner_loops(sass: str, architecture: int) -> list[list[str]]:
    """Return the instructions of every innermost loop that has matrix products."""
    labels, code = parsed(sass, r"\s*(\.L_x_\d+):", r"\s*/\*[0-9a-f]+\*/\s+(.*?);")
    loops = []
    for at, text in enumerate(code):
        m = re.search(r"BRA\S*\s.*?(\.L_x_\d+)", text)
        # From sm_90 on, code that waits for barriers is placed at the end and jumps back
        # unconditionally; from sm_100 on the condition may be an operand.
        conditional = re.match(r"@|BRA\S* !?U?P\d", text)
        if m and labels.get(m[1], at + 1) <= at and (architecture < 90 or conditional):
            loops.append((labels[m[1]], at))
    return innermost(code, loops, ".*(MMA|FFMA)")


def complaints_triton(name: str, now: Figures, before: Figures | None) -> Iterator[str]:
    """Yield what is wrong with a kernel of Triton's, beside growth and spills."""
    target = name.split()[1]
    limit = SHARED_LIMIT[target if target in AMD else int(target.removeprefix("sm_"))]
    if target in AMD:
        if now["products"] == 0 and ("fp32" not in name or target.startswith("gfx9")):
            yield "no matrix instruction in the inner loop"
        allowed = 0 if target.startswith("gfx9") else MORE_SPILL.get(name, RDNA_SPILL)
        if now["spill"] > allowed and "fp32" not in name and "D256" not in name:
            yield f"spills {now['spill']} registers, {allowed} are allowed"
    if now["shared"] > limit * 1024:
        yield f"{now['shared']} bytes of shared memory, the limit is {limit} KiB"
    if before is not None:
        if now["tile"] != before["tile"]:
            yield f"tile {now['tile']}, the table has {before['tile']}: run with --update"
        if set(now.get("serialised", ())) - set(before.get("serialised", ())):
            yield f"wgmma serialised ({', '.join(now['serialised'])})"


# Kernels of csrc/cuda.

THREADS, REGISTERS = 128, 65536  # threads of a block, as in csrc/cuda/simt.h; registers of a multiprocessor
ROWS = 4  # rows of a tile that a thread loads
NO_COUNTER = 7  # the counter field of an instruction that uses none
MORE_TRIPS = 2  # allowed increase of round trips over the table: ptxas moves a load or two


def readable(mangled: str) -> str:
    """Return a readable kernel name: part_kernel<Shape<Bf16, 8, 1, 4, true, false>> -> "part bf16
    width 64 queries 4"; for Hopper backward_keys_kernel<KeysShape<Bf16, 64, ..>> -> "hopper
    backward_keys bf16 width 64"."""
    hopper = hopper_kernels.instance(mangled)
    if hopper is not None:
        positions = " q_pos" if hopper.has_q_pos else ""
        return f"hopper {hopper.kernel} {hopper.dtype} width {hopper.width}{positions}"
    kind = re.search(r"(part|merge|finish)_kernel", mangled)
    dtype = re.search(r"(Bf16|F16)", mangled)
    if kind is None:
        raise ValueError(f"not a kernel of csrc/cuda: {mangled}")
    name = f"{kind[1]} {dtype[1].lower() if dtype else 'f32'}"
    shape = re.search(r"Li(\d+)ELi(\d+)ELi(\d+)ELb([01])ELb([01])", mangled)
    if shape is None:
        return name
    lanes, chunks, queries, aligned, terms = map(int, shape.groups())
    width = lanes * chunks * (8 if dtype else 4)
    return f"{name} width {width} queries {queries}{' terms' if terms else ''}{'' if aligned else ' unaligned'}"


def _by_kernel(text: str) -> dict[str, str]:
    """Split cuobjdump's output by kernel: "sm_90 part ..." -> the kernel's mangled name and
    section."""
    arch, name, pieces = "", "", {}
    for line in text.splitlines():
        if m := re.match(r"\s*arch = (\w+)", line):
            arch, name = m[1], ""
        elif m := re.match(r"\s*Function\s*:?\s+(\w+)", line):
            name = f"{arch.rstrip('a')} {readable(m[1])}"
            pieces[name] = m[1] + "\n"
        elif name:
            pieces[name] += line + "\n"
    return pieces


def measure_cuda(binary: Path) -> dict[str, Figures]:
    """Return for each kernel: registers, spill (bytes of stack), instructions, wide (number of
    128-bit loads), ahead (those before the first barrier), trips (round trips to global memory, see
    `trips`); where there are products also once (instructions outside of loops)."""
    usage, sass = (_by_kernel(_output("cuobjdump", option, binary)) for option in ("-res-usage", "-sass"))
    if not usage or usage.keys() != sass.keys():
        raise RuntimeError(f"cuobjdump found no kernels in {binary}, or not the same ones twice")
    found: dict[str, Figures] = {}
    for name, text in sorted(usage.items()):
        used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
        if used is None:
            raise RuntimeError(f"cuobjdump printed no registers of {name}: {text}")
        placed = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", sass[name], re.MULTILINE)
        code = [x for _, x in placed]
        barrier = next((n for n, x in enumerate(code) if "BAR.SYNC" in x), len(code))
        wide = [n for n, x in enumerate(code) if re.search(r"\bLDG\.E\.128", x)]
        products = [x for x in code if x.startswith("HGMMA")]
        found[name] = {
            "registers": int(used[1]),
            "spill": int(used[2]) + int(used[4]),
            "shared": int(used[3]),  # static; the launch adds dynamic shared memory
            "instructions": len(code),
            "wide": len(wide),
            "ahead": sum(n < barrier for n in wide),
            "trips": trips(sass[name]),
        }
        if products:
            found[name] |= {"products": len(products), "waits": sum("gsb0" in x for x in products)}
            found[name] |= {"once": outside_of_loops({int(at, 16): x for at, x in placed})}
        hopper = hopper_kernels.instance(sass[name].partition("\n")[0])
        found[name] |= _redistributed({int(at, 16): x for at, x in placed}, 0 if hopper is None else hopper.groups)
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


def _redistributed(code: dict[int, str], groups: int) -> dict[str, int]:
    """Return how warpgroups redistribute registers (setmaxnreg): the number per thread that the
    producer `keeps` and that each consumer `takes`, the number of consumer warpgroups, and the
    number that the producer has `used` (its highest register + 1)."""
    kept = {at: int(m[1], 16) for at, x in code.items() if (m := re.match(r"USETMAXREG\.DEALLOC\S* (\w+)", x))}
    taken = [int(m[1], 16) for x in code.values() if (m := re.match(r"USETMAXREG\.TRY_ALLOC\S* UP\d, (\w+)", x))]
    if not kept and not taken:
        return {}
    if len(kept) != 1 or len(taken) != 1:
        raise RuntimeError(f"registers are released {len(kept)} times and requested {len(taken)} times, not once")
    ((start, keeps),) = kept.items()
    numbers = (int(n) for at in reached(code, start) for n in re.findall(r"\bR(\d+)\b", code[at]))
    return {"keeps": keeps, "takes": taken[0], "groups": groups, "used": max(numbers, default=-1) + 1}


def reached(code: dict[int, str], start: int) -> set[int]:
    """Return the addresses of the instructions that can run after the one at `start`."""
    found: set[int] = {start} | networkx.descendants(flow(code), start)
    for at in found:
        if re.match(r"(@!?U?P\w+ )?(BRX|JMX|RET)", code[at]):
            raise RuntimeError(f"the target of {code[at]} is not known")
    return found


def flow(code: dict[int, str]) -> networkx.DiGraph:
    """Return a graph with an edge from each address to those of instructions that can run next."""
    following = dict(itertools.pairwise(sorted(code)))
    graph = networkx.DiGraph()
    graph.add_nodes_from(code)
    for at, text in code.items():
        targets = [] if re.match(r"(EXIT|BRA 0x|RET)", text) else [following.get(at, -1)]
        if re.search(r"\b(BRA|CALL|WARPSYNC\.COLLECTIVE|BSSY)", text):
            targets += [int(x, 16) for x in re.findall(r"\b0x[0-9a-f]+\b", text)]
        graph.add_edges_from((at, x) for x in targets if x in code)
    return graph


def outside_of_loops(code: dict[int, str]) -> int:
    """Return the number of instructions that run at most once in a thread."""
    components = networkx.strongly_connected_components(flow(code))
    return len(code) - sum(len(x) for x in components if len(x) > 1)


def blocks(kernel: Figures) -> int:
    """Return the number of blocks that fit on a multiprocessor by their registers."""
    return REGISTERS // (-(-int(kernel["registers"]) // 8) * 8 * THREADS)


def complaints_cuda(name: str, now: Figures, before: Figures | None) -> Iterator[str]:
    """Yield what is wrong with a kernel of csrc/cuda, beside growth and spills."""
    # A product with a depth of 64 is four instructions, the last of which commits the group; one of
    # position queries, 16 deep, is one. Serialised, each instruction ends a group.
    shortest = 2 if name.endswith("q_pos") else 4  # instructions of a group, on the average
    if now.get("waits", 0) * shortest > now.get("products", 0):
        yield f"{now['waits']} of {now['products']} wgmma end a group: the compiler has serialised them"
    if "keeps" in now:
        asked, had = now["keeps"] + now["groups"] * now["takes"], (now["groups"] + 1) * now["registers"]
        if asked > had:
            yield f"warpgroups request {asked} registers per thread of the {had} they have: one waits for ever"
        if now["used"] > now["keeps"]:
            yield f"register {now['used'] - 1} is used where {now['keeps']} were kept"
    if " part " in name and "unaligned" not in name:
        tile = ROWS * (2 if "f32 width 256" in name else 1)  # number of loads
        wide = 4 * tile + 4 if " terms" in name else 6 * tile
        if now["wide"] < wide:
            yield f"{now['wide']} 128-bit loads, {wide} are needed: the first tile and the next, of k, r and v"
        if now["ahead"] < 2 * tile:  # of three tiles; ptxas for sm_100 moves one behind the barrier if rows are wide
            yield f"{now['ahead']} loads in flight before the first barrier, {2 * tile} are needed"
    if before is not None:
        if now["ahead"] < before["ahead"]:
            yield f"{now['ahead']} loads in flight before the first barrier, before {before['ahead']}"
        if now["trips"] > before["trips"] + MORE_TRIPS:
            yield f"{now['trips']} trips to global memory one after the other, before {before['trips']}"
        if blocks(now) < blocks(before):
            yield f"{now['registers']} registers, before {before['registers']}: {blocks(now)} blocks a multiprocessor"


# Both.


def complaints(name: str, now: Figures, before: Figures | None) -> list[str]:
    """Return what is wrong with a kernel; before: its figures in the table."""
    found = list((complaints_triton if "tile" in now else complaints_cuda)(name, now, before))
    if now["spill"] > (before or {"spill": 0})["spill"]:
        unit = "registers" if " gfx" in name else "bytes"
        found.append(f"spills {now['spill']} {unit}, before {(before or {'spill': 0})['spill']}")
    for key, where in (("loop", " in the inner loop"), ("instructions", ""), ("once", " outside of loops")):
        # a loop of 0: none was found in the machine code
        if before is not None and before.get(key) and now[key] > GROWTH * before[key]:
            found.append(f"{now[key]} instructions{where}, before {before[key]}")
    return found


def compare(compiler: str, found: dict[str, Figures], wanted: set[str], update: bool, show: bool) -> int:
    """Compare kernels with the table, or write them to it; return the number of complaints.

    wanted: names of all kernels that the table should have of this compiler.
    """
    tables: dict[str, dict[str, Figures]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    table = tables.get(compiler, {})
    bad = 0
    if not update and not table:
        bad += compiler.startswith("Triton")
        print(f"the table has no kernels of {compiler}: growth is not checked, run with --update")
    elif not update and (different := found.keys() - table.keys() | table.keys() - wanted):
        bad += 1
        print(f"other kernels than in the table for {compiler}, run with --update: {sorted(different)}")
    for name, now in found.items():
        if show:
            print(name, json.dumps(now))
        for text in complaints(name, now, now if update else table.get(name)):
            bad += 1
            print(f"{name}: {text}")
    if update:
        tables[compiler] = {name: x for name, x in sorted((table | found).items()) if name in wanted}
        rows = {c: ",\n".join(f'  "{k}": {json.dumps(x)}' for k, x in t.items()) for c, t in sorted(tables.items())}
        TABLE.write_text("{\n" + ",\n".join(f' "{c}": {{\n{x}\n }}' for c, x in rows.items()) + "\n}\n")
    print(f"{compiler}: {len(found)} kernels, {sum(x['spill'] > 0 for x in found.values())} spill, {bad} complaints")
    return bad


def check_triton(only: str, jobs: int, update: bool, show: bool) -> int:
    calls = [
        (variant, architecture)
        for variant in VARIANTS
        for architecture in variant.architectures
        if config.why_not_capability(capability_of(architecture), plan.TRITON_VERSION) is None
    ]
    wanted = {name for call in calls for name in names(*call)}
    chosen = [call for call in calls if any(only in name for name in names(*call))]
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        made = pool.map(measure_call, *zip(*chosen, strict=True)) if chosen else ()
        found = {name: figures for x in made for name, figures in x.items() if only in name}
    return compare(f"Triton {'.'.join(map(str, plan.TRITON_VERSION))}", found, wanted, update, show)


def check_cuda(only: str, update: bool, show: bool) -> int:
    """Compare the kernels of the built module, if there is one."""
    module = cuda.native.module
    if module is None:
        print(cuda.native.why_not_loaded)
        return 0
    whole = measure_cuda(native_modules.library_of("_cuda", cuda.native.file))
    found = {name: figures for name, figures in whole.items() if only in name}
    return compare(module.compiler, found, set(whole), update, show)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["triton", "cuda"], help="default: both")
    parser.add_argument("--only", default="", help="kernels whose name contains it")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the figures")
    parser.add_argument("--tile", nargs="*", default=[], help="KERNEL=QUERIES,KEYS,WARPS,STAGES instead of config.py's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    a = parser.parse_args()
    given = {name: config.Config(*map(int, numbers.split(","))) for name, numbers in (x.split("=") for x in a.tile)}
    choose, bad = config.choose, 0
    if a.what != "cuda":
        with mock.patch.object(config, "choose", lambda kernel, *rest: given.get(kernel) or choose(kernel, *rest)):
            bad += check_triton(a.only, a.jobs, a.update, a.show)
    if a.what != "triton":
        bad += check_cuda(a.only, a.update, a.show)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
