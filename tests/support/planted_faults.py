"""Faults planted in a copy of the CUDA kernels. A comment `// plant: name` in csrc/cuda, at the end
of a line or alone before it, marks the line that a fault changes."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from cases import NO_BIASES, Case
from cuda_emulation import CSRC
from cuda_ptx import PtxModule, compile_ptx
from oracle import matches_the_reference

Edit = int | tuple[str, str] | None  # move the line by so many, replace one token of it, or delete it

NARROW = Case("narrow", B=1, H=1, L=150, M=250, D=64, window=180)
WIDE = Case("wide", B=1, H=1, L=70, M=150, D=128, window=80)
WIDE_LONG = Case("wide, long", B=1, H=1, L=330, M=64, D=128)
LONG = Case("long", B=1, H=1, L=330, M=64, D=64)
NOTHING = Case("nothing", B=1, H=1, L=70, M=10, D=64, intervals="nothing")
POSITIONS = Case(
    "positions", B=1, H=4, Hkv=2, L=130, M=250, D=64, Dp=16, T=100, zero_row=0, outside="zero", sink="H", **NO_BIASES
)
SINKS = POSITIONS.but("sinks", L=70, M=10, window=3)  # with much of the weight
PARTS = Case("parts", L=130, M=500, D=64, B=3, H=1)  # three of each block on five multiprocessors
MASKED = Case("masked", B=1, H=1, L=64, M=40, D=64)  # rows of the first tile that do not exist


class Hopper(NamedTuple):
    """A fault of a Hopper kernel, and the case that detects it. seen: part of what the executor
    reports; "values" for wrong results; "" for either."""

    name: str
    edit: Edit
    case: Case
    seen: str

    def __str__(self) -> str:
        return self.name


FORWARD = [
    Hopper("scores-wait", None, NARROW, "before it was waited"),
    Hopper("values-wait", None, NARROW, "waited"),
    Hopper("full-wait", None, NARROW, ""),
    Hopper("empty-wait", None, NARROW, ""),
    Hopper("producer-parity", ("phase = 1", "phase = 0"), NARROW, "wait for ever"),
    Hopper("bytes-expected", ("S::TILE_BYTES", "S::TILE_BYTES + 16"), NARROW, "wait for ever"),
    Hopper("empty-arrivals", ("v.init(CONSUMERS)", "v.init(1)"), NARROW, ""),
    Hopper("clearing-fence", None, MASKED, "fence.proxy.async"),
    Hopper("skew-warp-barrier", None, NARROW, "race"),
    Hopper("release-warp-barrier", None, NARROW, "race"),
    Hopper("stage-count", ("STAGES", "STAGES + 1"), NARROW, ""),
    Hopper("first-tiles-of-r", ("-S::QUERY_GROUPS", "1 - S::QUERY_GROUPS"), NARROW, ""),
    Hopper("skew-column", ("- e;", "- e + 1;"), NARROW, ""),
    Hopper("skew-base-address", ("address += memory_", "address |= memory_"), NARROW, ""),
    Hopper("block-without-tiles", ("if (block_.tiles) ", ""), NOTHING, "wait for ever"),
    Hopper("position-fence", None, NARROW, "fence.proxy.async"),
    Hopper("position-barrier", None, NARROW, ""),
    Hopper("interleaved-warp-barrier", None, WIDE, "race"),
    Hopper("interleaved-scores-wait", None, WIDE, "waited"),
    Hopper("plain-scores-wait", None, POSITIONS, "waited"),
    Hopper("positions-scores-wait", None, POSITIONS, "waited"),
    Hopper("narrow-position-fence", None, POSITIONS, "fence.proxy.async"),
    Hopper("narrow-swizzle", (">> 2", ">> 3"), POSITIONS, "values"),
    Hopper("tiles-of-the-table", ("+ 3", "+ 1"), POSITIONS, ""),
    Hopper("skipped-tiles-of-r", ("next < end", "next + 1 < end"), POSITIONS, ""),
    Hopper("head-of-keys", ("<int>(p.H)", "<int>(p.Hkv)"), POSITIONS, ""),
]
BACKWARD = [
    Hopper("swizzle", (">> 7", ">> 8"), WIDE, "values"),
    Hopper("operands-fence", None, WIDE, "fence.proxy.async"),
    Hopper("operands-barrier", None, WIDE, "fence.proxy.async"),
    Hopper("distances-barrier", None, NARROW, "race"),
    Hopper("distances-fence", None, NARROW, "fence.proxy.async"),
    Hopper("operand-read", 3, NARROW, "a register is read that an asynchronous product still reads"),
    Hopper("tile-scores-wait", ("<2>", "<3>"), NARROW, "waited"),
    Hopper("distances-wait", ("<0>", "<1>"), NARROW, "still read"),
    Hopper("next-scores-wait", None, NARROW, "waited"),
    Hopper("early-release-of-r", ("advance", "consumer_release"), NARROW, ""),
    Hopper("unskew-wrap", ("? last", "? octet"), NARROW, "values"),
    Hopper("distances-slot", ("t & 1", "~t & 1"), NARROW, "values"),
    Hopper("rows-of-dr", ("(-1 - warpgroup)", "(-1 - warpgroup) + 1"), NARROW, "values"),
    Hopper("keys-skew-barrier", None, NARROW, "race"),
    Hopper("stats-wait", None, NARROW, "race"),
    Hopper("keys-positions-wait", None, NARROW, "waited"),
    Hopper("keys-content-wait", None, NARROW, "waited"),
    Hopper("keys-dout-v-wait", None, NARROW, "waited"),
    Hopper("last-tile-of-r", ("is_last", "is_last && p.L < 0"), LONG, "wait for ever"),
    Hopper("second-half-of-r", ("S::R_SUBTILE_STRIDE", "SUBTILE_BYTES"), WIDE, "values"),
    Hopper("early-release-of-q", -4, LONG, ""),
    Hopper("transposed-skew-base-address", ("memory_ + (octet | (", "(octet | (memory_ + "), NARROW, ""),
    Hopper("gradient-block-without-tiles", ("if (block_.tiles) ", ""), NOTHING, "wait for ever"),
    Hopper("transposed-column", ("d % 2 * 16", "0"), NARROW, "values"),
    Hopper("dr-wait", None, NARROW, "still read"),
    Hopper("dr-half-wait", None, WIDE, "still read"),
    Hopper("dr-half-fence", None, WIDE, "fence.proxy.async"),
    Hopper("dr-half-barrier", None, WIDE, ""),
    Hopper("transposed-skew-buffers", ("step & 1", "step & 0"), NARROW, "race"),
    Hopper("transposed-skew-column", ("- e;", "- e + 1;"), NARROW, ""),
    Hopper("rows-beyond-queries", (" && row[half] < count", ""), LONG, "global memory"),
    Hopper("columns-barrier", None, NARROW, "race"),
    Hopper("column-sums", ("half : 0", "half : half"), NARROW, "values"),
    Hopper("first-release-of-r", ("t > begin", "t >= begin"), NARROW, ""),
    Hopper("tiles-of-the-table-by-keys", ("+ 1;", "- 1;"), POSITIONS, ""),
    Hopper("narrow-operands-fence", None, POSITIONS, "fence.proxy.async"),
    Hopper("plain-tile-wait", None, POSITIONS, "waited"),
    Hopper("positions-stats-wait", None, POSITIONS, "race"),
    Hopper("keys-narrow-wait", None, POSITIONS, "waited"),
    Hopper("keys-scores-wait", None, POSITIONS, "waited"),
    Hopper("skew-count", ("++skews_", "skews_"), POSITIONS, "race"),
    Hopper("positions-skew-barrier", None, POSITIONS, "race"),
    Hopper("heads-of-queries", ("+ n", "+ 0 * n"), POSITIONS, "values"),
    Hopper("narrow-rows-of-dr", ("+ row_", "+ row_ + 1"), POSITIONS, "values"),
    Hopper("delta-beside-sink", ("share[h] * delta[h]", "delta[h]"), SINKS, "values"),
]
TWO_WARPGROUPS = [
    Hopper("compact-dv-wait", None, WIDE_LONG, "race"),
    Hopper("compact-positions-wait", None, WIDE, "waited"),
    Hopper("compact-skew-reuse", None, WIDE_LONG, "race"),
    Hopper("compact-skew-barrier", None, WIDE, "race"),
    Hopper("compact-content-wait", None, WIDE, ""),
    Hopper("compact-dout-wait", None, WIDE, ""),
    Hopper("compact-scores-wait", None, WIDE, "waited"),
    Hopper("halves-operands-fence", None, WIDE, "fence.proxy.async"),
    Hopper("halves-operands-barrier", None, WIDE, ""),
    Hopper("halves-skew-barrier", None, WIDE, "race"),
    Hopper("halves-scores-wait", ("<2>", "<3>"), WIDE, "waited"),
    Hopper("halves-distances-wait", ("<0>", "<1>"), WIDE, ""),
    Hopper("halves-distances-barrier", None, WIDE, "race"),
    Hopper("halves-distances-fence", None, WIDE, "fence.proxy.async"),
    Hopper("halves-whole-barrier", None, WIDE, ""),
    Hopper("halves-next-scores-wait", None, WIDE, "waited"),
]
# Of the instances that VARIANT chooses, by the sources of the kernels.
VARIANT = "TXL_TWO_WARPGROUPS"
OF_VARIANT = {
    "backward": [
        *TWO_WARPGROUPS,
        Hopper("early-keys", None, NARROW, "without griddepcontrol.wait"),
        Hopper("early-finish", None, WIDE, "without griddepcontrol.wait"),
    ],
    "forward": [Hopper("early-merge", None, PARTS, "without griddepcontrol.wait")],
}
# In the decode kernels, with what the SIMT emulation prints: shuffles with too few steps, half of
# the values lost, wrong partners; sinks, rows of r and queries of the wrong head; lanes that
# shuffle differently; a missed barrier.
DECODE: list[tuple[str, Edit, str]] = [
    ("group-sum-steps", ("LANES / 8", "LANES / 16"), "wrong"),
    ("group-sum-halves", ("upper ? x[k] : x[k + 2]", "x[k]"), "wrong"),
    ("group-sum-partner", ("LANES / 4", "LANES / 2"), "wrong"),
    ("values-sum-steps", ("= S::LANES", "= 2 * S::LANES"), "wrong"),
    ("weights-sum-partner", ("(sum, step)", "(sum, 1)"), "wrong"),
    ("merge-sum", ("+=", "="), "wrong"),
    ("merge-sink", None, "wrong"),
    ("sink-of-one-part", ("p.parts == 1", "p.parts > 1"), "wrong"),
    ("table-begin", ("-zero", "-zero - 1"), "wrong"),
    ("table-end", ("- zero", "- zero + 1"), "wrong"),
    ("next-table", ("rows.row += block.p.r.s0, ", ""), "wrong"),
    ("position-of-a-head", ("table * queries", "0"), "wrong"),
    ("query-of-a-head", ("n %", "n /"), "wrong"),
    ("group-sum-diverging", ("LANES / 2", "thread() % 2 ? LANES / 2 : 1"), "shuffle differently"),
    ("group-sum-absent-lanes", ("lane<S>()", "lane<S>() && shuffle_xor(0, 1) == 0 && lane<S>()"), "shuffle differently"),
    ("barrier-missed-by-a-thread", ("barrier()", "if (thread() != 1) barrier()"), "do not reach"),
]  # fmt: skip
_MARK = re.compile(r"//.*\bplant: (\S+)$")


def marks() -> list[tuple[Path, int, str]]:
    """Return the marked lines of csrc/cuda: file, index of the line, name of the fault."""
    found = []
    for source in sorted(CSRC.rglob("*.cuh")):
        for n, line in enumerate(source.read_text().splitlines()):
            if mark := _MARK.search(line):
                found.append((source, n + line.strip().startswith("//"), mark[1]))
    return found


def copied_source(folder: Path) -> Path:
    """Copy csrc to `folder`, and return its csrc/cuda."""
    shutil.copytree(CSRC.parent, folder / "csrc")
    return folder / "csrc" / CSRC.name


def plant(folder: Path, name: str, edit: Edit) -> Path:
    """Copy csrc with the fault, and return its csrc/cuda."""
    [(source, at)] = [(source, at) for source, at, marked in marks() if marked == name]
    csrc = copied_source(folder)
    copy = csrc / source.relative_to(CSRC)
    lines = copy.read_text().splitlines(keepends=True)
    line = lines.pop(at)
    if isinstance(edit, int):
        lines.insert(at + edit, line)
    elif edit is not None:
        assert line.count(edit[0]) == 1, (name, line)
        lines.insert(at, line.replace(*edit))
    copy.write_text("".join(lines))
    return csrc


def detects(
    module: PtxModule, compiled: list[str], fault: Hopper, kernels: str, folder: Path, options: tuple[str, ...] = ()
) -> None:
    """Assert that the executor or wrong results show the fault, planted in the sources that
    `kernels` names. compiled: PTX of all other kernels; options: of nvcc."""
    planted = compile_ptx(folder, "sm_90a", plant(folder, fault.name, fault.edit), (kernels,), options)
    module.use(compiled + planted)  # the later of a name
    module.first = ()
    try:
        matches_the_reference(fault.case, torch.bfloat16, "cuda")
        wrong = ""
    except AssertionError as error:
        wrong = str(error)
    faults, module.faults = module.faults, []
    if fault.seen == "values":
        assert wrong
        return
    assert faults or (wrong and not fault.seen), "not detected"
    assert any(fault.seen in str(x) for x in faults) or not fault.seen, faults[0]
