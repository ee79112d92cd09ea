"""Functions and commands in several processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from txl.distributed import joined, settle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
T = TypeVar("T")
# Ranks are forked from a process that has imported torch.
multiprocessing.get_context("forkserver").set_forkserver_preload(["ranks", "rank_functions"])


def run_ranks(function: Callable[..., T], size: int, **arguments: Any) -> list[T]:
    """Return the results of `function(world, **arguments)` in `size` processes on the CPU, by rank.

    function: of a module in tests/support. arguments, results: picklable.

    Raises:
        ChildFailedError: a rank failed; it has the traceback.
    """
    launch = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=size, run_id="test", rdzv_endpoint="localhost:0",
        rdzv_backend="c10d", max_restarts=0, start_method="forkserver",
    )  # fmt: skip
    with mock.patch.dict(os.environ, environment(), clear=True):
        found: dict[int, T] = elastic_launch(launch, _in_world)(function, arguments)
    return [found[rank] for rank in range(size)]


@record
def _in_world(function: Callable[..., T], arguments: dict[str, Any]) -> T:
    signal.alarm(300)  # ends a process that waits for ever
    with joined(torch.device("cpu")) as world:
        result = function(world, **arguments)
        settle()
    return result


def torchrun(size: int, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `torchrun --nproc-per-node size -m txl ..`; AssertionError after `timeout` seconds."""
    with start_torchrun(size, *arguments) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"not done in {timeout} s: {process.communicate()}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def start_torchrun(size: int, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start torchrun in a process group of its own, which is killed in the end."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    process = subprocess.Popen(
        [*launcher, "-m", "txl", *map(str, arguments)], env=environment(), start_new_session=True, text=True, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        for pid in {process.pid, *children(process.pid)}:  # torchrun gives each rank a session of its own
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def children(pid: int) -> list[int]:
    """Return the process ids of torchrun's ranks, in order."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(child) for child in found.read_text().split()]
    except OSError:
        return []


def environment() -> dict[str, str]:
    """Return this environment without torchrun's variables, with one thread and our modules."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    paths = [str(ROOT), str(HERE), kept.get("PYTHONPATH", "")]
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
