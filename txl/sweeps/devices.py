"""Rows dealt to several devices: the first that is free takes the next, in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import torch

import txl
from txl.sweeps.worker import STOPPED
from txl.training.trainer import Interrupted

FINISHING = "finishing the updates in progress; Ctrl-C again ends at once\n"
Process = subprocess.Popen[str]


class Deal:
    """Rows of the sweep in a folder, on their way to devices."""

    def __init__(
        self, folder: Path, names: Sequence[str], devices: Sequence[torch.device], say: Callable[[str], None],
        done: Callable[[str, str | None], None],
    ) -> None:  # fmt: skip
        """say: is called with each line of a row; done: with each row and why it failed, or None.
        Neither is called twice at the same time."""
        self.folder, self.devices, self.say, self.done = folder, devices, say, done
        self.threads = max(torch.get_num_threads() // len(devices), 1)
        self._waiting = list(names)
        self._running: set[Process] = set()
        self._told = threading.Lock()
        self._stopping = self._killing = False

    def run(self) -> None:
        """Runs all rows.

        Raises:
            Interrupted: Ctrl-C; every row has written its checkpoint.
            KeyboardInterrupt: a second one; every row was killed.
        """
        with ThreadPoolExecutor(len(self.devices)) as pool, self._stops_on_ctrl_c():
            try:
                for one in [pool.submit(self._serve, device) for device in self.devices]:
                    one.result()
            except BaseException:
                self._stopping = self._killing = True
                for process in list(self._running):
                    process.kill()
                raise
        if self._stopping:
            raise Interrupted

    def stop(self) -> None:
        """Rows end after the update in progress, and no other begins."""
        self._stopping = True
        for process in list(self._running):
            _ask_to_stop(process)

    def _serve(self, device: torch.device) -> None:
        """Runs rows on a device as long as there are any."""
        while not self._stopping:
            with self._told:
                if not self._waiting:
                    return
                name = self._waiting.pop(0)
            code, error = self._row(name, device)
            if code not in (0, STOPPED) and error is None and not self._killing:
                error = f"its process ended with exit code {code}"
            if code == 0 or error is not None:
                with self._told:
                    self.done(name, error)

    def _row(self, name: str, device: torch.device) -> tuple[int, str | None]:
        """Runs a row; its process's exit code, and why it failed if it says so."""
        error: str | None = None
        with self._started(name, device) as process:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                error = event.get("error", error)
                if "line" in event:
                    with self._told:
                        self.say(f"[{device}] {event['line']}")
            return process.wait(), error

    @contextlib.contextmanager
    def _started(self, name: str, device: torch.device) -> Iterator[Process]:
        root = str(Path(txl.__file__).parents[1])  # a worker takes the same package as we, wherever it starts
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        with subprocess.Popen(
            [sys.executable, "-m", "txl.sweeps.worker", str(self.folder), name, str(device), str(self.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(self.threads)},
            start_new_session=True,  # a terminal's Ctrl-C is ours to pass on
        ) as process:  # fmt: skip
            self._running.add(process)
            if self._stopping:  # between the look at it and the start
                _ask_to_stop(process)
            try:
                yield process
            finally:
                self._running.discard(process)

    @contextlib.contextmanager
    def _stops_on_ctrl_c(self) -> Iterator[None]:
        """The first Ctrl-C stops, the second kills; one that is ignored (`nohup`) stays so."""
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
            yield
            return

        def handler(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, previous)
            self.stop()
            with contextlib.suppress(OSError):
                os.write(2, FINISHING.encode())  # as in txl.commands.interrupt

        previous = signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def _ask_to_stop(process: Process) -> None:
    with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
        assert process.stdin is not None
        os.write(process.stdin.fileno(), b"s")
