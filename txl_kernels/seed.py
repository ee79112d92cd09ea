"""The seed of dropout, drawn so that forward and backward have the same.

A compiled graph's backward may compute again what forward did not keep: torch's partitioner does so
to hold an activation memory budget, and a number drawn again is another one. So an operator draws
the seed, as whose value torch is told to keep it.
"""

import torch
from torch import Tensor
from torch.fx.traceback import get_current_meta
from torch.utils.checkpoint import CheckpointPolicy

from txl_kernels.call import Call, changed
from txl_kernels.checks import check_seed

_library = torch.library.Library("txl_kernels", "FRAGMENT")
_library.define("new_seed(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def new_seed(device: torch.device) -> Tensor:
    """A seed, int64 [1], drawn from torch's generator of the device."""
    if torch.compiler.is_compiling():
        seed: Tensor = torch.ops.txl_kernels.new_seed(device)
        return seed
    return _draw(device)


def seeded(call: Call) -> Call:
    """The call with a seed, drawn if none was given, where it drops weights; else without one.

    Raises:
        TypeError: the seed given is no int64 tensor of one element on q's device.
    """
    check_seed(call.seed, call.q)
    if call.dropout_p > 0:
        return call if call.seed is not None else changed(call, seed=new_seed(call.q.device))
    return call if call.seed is None else changed(call, seed=None)


def _draw(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _draw_to_keep(device: torch.device) -> Tensor:
    """`_draw`, whose node in a graph that is being traced is marked as one to be saved: the mark of
    selective activation checkpointing."""
    meta = get_current_meta()
    before = meta.get("recompute")
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        return _draw(device)
    finally:
        if before is None:
            del meta["recompute"]
        else:
            meta["recompute"] = before


# Of a composite operator, a graph holds what it is made of: torch's randint, which every pass over
# graphs knows as random. vmap has randomness of its own, which it adds where it meets the operator.
for _key in ("CompositeImplicitAutograd", "FuncTorchVmapMode"):
    _library.impl("new_seed", _draw_to_keep, _key)
