"""Compiles every shipped kernel configuration with no GPU and holds it against aot_table.json.

    python tools/aot.py check           fails on a new spill, serialisation, or growth
    python tools/aot.py check --sample 60   bf16 at width 64, and others up to 60 by the date
    python tools/aot.py check --update  rewrites the table for the Triton at hand
    python tools/aot.py show forward --capability 90 --configs "64,64,4,2 64,64,8,2" --tma

Registers, spills and shared memory come from ptxas, instructions of the inner loops from the
machine code.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # kernels are not compiled if it is set
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from txl_kernels.backends.triton import config, passes, plan

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
TABLE = Path(__file__).with_name("aot_table.json")
VERSION = ".".join(triton.__version__.split(".")[:2])
# maximum KiB of shared memory of a program, by compute capability
SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
GROWTH = 1.05  # maximum ratio of the inner loop's instruction count to the table's
POINTERS = dict.fromkeys(["LSE", "TOP", "LSE2", "DELTA", "DLSE", "DQ_SUM", "DU", "DR", "PARTS", "PART_SUMS"], "*fp32")
BOUNDS = ["START", "END", "KEY_FIRST", "KEY_LAST", "ROW_FIRST", "ROW_LAST"]
POINTERS |= dict.fromkeys(BOUNDS, "*i32") | {"SEED": "*i64"} | dict.fromkeys(["DB", "SINK", "DQ_POS_SUM"], "*fp32")
FLOATS = {"sign", "scale", "scale_log2", "to_cap", "keep_scale", "position_scale", "position_factor"}
QUERIES_OF_R = ["Q_POS", "qp_batch", "qp_head", "qp_row", "DQ_POS", "DQ_POS_SUM", "dqp_batch", "dqp_head", "dqp_row"]
SINKS = ["sink_batch", "sink_head", "sink_query"]
QUERIES_OF_R += ["position_scale", "position_factor"]
VALUES = {"V", "V_MEM", "DOUT"}
KINDS = {"bf16": "half", "fp16": "half", "tf32": "tf32", "fp32": "float32"}


class Variant(NamedTuple):
    """A kernel with the types and options of a call."""

    kernel: str
    capability: int
    dtype: str  # a key of KINDS
    width: int
    tma: bool = False
    bounds: bool = False
    dropout: bool = False
    atomics: bool = False
    value_width: int = 0  # 0 for `width`
    tables: str = "r"  # "r", "r_bias" or "both"
    softcap: bool = False
    position_width: int = 0  # of `q_pos`; 0 without it
    zero_outside: bool = False
    grouped: bool = False
    sink: bool = False

    def __str__(self) -> str:
        named = ("tma", "bounds", "dropout", "atomics", "softcap", "zero_outside", "grouped", "sink")
        options = [x for x in named if getattr(self, x)]
        options += [f"values {self.value_width}"] if self.value_width else []
        options += [f"q_pos {self.position_width}"] if self.position_width else []
        options += {"r": [], "r_bias": ["r_bias"], "both": ["r and r_bias"]}[self.tables]
        return " ".join([self.kernel, f"sm_{self.capability}", self.dtype, f"D{self.width}", *options])

    def config(self) -> config.Config:
        block_d = triton.next_power_of_2(max(self.width, self.value_width, self.position_width))
        return config.choose(
            self.kernel, divmod(self.capability, 10), KINDS[self.dtype], block_d, self.tma, self.dropout
        )


def shipped() -> list[Variant]:
    """List the kernels for all widths and architectures in bf16, and for other dtypes and options
    where these change the code most."""
    variants = [
        Variant(kernel, capability, "bf16", width, tma=config.has_descriptors(divmod(capability, 10)))
        for kernel in config.KERNELS
        for capability in SHARED_LIMIT
        for width in (64, 128)
    ]
    for kernel in config.KERNELS:
        for capability in (80, 90):
            plain = Variant(kernel, capability, "bf16", 64, capability == 90)
            variants += [plain._replace(dtype=dtype, width=width) for dtype in ("tf32", "fp32") for width in (64, 128)]
            variants += [plain._replace(width=width) for width in (80, 256)]
            variants += [plain._replace(dropout=True), plain._replace(bounds=True)]
        variants += [Variant(kernel, 90, "bf16", width) for width in (64, 128)]  # with pointers instead of descriptors
        # Rows of 80 bytes, whose alignment Triton does not derive by itself.
        variants += [Variant(kernel, capability, "bf16", 40) for capability in (80, 120)]
        # Terms that the paper does not have, one at a time.
        plain = Variant(kernel, 90, "bf16", 64, True)
        variants += [plain._replace(value_width=128), plain._replace(tables="r_bias"), plain._replace(softcap=True)]
        variants += [plain._replace(tables="both")]
        # As in Inkling's attention.
        plain = Variant(kernel, 90, "bf16", 128, position_width=16, zero_outside=True, grouped=True, sink=True)
        variants += [plain._replace(capability=80), plain._replace(tma=True), plain]
    by_atomics = [v._replace(atomics=v.kernel == "backward_queries") for v in variants]
    same_bits = [Variant("backward_queries", c, "bf16", width, tma=c == 90) for c in (80, 90) for width in (64, 128)]
    return by_atomics + same_bits


def compile_variant(
    v: Variant, chosen: config.Config, far: Collection[str] = (), target: GPUTarget | None = None
) -> Any:
    """Compile a variant; return Triton's compiled kernel.

    far: names of strides passed as 64 bits, as strides from 2**31 on are. target: compile for it
    instead of v's capability.
    """
    name = "forward" if v.kernel == "decode" else v.kernel
    function = getattr(passes, f"{name}_kernel")
    dtype = "fp32" if v.dtype == "tf32" else v.dtype
    value_width = v.value_width or v.width
    position_width = v.position_width or v.width
    widths = (v.width, value_width, position_width)
    block_d, block_dv, block_dp = (plan.padded(x, divmod(v.capability, 10)) for x in widths)
    aligned_rows = v.width % 16 == 0
    constants: dict[str, Any] = {
        "D": v.width, "BLOCK_D": block_d, "D_V": value_width, "BLOCK_DV": block_dv, "D_P": position_width,
        "BLOCK_DP": block_dp, "ZERO_OUTSIDE": v.zero_outside, "DROPOUT": v.dropout, "WIDE": False, "TMA": v.tma,
        "BM": chosen.block_m, "BN": chosen.block_n, "BLOCK": chosen.block_m, "SPLIT": v.kernel == "decode",
        "PRECISION": "tf32" if v.dtype == "tf32" else "ieee", "UNIT": 1 if aligned_rows else 8,
        "APART": v.capability // 10 == 10,
    }  # fmt: skip
    constants |= {} if v.bounds else dict.fromkeys(BOUNDS)
    constants |= {} if v.dropout else {"SEED": None}
    constants |= {} if v.atomics or v.kernel != "backward_queries" else {"DR": None, "DB": None}
    constants |= {} if v.softcap else {"to_cap": None}
    constants |= {} if v.grouped else {"group": None}
    constants |= {} if v.sink and v.kernel == "forward" else dict.fromkeys(["SINK", *SINKS])
    constants |= {"DU": None} if v.position_width else dict.fromkeys(QUERIES_OF_R)
    constants |= dict.fromkeys(["R_BIAS", "rb_head", "rb_row", "DB"]) if v.tables == "r" else {}
    constants |= dict.fromkeys(["R", "QW", "r_head", "r_row", "DR"]) if v.tables == "r_bias" else {}
    constants = {name: x for name, x in constants.items() if name in function.arg_names}
    walks_keys = v.kernel in ("forward", "decode", "backward_queries")
    described = {"K", "V", "K_MEM", "V_MEM", "R"} if walks_keys else {"QU", "QW", "DOUT", "R"}
    if v.bounds and walks_keys:  # rows are left out, which a descriptor cannot do
        described -= {"K", "K_MEM"} if v.kernel == "backward_queries" else {"V", "V_MEM"}
    rows = chosen.block_n if walks_keys else chosen.block_m
    signature, aligned = {}, []
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif v.tma and name in described:
            blocks = 2 if (v.kernel, name) == ("backward_keys", "R") else 1
            block = block_dv if name in VALUES else block_dp if name in ("R", "QW") else block_d
            axes = ([] if name == "R" else [1]) + [1, rows * blocks, block]
            signature[name] = f"tensordesc<{dtype}[{','.join(map(str, axes))}]>"
        elif name.isupper() and name not in ("B", "H", "L", "M", "T"):
            signature[name] = "*fp32" if name == "OUT" and v.kernel == "decode" else POINTERS.get(name, "*" + dtype)
            aligned.append(name)
        else:
            signature[name] = "fp32" if name in FLOATS else "i64" if name in far else "i32"
            if aligned_rows and re.search("_(batch|head|row)$", name) and name != "zero_row":
                aligned.append(name)
    source = ASTSource(
        function,
        signature,
        {(function.arg_names.index(name),): x for name, x in constants.items()},
        {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    return triton.compile(source, target=target or GPUTarget("cuda", v.capability, 32), options=options)


def inner_loops(sass: str, capability: int) -> list[list[str]]:
    """Return the instructions of every innermost loop that has matrix products."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if m := re.match(r"\s*(\.L_x_\d+):", line):
            labels[m[1]] = len(code)
        elif m := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(m[1])
    loops = []
    for at, text in enumerate(code):
        m = re.search(r"BRA\S*\s.*?(\.L_x_\d+)", text)
        # From sm_90 on, code that waits for barriers is placed at the end and jumps back
        # unconditionally.
        if m and labels.get(m[1], at + 1) <= at and (capability < 90 or text.startswith("@")):
            loops.append((labels[m[1]], at))
    loops = [(a, b) for a, b in loops if any("MMA" in x or "FFMA" in x for x in code[a : b + 1])]
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and c >= a and d <= b for c, d in loops)]
    return [code[a : b + 1] for a, b in inner]


def measure(compiled: Any, capability: int) -> dict[str, Any]:
    """Return the figures of one entry of the table.

    spill: bytes stored and loaded; shared: bytes; serialised: number of warnings; loop, products:
    instructions of the inner loop with the most, and the matrix products among them.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "k.cubin"), Path(folder, "k.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])
        usage = subprocess.run(
            [BIN / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run([BIN / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
        newer = capability >= 100 or tuple(map(int, VERSION.split("."))) >= (3, 9)
        ptxas = BIN / ("ptxas-blackwell" if newer and (BIN / "ptxas-blackwell").exists() else "ptxas")
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [ptxas, "-v", f"--gpu-name={arch}", ptx, "-o", os.devnull]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    text = told.stdout + told.stderr
    spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.search(r"REG:(\d+)", usage)
    if spill is None or registers is None:
        raise RuntimeError(f"ptxas said nothing of registers and spills:\n{text}\n{usage}")
    loops = inner_loops(sass, capability)
    return {
        "registers": int(registers[1]),
        "spill": int(spill[1]) + int(spill[2]),
        "shared": compiled.metadata.shared,
        "serialised": sorted(set(re.findall(r"\((C75\d+)\).*?serialized", text))),
        "loop": max(map(len, loops), default=0),
        "products": max((sum("MMA" in x for x in loop) for loop in loops), default=0),
    }


def sample(variants: list[Variant], count: int, day: int) -> list[Variant]:
    """Select every kernel and architecture in bf16 at width 64, and other variants up to `count` in
    all, rotating by `day` so that each is selected in turn."""
    plain = [v for v in variants if v == Variant(v.kernel, v.capability, "bf16", 64, v.tma, atomics=v.atomics)]
    others = [v for v in variants if v not in plain]
    more = max(count - len(plain), 0)
    return plain + [others[(day * more + n) % len(others)] for n in range(min(more, len(others)))]


def examine(v: Variant) -> tuple[str, dict[str, Any]]:
    """Compile and measure a variant; the result is `refused` if the package does not support it
    with this Triton."""
    refusal = config.why_not_capability(divmod(v.capability, 10), plan.TRITON_VERSION)
    if refusal is not None:
        return str(v), {"refused": refusal}
    chosen = v.config()
    return str(v), {"config": list(chosen), **measure(compile_variant(v, chosen), v.capability)}


def complaints(name: str, now: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    capability = int(re.search(r"sm_(\d+)", name)[1])  # type: ignore[index]
    found = []
    if "refused" in now:
        return [] if before == now else [f"refused ({now['refused']}), the table has {before}"]
    if before is not None and "refused" in before:
        return [f"compiled, the table says: refused ({before['refused']})"]
    if now["shared"] > SHARED_LIMIT[capability] * 1024:
        found.append(f"{now['shared']} bytes of shared memory, the limit is {SHARED_LIMIT[capability]} KiB")
    if before is None:
        return [*found, "not in the table: run with --update and look at the difference"]
    if now["config"] != before["config"]:
        found.append(f"configuration {now['config']}, the table has {before['config']}: run with --update")
    if now["spill"] > before["spill"]:
        found.append(f"spills {now['spill']} bytes, before {before['spill']}")
    if set(now["serialised"]) - set(before["serialised"]):
        found.append(f"wgmma serialised ({', '.join(now['serialised'])})")
    if before["loop"] and now["loop"] > GROWTH * before["loop"]:  # 0: no loop was found in the machine code
        found.append(f"{now['loop']} instructions in the inner loop, before {before['loop']}")
    return found


def check(update: bool, jobs: int, only: str, count: int | None = None) -> int:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    chosen = [v for v in shipped() if only in str(v)]
    if count is not None:
        chosen = sample(chosen, count, datetime.date.today().toordinal())
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        found = dict(pool.map(examine, chosen, chunksize=4))
    bad = 0
    before = table.get(VERSION, {})
    if not update and not before:
        print(f"the table has no entries for Triton {VERSION}", file=sys.stderr)
        return 1
    for name, now in found.items():
        for text in complaints(name, now, now if update else before.get(name)):
            bad += 1
            print(f"{name}: {text}")
    if update:
        wanted = set(map(str, shipped()))
        table[VERSION] = {name: x for name, x in (before | found).items() if name in wanted}
        rows = {v: ",\n".join(f'  "{k}": {json.dumps(x)}' for k, x in t.items()) for v, t in sorted(table.items())}
        TABLE.write_text("{\n" + ",\n".join(f' "{v}": {{\n{x}\n }}' for v, x in rows.items()) + "\n}\n")
    spilling, refused = (sum(x.get(key, 0) != 0 for x in found.values()) for key in ("spill", "refused"))
    print(
        f"Triton {triton.__version__}: {len(found)} configurations, {refused} refused, {spilling} with spills, "
        f"{bad} complaints"
    )
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check")
    checking.add_argument("--update", action="store_true")
    checking.add_argument(
        "--only", default="", help="configurations whose name holds this, as in 'backward_keys sm_90'"
    )
    checking.add_argument("--sample", type=int, help="at most this many configurations")
    checking.add_argument("--jobs", type=int, default=os.cpu_count())
    showing = commands.add_parser("show")
    showing.add_argument("kernels", help=f"comma-separated, of {', '.join(config.KERNELS)}")
    showing.add_argument("--capability", type=int, default=90)
    showing.add_argument("--dtype", default="bf16", choices=KINDS)
    showing.add_argument("--width", type=int, default=64)
    showing.add_argument("--configs", help="queries,keys,warps,stages of a tile; several separated by spaces")
    for option in ("tma", "bounds", "dropout", "atomics"):
        showing.add_argument(f"--{option}", action="store_true")
    a = parser.parse_args()
    if a.command == "check":
        return check(a.update, a.jobs, a.only, a.sample)
    for kernel in a.kernels.split(","):
        v = Variant(kernel, a.capability, a.dtype, a.width, a.tma, a.bounds, a.dropout, a.atomics)
        for text in a.configs.split() if a.configs else [",".join(map(str, v.config()))]:
            chosen = config.Config(*map(int, text.split(",")))
            try:
                print(v, tuple(chosen), measure(compile_variant(v, chosen), v.capability), flush=True)
            except Exception as error:
                print(v, tuple(chosen), f"{type(error).__name__}: {error}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
