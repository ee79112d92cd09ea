"""The seed of dropout, drawn so that forward and backward use the same.

The backward of a compiled graph may recompute what forward did not save: torch's partitioner does
so to keep to an activation memory budget. A seed drawn again would be another one. So an operator
draws the seed, and the graph marks its result to be saved.
"""

import torch
from torch import Tensor
from torch.fx.traceback import get_current_meta
from torch.utils.checkpoint import CheckpointPolicy

from txl_kernels.call import Call, changed
from txl_kernels.checks import check_seed
from txl_kernels.library import define


def new_seed(device: torch.device) -> Tensor:
    """Return a seed, int64 [1], drawn from torch's generator of the device."""
    if torch.compiler.is_compiling():
        seed: Tensor = torch.ops.txl_kernels.new_seed(device)
        return seed
    return _draw(device)


def seeded(call: Call) -> Call:
    """Return the call with a seed if it drops weights (drawn if none was given), else without one.

    Raises:
        TypeError: the given seed is not an int64 tensor of one element on q's device.
    """
    check_seed(call.seed, call.q)
    if call.dropout_p > 0:
        return call if call.seed is not None else changed(call, seed=new_seed(call.q.device))
    return call if call.seed is None else changed(call, seed=None)


def _draw(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _draw_to_keep(device: torch.device) -> Tensor:
    """Draw a seed, and mark its node in a graph that is being traced to be saved, as selective
    activation checkpointing does."""
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


def _implement(library: torch.library.Library) -> None:
    # A graph does not contain a composite operator, but the operators that it calls: here torch's
    # randint, which every graph pass treats as random. vmap handles randomness by itself, where it
    # meets the operator.
    for key in ("CompositeImplicitAutograd", "FuncTorchVmapMode"):
        library.impl("new_seed", _draw_to_keep, key)


define("new_seed(Device device) -> Tensor", implement=_implement, tags=(torch.Tag.nondeterministic_seeded,))
