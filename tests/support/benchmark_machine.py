"""A stand-in for the machine under test."""

from collections.abc import Callable
from typing import Any


class FakeMachine:
    """As little of a machine as a comparison needs."""

    kind = "cpu"

    def about(self) -> dict[str, Any]:
        return {"date": "2000-01-01", "kind": "cpu", "device": "A processor", "threads": 2, "isa": "avx2"}

    def on_device(self, run: Callable[[], object]) -> float:
        run()
        return 0.25

    def synchronize(self) -> None:
        pass

    def free_memory(self) -> None:
        pass
