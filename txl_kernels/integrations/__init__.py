"""Attention layers of other libraries on these kernels: `accelerate(model)` and `restore(model)`.

An attention module whose class and source are known becomes an instance of a subclass of its own
class, in place. Parameters, buffers, hooks, state_dict names and isinstance do not change. If a
call needs something that the kernels do not support (weights, additive masks, masks with holes),
the original code runs, and the call is counted.
"""

from txl_kernels.integrations.accelerate import Report, Row, accelerate, is_accelerated, restore
from txl_kernels.integrations.attention import attend, mask_bounds, merge_heads, project_table
from txl_kernels.integrations.explain import explain
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs
from txl_kernels.integrations.registry import peers, register, register_copy
from txl_kernels.integrations.source import source_hash

__all__ = [
    "Accelerated", "Peer", "RandomInputs", "Report", "Row", "accelerate", "attend", "explain", "is_accelerated",
    "mask_bounds", "merge_heads", "peers", "project_table", "register", "register_copy", "restore", "source_hash",
]  # fmt: skip
