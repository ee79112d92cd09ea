"""A `txl` command of each rank's own, with the variables of torchrun but without torchrun, which
would end the others when one fails: they must end by themselves."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from command_helpers import Done
from ranks import ROOT, environment, free_port

Process = subprocess.Popen[str]


@contextmanager
def started_ranks(*commands: Sequence[object]) -> Iterator[list[Process]]:
    """`python -m txl` with the arguments of each rank; all are killed in the end."""
    common = environment() | {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "txl", *map(str, command)], env=common | {"RANK": str(n), "LOCAL_RANK": str(n)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for n, command in enumerate(commands)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(processes: list[Process], timeout: float = 90) -> list[Done]:
    """What each said; subprocess.TimeoutExpired where one hangs."""
    said = [process.communicate(timeout=timeout) for process in processes]
    return [Done(process.returncode, *each) for process, each in zip(processes, said, strict=True)]


def run_commands(*commands: Sequence[object], timeout: float = 90) -> list[Done]:
    with started_ranks(*commands) as processes:
        return ended(processes, timeout)
