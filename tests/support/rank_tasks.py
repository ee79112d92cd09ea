"""What ranks do in the tests of tasks."""

import os
import threading
import time
from pathlib import Path

from txl.distributed.tasks import Tasks
from txl.distributed.world import World
from txl.errors import TxlError


def work(world: World) -> dict[str, object]:
    """Rank 0 is long at its first task; the last task fails; then one stops; then there is none."""
    found: dict[str, object] = {}
    taken = []
    with Tasks(world, 6, lambda: None) as tasks:
        for number in tasks:
            taken.append(number)
            if number == 5:
                tasks.failed(number, "no good, ä")
            time.sleep(1.5 if world.first and len(taken) == 1 else 0.1)
        found["failures"] = tasks.finish()
    found["taken"] = taken
    stopped = threading.Event()
    with Tasks(world, 100, stopped.set) as tasks:
        for _ in tasks:
            if world.rank == 1:
                tasks.stop()
            elif not stopped.wait(20):
                raise AssertionError("rank 0 was not told")
        found["stopped"] = tasks.finish()
    with Tasks(world, 0, lambda: None) as tasks:
        found["none"] = (list(tasks), tasks.finish())
    return found


def lose(world: World, victim: int, number: int, said: Path) -> None:
    """One gets a signal that it cannot handle; the other one, at a long task, writes what it
    hears and ends."""
    told = threading.Event()
    with Tasks(world, 2, told.set, lost_s=2.0) as tasks:
        if world.rank == victim:
            time.sleep(0.5)
            os.kill(os.getpid(), number)
        for _ in tasks:
            if not told.wait(30):
                raise AssertionError("nobody missed it")
        try:
            tasks.finish()
        except TxlError as error:
            said.write_text(str(error))
    os._exit(0)  # the helper would wait for the other one
