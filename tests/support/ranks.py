"""Functions and commands in several processes that have met, as torchrun would start them."""

import importlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from txl.distributed import joined, settle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GRACE_S = 5.0  # for the other ranks to say what they saw, once one has failed


def run_ranks(target: str, size: int, arguments: dict[str, Any], folder: Path, timeout: float = 120) -> list[Any]:
    """`function(world, **arguments)` in `size` processes on the CPU; what each returns, by rank.

    target: "module:function", of a module in tests/support or tests/txl/distributed.
    arguments, results: picklable. folder: for them, made if it is not there.

    Raises:
        AssertionError: a rank failed, with its traceback, or the time is over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*"):
        old.unlink()
    torch.save((target, arguments), folder / "call.pt")
    started = []
    common = environment() | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(size):
        with (folder / f"rank-{rank}.txt").open("w") as said:
            command = [sys.executable, str(HERE / "ranks.py"), str(folder)]
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, env=own, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT))
    try:
        late = _wait(started, timeout)
    finally:
        for process in started:
            process.kill()
            process.wait()
    codes = [process.returncode for process in started]
    if late or any(codes):
        said = [f"rank {r}, exit code {codes[r]}:\n{(folder / f'rank-{r}.txt').read_text()}" for r in range(size)]
        raise AssertionError(f"{target}: {f'not done in {timeout} s' if late else 'failed'}\n" + "\n".join(said))
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(size)]


def torchrun(size: int, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node size -m txl arguments`, to its end; AssertionError after so many
    seconds."""
    with start_torchrun(size, *arguments) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"not done in {timeout} s: {process.communicate()}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def start_torchrun(size: int, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The same on its way, in a process group of its own, all of which is killed in the end."""
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
    """Of torchrun the ranks, in their order."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(child) for child in found.read_text().split()]
    except OSError:
        return []


def environment() -> dict[str, str]:
    """This one, for a process outside of any world, with one thread and our modules."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    paths = [str(ROOT), str(HERE), str(ROOT / "tests" / "txl" / "distributed"), kept.get("PYTHONPATH", "")]
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _wait(started: list[subprocess.Popen[bytes]], timeout: float) -> bool:
    """Until all have ended, or one failed; whether the time was over."""
    end = time.monotonic() + timeout
    failing = False
    while any(process.poll() is None for process in started):
        if not failing and any(process.poll() for process in started):
            failing, end = True, time.monotonic() + GRACE_S
        if time.monotonic() > end:
            return not failing
        time.sleep(0.02)
    return False


def free_port() -> int:
    """Below those that the system gives to connections, or one could have it before it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def _main(folder: Path) -> int:
    target, arguments = torch.load(folder / "call.pt", weights_only=False)
    module, name = target.split(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        with joined(torch.device("cpu")) as world:
            result = function(world, **arguments)
            settle()
        torch.save(result, folder / f"rank-{world.rank}.pt")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
