"""Compiles kernels for GPUs that are not here and reads registers, spills, shared memory and warnings from the result.

    python tools/aot.py show forward --capability 90 --dtype bf16 --width 64     one variant, with overrides
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

assert os.environ.get("TRITON_INTERPRET", "0") != "1", "unset TRITON_INTERPRET: nothing is compiled under it"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from txl_kernels.triton import config

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POINTERS = dict.fromkeys(["LSE", "LSE2", "DELTA", "DLSE", "DQ_SUM", "DU", "DR", "PARTS", "PART_LSE"], "*fp32")
POINTERS |= dict.fromkeys(["START", "END", "KEY_FIRST", "KEY_LAST", "ROW_FIRST", "ROW_LAST"], "*i32") | {"SEED": "*i64"}
FLOATS = {"sign", "scale", "scale_log2", "keep_scale"}
MODULES = {"decode": "forward"}


class Variant(NamedTuple):
    kernel: str
    capability: int
    dtype: str
    width: int
    precision: str = "ieee"
    bounds: bool = False
    dropout: bool = False
    atomics: bool = False
    tma: bool = False

    def __str__(self) -> str:
        parts = [self.kernel, f"sm_{self.capability}", self.dtype, f"D{self.width}"]
        if self.dtype == "fp32":
            parts.append(self.precision)
        return " ".join(parts + [x for x in ("bounds", "dropout", "atomics", "tma") if getattr(self, x)])


def function_of(kernel: str) -> Any:
    name = MODULES.get(kernel, kernel)
    return getattr(importlib.import_module(f"txl_kernels.triton.kernels.{name}"), f"{name}_kernel")


def compile_variant(v: Variant, chosen: config.Config) -> Any:
    function = function_of(v.kernel)
    block_d = max(16, triton.next_power_of_2(v.width))
    constants: dict[str, Any] = {
        "D": v.width, "BLOCK_D": block_d, "DROPOUT": v.dropout, "WIDE": False, "PRECISION": v.precision,
    }  # fmt: skip
    if v.kernel in ("forward", "decode"):
        constants |= {"BM": chosen.block_m, "BN": chosen.block_n, "SPLIT": v.kernel == "decode"}
    else:
        constants["BLOCK"] = chosen.block_m
    constants["TMA"] = v.tma
    described = {"K", "V", "K_MEM", "V_MEM", "R"} if v.kernel in ("forward", "decode", "backward_queries") else {"QU", "QW", "DOUT", "R"}
    rows = chosen.block_n if "BN" in constants else chosen.block_m
    if not v.bounds:
        constants |= dict.fromkeys(["START", "END", "KEY_FIRST", "KEY_LAST", "ROW_FIRST", "ROW_LAST"])
    if not v.dropout:
        constants["SEED"] = None
    if not v.atomics and v.kernel == "backward_queries":
        constants["DR"] = None
    constants = {name: x for name, x in constants.items() if name in function.arg_names}
    signature, aligned = {}, []
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.isupper() and name not in ("B", "H", "L", "M", "T"):
            signature[name] = POINTERS.get(name, "*" + v.dtype)
            if v.tma and name in described:
                signature[name] = f"tensordesc<{v.dtype}[{'' if name == 'R' else '1,'}1,{rows},{block_d}]>"
                continue
            if name == "OUT" and v.kernel == "decode":
                signature[name] = "*fp32"
            aligned.append(name)
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
            if re.search("_(batch|head|row)$", name) and name != "zero_row":
                aligned.append(name)
    source = ASTSource(
        function,
        signature,
        {(function.arg_names.index(name),): x for name, x in constants.items()},
        {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    return triton.compile(source, target=GPUTarget("cuda", v.capability, 32), options=options)


def inner_loops(sass: str) -> list[list[str]]:
    """Instructions of every innermost loop that holds a matrix instruction."""
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
        if m and labels.get(m[1], at + 1) <= at:
            loops.append((labels[m[1]], at))
    # A wait for a barrier jumps back too, from the end of the code: the true loop is the shortest with all the products.
    found = {}
    for a, b in loops:
        products = sum("MMA" in x or "FFMA" in x for x in code[a : b + 1])
        if products:
            found[products] = min(found.get(products, (b - a, a, b)), (b - a, a, b))
    return [code[a : b + 1] for _, a, b in found.values()]


def measure(compiled: Any, capability: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "k.cubin"), Path(folder, "k.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])
        usage = subprocess.run([BIN / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True).stdout
        sass = subprocess.run([BIN / "nvdisasm", "-c", cubin], capture_output=True, text=True).stdout
        ptxas = BIN / "ptxas"
        if (capability >= 100 or tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)) and (BIN / "ptxas-blackwell").exists():
            ptxas = BIN / "ptxas-blackwell"
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        told = subprocess.run([ptxas, "-v", f"--gpu-name={arch}", ptx, "-o", os.devnull], capture_output=True, text=True)
    text = told.stdout + told.stderr
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    loops = inner_loops(sass)
    return {
        "registers": registers,
        "spill": int(spill[1]) + int(spill[2]) if spill else -1,
        "shared": compiled.metadata.shared,
        "serialised": sorted(set(re.findall(r"\((C75\d+)\).*?serialized", text))),
        "loop": sorted(len(x) for x in loops),
        "mma": sorted(sum("MMA" in y for y in x) for x in loops),
        "global": sorted(sum("LDGSTS" in y or "LDG" in y or "UTMALDG" in y for y in x) for x in loops),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels")
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--precision", default="ieee")
    parser.add_argument("--configs", default="64,64,4,2")
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--atomics", action="store_true")
    parser.add_argument("--tma", action="store_true")
    a = parser.parse_args()
    for kernel in a.kernels.split(","):
        for c in a.configs.split(" "):
            chosen = config.Config(*map(int, c.split(",")))
            v = Variant(kernel, a.capability, a.dtype, a.width, a.precision, a.bounds, a.dropout, a.atomics, a.tma)
            t = time.time()
            try:
                compiled = compile_variant(v, chosen)
                t = time.time() - t
                print(triton.__version__, v, tuple(chosen), measure(compiled, a.capability), f"{t:.1f}s", flush=True)
            except Exception as e:
                print(triton.__version__, v, tuple(chosen), "EXC", type(e).__name__, str(e)[:600], flush=True)
