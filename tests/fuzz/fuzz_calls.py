"""Calls of every shape, layout, dtype and option: values and gradients against float64."""

from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from against_reference import matches_the_reference
from oracle import Case

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 15, 16, 17, 47, 48, 49, 95, 97, 130)
MEMORIES = (0, 0, 1, 2, 15, 47, 64, 90, 143, 191, 192, 193, 300, 511, 513, 700)
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 41, 48, 64, 65, 80, 96, 128, 129)


def prepare(folder: Path) -> None:
    """Nothing."""


def attempt(random: Random, folder: Path) -> None:
    torch.set_num_threads(random.choice((1, 2, 3)))
    case = Case(
        "",
        B=random.choice((0, 1, 1, 2, 3)),
        H=random.choice((1, 1, 2, 3, 5)),
        L=random.choice(LENGTHS),
        M=random.choice(MEMORIES),
        D=random.choice(WIDTHS),
        causal=random.random() < 0.6,
        window=random.choice((None, None, 1, 2, 47, 192, 10**12, random.randint(1, 800))),
        intervals=random.choice(("", "", "random", "padded", "filled", "episodes", "empty")),
        dropout_p=random.choice((0.0, 0.0, 0.1, 0.5)),
        layout=random.choice(("bhld", "lbhd", "fused")),
        scale=random.choice((None, None, 0.0, 1e-6, 0.3, -0.2)),
        extra_rows=random.choice((0, 0, 1, 50)),
        seed=random.getrandbits(30),
    )
    if not case.S:  # no key to draw bounds among
        case = replace(case, intervals="")
    matches_the_reference(case, random.choice((torch.float32, torch.bfloat16)), "native")
