"""The memory of a layer on the host, for a mem_len that the device cannot hold."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostStates:
    """Hidden states [B, M, d_model] of a layer in a ring on the host; a layer asks for them when it
    computes.

    Copies are queued in order with the device's other work, so neither side waits. Extending writes
    beside what is held, so that backward still finds it when it computes the layer again.

    Attributes:
        ring: [capacity, B, d_model], page-locked where there is a GPU; of one text, shared by all
            that followed from the first.
        begin: place in the ring of the first state held. length: states held, M.
        device: where the layer computes.
    """

    ring: Tensor
    begin: int
    length: int
    device: torch.device

    @classmethod
    def of(cls, states: Tensor, mem_len: int, segment: int) -> "HostStates":
        """states [B, M, d_model], on their device; mem_len: most that will be held; segment: most
        that are added at a time."""
        batch, length, width = states.shape
        pinned = states.device.type == "cuda"
        ring = torch.empty(mem_len + max(segment, 1), batch, width, dtype=states.dtype, pin_memory=pinned)
        ring[:length].copy_(states.transpose(0, 1), non_blocking=True)
        return cls(ring, 0, length, states.device)

    def size(self, dim: int) -> int:
        """Of [B, M, d_model]."""
        return (self.ring.size(1), self.length, self.ring.size(2))[dim]

    def states(self) -> Tensor:
        """A copy [B, M, d_model] on the device."""
        found = torch.empty(self.length, *self.ring.shape[1:], dtype=self.ring.dtype, device=self.device)
        tail = min(self.length, self.ring.size(0) - self.begin)
        found[:tail].copy_(self.ring[self.begin : self.begin + tail], non_blocking=True)
        found[tail:].copy_(self.ring[: self.length - tail], non_blocking=True)
        return found.transpose(0, 1)

    def extended(self, new: Tensor, mem_len: int) -> "HostStates":
        """The last mem_len states of these and `new` [B, L, d_model].

        Raises:
            ValueError: new is longer than was said when the ring was made.
        """
        capacity = self.ring.size(0)
        new = new[:, max(new.size(1) - mem_len, 0) :].transpose(0, 1).to(self.ring.dtype).contiguous()
        added = new.size(0)
        if added > capacity - min(self.length, mem_len):
            raise ValueError(f"a segment of {added} states does not fit beside {self.length} in a ring of {capacity}")
        end = (self.begin + self.length) % capacity
        tail = min(added, capacity - end)
        self.ring[end : end + tail].copy_(new[:tail], non_blocking=True)
        self.ring[: added - tail].copy_(new[tail:], non_blocking=True)
        length = min(self.length + added, mem_len)
        return HostStates(self.ring, (end + added - length) % capacity, length, self.device)
