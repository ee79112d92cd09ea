"""What a CUDA graph does, on a CPU: the operators of a step, repeated on the same memory without
its Python."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What waits for the device on a GPU, or makes tensors whose shape depends on values.
WAITING = (
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select", "_to_copy", "lift_fresh", "item",
    "bincount", "repeat_interleave",
)  # fmt: skip


class Log(TorchDispatchMode):
    """The operators called while it is on, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Each operator again; what it makes goes to where it was made."""
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and _memory(old) != _memory(new):  # neither a view nor in place
                    old.copy_(new)

    @property
    def names(self) -> list[str]:
        return [func._schema.name.split("::")[1] for func, *_ in self.calls]

    def description(self) -> list[Any]:
        """All that a graph would hold: operators, numbers, and of each tensor shape, strides and
        where it is; for one that the step makes, which of them it is."""
        made: dict[int, int] = {}

        def describe(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            at = ("made", made[_memory(x)], x.storage_offset()) if _memory(x) in made else ("at", x.data_ptr())
            return (*at, tuple(x.shape), x.stride(), x.dtype)

        described = []
        for func, args, kwargs, out in self.calls:
            described.append((str(func), tree_map(describe, args), tree_map(describe, kwargs)))
            given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and _memory(x) not in given:
                    made[_memory(x)] = len(made)
        return described


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Replays:
    """A `Recorder` for any device.

    Attributes:
        prepared, replayed: how often. logs: of each step that was recorded.
    """

    def __init__(self) -> None:
        self.prepared = self.replayed = 0
        self.logs: list[Log] = []

    def prepare(self, step: Callable[[], None]) -> None:
        self.prepared += 1
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Runs the step, too, which changes nothing: it runs at once again."""
        with Log() as log:
            step()
        self.logs.append(log)

        def repeat() -> None:
            self.replayed += 1
            log.replay()

        return repeat
