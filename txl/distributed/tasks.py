"""Tasks of hours dealt to processes: the first that is free takes the next."""

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from txl.distributed.join import settle
from txl.distributed.store import first_line, shared_store
from txl.distributed.world import World
from txl.errors import TxlError

BEAT_S = 1.0
LOST_S = 40.0  # without a beat


class Tasks:
    """Numbers 0 .. count - 1, each given to one of the processes that work together.

    They talk by a store of the first one's, never by a collective, which would time out. A thread
    of each says every second that it is there, and hears that another stopped or is lost.

        with Tasks(world, count, stop) as tasks:
            for number in tasks: ..
            failures = tasks.finish()
    """

    def __init__(self, world: World, count: int, stop: Callable[[], None], lost_s: float = LOST_S) -> None:
        """To be made by all processes alike.

        stop: called in another thread, once or more, when this process is to end what it does:
            another has stopped or is lost.
        """
        self.count, self._world, self._stop, self._lost_s = count, world, stop, lost_s
        self._stopping = False
        self._lost: str | None = None
        self._closed = threading.Event()
        self._store = shared_store(world)
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "Tasks":
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._heart.join(2 * BEAT_S)

    def __iter__(self) -> Iterator[int]:
        """Those that this process takes, until there are no more or one of them stops."""
        while not self._stopping and self._lost is None:
            try:
                number = self._store.add("next", 1) - 1
            except RuntimeError as error:
                self._lose(f"the first process has ended ({first_line(error)})")
                return
            if number >= self.count:
                return
            yield number

    def stop(self) -> None:
        """No process takes another task; from any thread, or a handler of signals."""
        self._stopping = True  # the store is not for handlers, which may interrupt its own call

    def failed(self, number: int, why: str) -> None:
        """Keeps why a task failed, for all."""
        self._store.set(f"failed/{number}", why)

    def finish(self) -> dict[int, str] | None:
        """Waits for all processes, however long.

        Returns:
            why tasks failed, in all processes the same; None where they have stopped.

        Raises:
            TxlError: another process is lost.
        """
        try:
            self._settled("stopped" if self._stopping else "")  # known before this one counts as ended
            ended = self._store.add("ended", 1)
            while ended < self._world.size and not self._stopping and self._lost is None:
                time.sleep(0.1)
                ended = self._store.add("ended", 0)
            if self._lost is None:
                done = self._settled("stopped" if self._stopping else "done") == "done"
                failures = self._failures() if done else None
                settle()  # the store is the first one's
                return failures
        except RuntimeError as error:
            self._lose(f"the first process has ended ({first_line(error)})")
        if self._stopping:
            return None
        raise TxlError(f"rank {self._world.rank}: {self._lost}, so this one ends, too")

    def _settled(self, word: str) -> str:
        """How it ends, said by whoever is first and for all: a signal may come to one only now."""
        return self._store.compare_set("outcome", "", word).decode() if word else ""

    def _failures(self) -> dict[int, str]:
        kept = [n for n in range(self.count) if self._store.check([f"failed/{n}"])]
        return {n: self._store.get(f"failed/{n}").decode() for n in kept}

    def _beat(self) -> None:
        size, told = self._world.size, False
        beats, heard = [0] * size, [time.monotonic()] * size
        while not self._closed.wait(BEAT_S):
            try:
                self._store.add(f"alive/{self._world.rank}", 1)
                if self._stopping and not told:
                    self._store.add("stop", 1)
                    told = True
                elif self._store.add("stop", 0):
                    self._stopping = told = True
                    self._stop()
                for rank in range(size):
                    now = self._store.add(f"alive/{rank}", 0)
                    if now != beats[rank]:
                        beats[rank], heard[rank] = now, time.monotonic()
                    elif time.monotonic() - heard[rank] > self._lost_s:
                        self._lose(f"rank {rank} has ended or does not answer")
                        return
            except RuntimeError as error:
                self._lose(f"the first process has ended ({first_line(error)})")
                return

    def _lose(self, why: str) -> None:
        if not self._closed.is_set():
            self._lost = why
            self._stop()
