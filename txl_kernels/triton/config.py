"""Tile sizes, warps and pipeline stages of every kernel, by GPU architecture, dtype and head width. Nothing is autotuned."""

import os
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """Queries and keys of a tile (square in backward), warps of a program, stages of its load pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


KERNELS = ("forward", "decode", "backward_queries", "backward_keys", "backward_table")
DECODE_LENGTH = 16  # segments shorter than this take `decode`


def dr_by_atomics() -> bool:
    """Whether dr is added up by atomics, whose order differs from run to run."""
    return os.environ.get("TXL_KERNELS_ATOMICS", "0") == "1" and not torch.are_deterministic_algorithms_enabled()


def use_descriptors(capability: tuple[int, int]) -> bool:
    """Whether tiles are loaded by the copy engine (TMA) through tensor descriptors."""
    return capability >= (9, 0) or os.environ.get("TMA")=="1"


def choose(kernel: str, capability: tuple[int, int], dtype: torch.dtype, block_d: int) -> Config:
    if capability == (0, 0):
        return Config(16, 16, 4, 2)
    return Config(64, 64, 4, 2)
