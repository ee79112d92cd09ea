"""CUDA graphs on a CPU: a recorder of torch's operations that replays them on the same tensors.

As in a graph, Python runs once, nothing is computed while recording, and a replay reads and writes
the recorded addresses. What a graph cannot hold is refused: a value that the host reads, and an
input that is neither made in the recording nor declared to stay.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

REFUSED = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::is_nonzero", "aten::equal"}


class Recorder(TorchDispatchMode):
    """Records each operation with its tensors.

    Args:
        static: tensors that stay where they are: parameters, caches, static inputs.
    """

    def __init__(self, static: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {_storage(x) for x in static}
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: list[Any] = []  # keeps storages alive, so that an address means one tensor

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operator._schema.name
        if name in REFUSED:
            raise RuntimeError(f"{name} reads a value on the host, which no CUDA graph can hold")
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        for x in given:
            if _storage(x) not in self.known:
                raise RuntimeError(f"{name} reads a tensor {list(x.shape)} from outside, which may not be there later")
        self._save(operator, args, kwargs)
        result = operator(*args, **kwargs)
        made = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        self.made += made
        self.known.update(map(_storage, made))
        self.operations.append((operator, args, kwargs, made))
        return result

    def _save(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Save what an operation writes of the tensors from before the recording."""
        for n, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[n] if n < len(args) else kwargs.get(argument.name)
            for x in tree_flatten(value)[0]:
                if isinstance(x, Tensor) and _storage(x) not in self.saved:
                    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
                    self.saved[_storage(x)] = (whole, whole.clone())

    def restore(self) -> None:
        """Undo what the recording wrote: a capture computes nothing."""
        for whole, before in self.saved.values():
            whole.copy_(before)

    @torch.inference_mode()
    def replay(self) -> None:
        for operator, args, kwargs, made in self.operations:
            result = operator(*args, **kwargs)
            for new, own in zip((x for x in tree_flatten(result)[0] if isinstance(x, Tensor)), made, strict=True):
                if _storage(new) != _storage(own):
                    own.copy_(new)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def recorded(static: Callable[[], Iterable[Tensor]]) -> Callable[..., Any]:
    """Return a function to stand for `txl.graphs.capture` on a CPU; static: tensors that stay
    where they are, besides the captured function's inputs."""

    def capture(
        function: Callable[..., Any], inputs: Sequence[Tensor], device: torch.device
    ) -> tuple[Any, Callable[[], None]]:
        recorder, state = Recorder([*static(), *inputs]), torch.get_rng_state()
        try:
            with recorder:
                result = function(*inputs)
        finally:
            recorder.restore()
            torch.set_rng_state(state)
        return result, recorder.replay

    return capture
