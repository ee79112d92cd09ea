"""The calls of a trial (trial.py): lengths, masks and modes in which an adapter and an original are
compared."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pass:
    """A call of a trial.

    Attributes:
        label: a description.
        frames: the number of frames, T.
        seen: the keys that queries see, bool [B, T, T], or None for all.
        form: the form of masks, of `mask_forms`.
        training: whether the modules are in training mode.
        gradients: whether gradients are compared.
        autocast: whether torch says that CUDA's autocast is on.
        batch: the number of sequences, B.
        scale: a factor of the frames.
        dropping_alone: whether dropout modules, and no others, are in training mode.
        itself: whether the outputs count of those queries alone that see their own key.
        as_configured: whether dropout probabilities are the module's own. Such a call is needed if
            the adapter answers no call in training mode with others.
    """

    label: str
    frames: int
    seen: Tensor | None
    form: str
    training: bool = False
    gradients: bool = True
    autocast: bool = False
    batch: int = 2
    scale: float = 1.0
    dropping_alone: bool = False
    itself: bool = False
    as_configured: bool = False

    @property
    def valid(self) -> Tensor | None:
        """The queries whose outputs count, bool [B, T], or None for all: those that see a key."""
        if self.seen is None:
            return None
        return self.seen.diagonal(dim1=1, dim2=2) if self.itself else self.seen.any(-1)


def passes(single: int, short: int, other: int, long: int, forms: Sequence[str]) -> Iterator[Pass]:
    masks: list[tuple[str, Tensor | None]] = [("without a mask", None), *_masks(short)]
    for form in forms:
        for training in (False, True):
            for number, (label, seen) in enumerate(masks):
                gradients = form == forms[0] and number == 2 * training  # once in each mode
                mode = " in training mode" if training else ""
                batch = 3 if seen is None else 2
                yield Pass(f"{label}, {form}{mode}", short, seen, form, training, gradients, batch=batch)
    left = (torch.arange(short, device="cpu") >= torch.tensor([0, 4], device="cpu").view(-1, 1, 1)).expand(
        2, short, short
    )
    yield Pass("with padding on the left", short, left, forms[0], gradients=False, itself=True)
    nothing = torch.ones(2, other, other, dtype=torch.bool, device="cpu")
    yield Pass("with a mask that hides nothing", other, nothing, forms[0], gradients=False)
    yield Pass(f"with a length of {single}", single, None, forms[0], gradients=False, batch=2)
    yield Pass("with large values", short, None, forms[0], gradients=False, scale=8.0)
    yield Pass(
        "with dropout modules alone in training mode", short, None, forms[0], gradients=False, dropping_alone=True
    )
    yield Pass("under autocast", short, masks[1][1], forms[0], autocast=True)
    padding = (torch.arange(long, device="cpu") < long - 4).expand(1, long, long)
    for training, seen in ((False, None), (True, padding)):
        label = f"with {long} frames{' and padding' * training}"
        yield Pass(label, long, seen, forms[0], training, gradients=False, batch=1)
    for label, seen in masks:
        yield Pass(f"{label}, in training mode as configured", short, seen, forms[0], True, as_configured=True)


@contextlib.contextmanager
def autocast_of_cuda(on: bool) -> Iterator[None]:
    """Set what torch.is_autocast_enabled() says in this thread; functions of the CPU do not
    change."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", on)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before)


def _masks(T: int) -> list[tuple[str, Tensor]]:
    at = torch.arange(T, device="cpu")
    padding = (at < torch.tensor([T, T - 4], device="cpu").view(-1, 1, 1)).expand(2, T, T)
    distance = at.unsqueeze(1) - at
    near = ((distance <= 4) & (distance >= -2)).expand(2, T, T)
    blind = near.clone()
    blind[1, 3:5] = False
    return [("with padding", padding), ("with limited context", near), ("with queries that see no key", blind)]
