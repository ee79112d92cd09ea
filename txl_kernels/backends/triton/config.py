"""Tile sizes, warps and pipeline stages of every kernel, by architecture, dtype and head width.

Nothing is autotuned. The entries were chosen from compiled code: no spill, the fewest instructions
for each pair, and at least 8 warps on a multiprocessor where possible. Those for half precision
with descriptors on Hopper, up to head width 128 and without dropout, are the fastest of those
measured on an H200 or within 1% (docs/log.md). `tools/machine_code.py` compiles calls of several
architectures and compares registers, spills and shared memory with tools/machine_code.json.
"""

import functools
import logging
import os
from typing import NamedTuple

import torch

logger = logging.getLogger("txl_kernels")


class Config(NamedTuple):
    """The queries and keys of a tile (as many of both in backward), warps, and stages of the load
    pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


KERNELS = ("forward", "decode", "backward_queries", "backward_keys", "backward_table")
WIDTHS = (64, 128, 256)  # padded head widths of the tables; narrower heads use the first entry
DECODE_LENGTH = 16  # shorter segments use `decode`
# NVIDIA's compute capability; or the architecture of an AMD GPU, such as "gfx942".
Capability = tuple[int, int] | str
INTERPRETER: Capability = (0, 0)
ATOMICS = "TXL_KERNELS_ATOMICS"  # environment variable

# family -> kind of products -> kernel -> one entry for each of WIDTHS
_TABLE: dict[str, dict[str, dict[str, tuple[Config, Config, Config]]]] = {
    # mma.sync and cp.async: sm_80, and with less shared memory sm_86, sm_89, sm_120
    "ampere": {
        "half": {
            "forward": (Config(64, 64, 4, 2), Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
            "decode": (Config(16, 64, 2, 2), Config(16, 64, 4, 2), Config(16, 32, 4, 2)),
            "backward_queries": (Config(32, 32, 4, 2), Config(16, 16, 2, 1), Config(16, 16, 4, 1)),
            "backward_keys": (Config(32, 32, 2, 2), Config(32, 32, 4, 2), Config(32, 32, 8, 1)),
            "backward_table": (Config(32, 32, 2, 1), Config(32, 32, 4, 1), Config(32, 32, 8, 1)),
        },
        "tf32": {
            "forward": (Config(32, 32, 4, 1), Config(16, 32, 4, 1), Config(16, 16, 4, 1)),
            "decode": (Config(16, 32, 2, 2), Config(16, 32, 4, 1), Config(16, 16, 4, 1)),
            "backward_queries": (Config(16, 16, 2, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_keys": (Config(32, 32, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_table": (Config(16, 16, 2, 2), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
        },
        "float32": {
            "forward": (Config(32, 32, 4, 2), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "decode": (Config(16, 32, 4, 2), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_queries": (Config(32, 32, 8, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_keys": (Config(16, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_table": (Config(16, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
        },
    },
    # wgmma and TMA descriptors: sm_90; sm_100 compiles the same tiles to tcgen05
    "hopper": {
        "half": {
            "forward": (Config(64, 64, 4, 3), Config(64, 64, 4, 3), Config(32, 32, 4, 2)),
            "decode": (Config(16, 64, 4, 3), Config(16, 64, 2, 2), Config(16, 64, 4, 2)),
            "backward_queries": (Config(64, 64, 4, 2), Config(64, 64, 4, 1), Config(16, 16, 4, 1)),
            "backward_keys": (Config(64, 64, 4, 2), Config(64, 64, 4, 1), Config(32, 32, 8, 1)),
            "backward_table": (Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(32, 32, 4, 1)),
        },
        "tf32": {
            "forward": (Config(64, 64, 4, 1), Config(16, 32, 4, 1), Config(16, 16, 4, 1)),
            "decode": (Config(16, 64, 2, 2), Config(16, 32, 4, 1), Config(16, 16, 4, 1)),
            "backward_queries": (Config(16, 16, 2, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_keys": (Config(32, 32, 2, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_table": (Config(32, 32, 2, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
        },
        "float32": {
            "forward": (Config(16, 32, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "decode": (Config(16, 32, 4, 2), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_queries": (Config(16, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 2)),
            "backward_keys": (Config(16, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_table": (Config(16, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
        },
    },
    # MFMA, wavefronts of 64 and 512 registers: gfx90a, gfx942, gfx950. One stage: a second takes
    # shared memory (LDS), of which there are 64 KiB.
    "cdna": {
        "half": {
            "forward": (Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(32, 32, 4, 1)),
            "decode": (Config(16, 64, 4, 1), Config(16, 64, 4, 1), Config(16, 64, 4, 1)),
            "backward_queries": (Config(64, 64, 4, 1), Config(16, 16, 2, 1), Config(16, 16, 4, 1)),
            "backward_keys": (Config(64, 64, 4, 1), Config(32, 32, 2, 1), Config(16, 16, 4, 1)),
            "backward_table": (Config(32, 32, 1, 1), Config(32, 32, 1, 1), Config(16, 16, 4, 1)),
        },
        "float32": {
            "forward": (Config(64, 64, 4, 1), Config(16, 16, 2, 1), Config(16, 16, 4, 1)),
            "decode": (Config(16, 64, 4, 1), Config(16, 32, 2, 1), Config(16, 16, 4, 1)),
            "backward_queries": (Config(16, 16, 2, 1), Config(16, 16, 2, 1), Config(16, 16, 4, 1)),
            "backward_keys": (Config(16, 16, 2, 1), Config(16, 16, 2, 1), Config(16, 16, 4, 1)),
            "backward_table": (Config(16, 16, 2, 1), Config(16, 16, 2, 1), Config(16, 16, 4, 1)),
        },
    },
    # WMMA (float32: FMA), wavefronts of 32 and 256 registers: gfx110x, gfx120x
    "rdna": {
        "half": {
            "forward": (Config(64, 64, 8, 1), Config(64, 64, 16, 1), Config(16, 16, 8, 1)),
            "decode": (Config(16, 64, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_queries": (Config(32, 32, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
            "backward_keys": (Config(32, 32, 8, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
            "backward_table": (Config(16, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
        },
        "float32": {
            "forward": (Config(16, 16, 4, 1), Config(16, 16, 8, 1), Config(16, 16, 16, 1)),
            "decode": (Config(16, 16, 4, 1), Config(16, 16, 8, 1), Config(16, 16, 16, 1)),
            "backward_queries": (Config(16, 16, 8, 1), Config(16, 16, 16, 1), Config(16, 16, 16, 1)),
            "backward_keys": (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 16, 1)),
            "backward_table": (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 16, 1)),
        },
    },
}
# Without descriptors (for rows that are not aligned), addresses take registers, and some tiles need
# more warps.
_TABLE["hopper by pointers"] = {
    **_TABLE["hopper"],
    "half": _TABLE["hopper"]["half"]
    | {
        "forward": (Config(64, 64, 4, 2), Config(64, 64, 8, 2), Config(32, 32, 4, 2)),
        "decode": (Config(16, 64, 2, 2), Config(16, 64, 4, 2), Config(16, 64, 8, 2)),
        "backward_queries": (Config(64, 64, 8, 2), Config(32, 32, 8, 1), Config(16, 16, 4, 1)),
        "backward_keys": (Config(32, 32, 2, 1), Config(32, 32, 4, 1), Config(32, 32, 8, 1)),
        "backward_table": (Config(32, 32, 2, 1), Config(32, 32, 4, 1), Config(32, 32, 8, 1)),
    },
}
# Dropout needs registers, too: these replace the first entry of "half".
_DROPOUT: dict[str, dict[str, Config]] = {
    "ampere": {
        "forward": Config(32, 32, 4, 1),
        "backward_keys": Config(32, 32, 4, 1),
        "backward_table": Config(32, 32, 4, 2),
    },
    "hopper": {
        "backward_queries": Config(64, 64, 8, 2),
        "backward_keys": Config(32, 32, 4, 1),
        "backward_table": Config(32, 32, 2, 1),
    },
    "hopper by pointers": {
        "forward": Config(64, 64, 8, 2),
        "backward_keys": Config(32, 32, 4, 1),
        "backward_table": Config(32, 32, 4, 1),
    },
    "cdna": {"backward_keys": Config(32, 32, 2, 1)},
    "rdna": {"backward_queries": Config(16, 16, 4, 1), "backward_keys": Config(16, 16, 4, 1)},
}


def family(capability: Capability, descriptors: bool) -> str:
    """Return the family in `_TABLE` of a device, by whether tiles are loaded by descriptors."""
    if isinstance(capability, str):
        return "cdna" if capability.startswith("gfx9") else "rdna"
    if not has_descriptors(capability):
        return "ampere"
    return "hopper" if descriptors else "hopper by pointers"


def why_not_capability(capability: Capability, triton_version: tuple[int, ...]) -> str | None:
    """Return the reason why this Triton cannot compile the kernels for a compute capability or an
    AMD GPU, or None.

    Triton before 3.8 has races on Blackwell's data center GPUs (triton-lang/triton#9871). Triton
    3.6 ends the process with a failed assertion when it compiles `backward_table_kernel` for AMD.
    """
    if isinstance(capability, str):
        if triton_version >= (3, 7):
            return None
        have = ".".join(map(str, triton_version))
        return f"{capability} needs torch 2.12 or newer, which brings Triton 3.7; Triton {have} is installed"
    if capability[0] == 10 and triton_version < (3, 8):
        have, need = (".".join(map(str, x)) for x in (triton_version, capability))
        return (
            f"compute capability {need} needs torch 2.14 or newer, which brings Triton 3.8; Triton {have} is installed"
        )
    return None


def has_descriptors(capability: Capability) -> bool:
    """Whether TMA loads tiles: on architectures that also have enough shared memory for them."""
    return capability[0] in (9, 10)


def choose(
    kernel: str, capability: Capability, kind: str, block_d: int, descriptors: bool, dropout: bool = False
) -> Config:
    """Return the configuration of one kernel.

    kind: "half", "tf32" or "float32".
    block_d: head width padded to a power of two.
    dropout: whether weights are dropped.
    """
    if capability == INTERPRETER:
        return Config(16 if kernel == "decode" else 32, 32, 4, 1)  # its time depends on the number of tiles
    if dropout and kind == "half" and block_d <= WIDTHS[0]:
        special = _DROPOUT[family(capability, descriptors)].get(kernel)
        if special is not None:
            return special
    return _TABLE[family(capability, descriptors)][kind][kernel][WIDTHS.index(max(block_d, WIDTHS[0]))]


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of a dtype's products, "half", "tf32" or "float32". For float32 it follows
    torch.set_float32_matmul_precision, as torch's own products do."""
    if dtype != torch.float32:
        return "half"
    if torch.version.hip is not None:  # of AMD's GPUs, Triton compiles TF32 for one alone
        return "float32"
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):  # before torch 2.9
        return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    setting = matmul.fp32_precision
    if setting == "none":  # the general setting decides
        setting = getattr(torch.backends, "fp32_precision", "none")
    return "tf32" if setting == "tf32" else "float32"


@functools.cache
def log_full_precision() -> None:
    """Log, once in a process, that float32 products run at full precision although the GPU has
    TF32, or, of AMD's, faster products in 16 bits."""
    if torch.version.hip is not None:
        logger.warning("float32 attention on the GPU runs at full precision, at a fraction of the rate of bfloat16")
        return
    logger.warning(
        "float32 attention on the GPU runs at full precision, at a fraction of the rate of TF32: "
        "torch.set_float32_matmul_precision('high') allows TF32, bfloat16 is faster still"
    )


def dr_by_atomics() -> bool:
    """Whether dr is summed by atomics: 12 products for each tile instead of 17, in another order at
    every run.

    True unless torch.use_deterministic_algorithms(True) or TXL_KERNELS_ATOMICS=0 asks for the same
    bits at every run.
    """
    return os.environ.get(ATOMICS, "1") != "0" and not torch.are_deterministic_algorithms_enabled()


def interpreted() -> bool:
    """Whether kernels run on the CPU in Triton's interpreter. Triton reads the variable when
    kernels are first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
