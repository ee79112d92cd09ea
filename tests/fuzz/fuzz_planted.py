"""Faults that the campaign must find: seed 1 is wrong, 3 crashes, 4 hangs."""

import os
import time
from pathlib import Path
from random import Random


def prepare(folder: Path) -> None:
    """Nothing."""


def attempt(random: Random, folder: Path) -> None:
    drawn = random.random()
    if drawn == Random(1).random():
        raise AssertionError("planted")
    if drawn == Random(3).random():
        os.abort()
    if drawn == Random(4).random():
        time.sleep(1000)
