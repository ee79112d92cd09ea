"""Other libraries' attention layers on these kernels: `accelerate(model)`, `restore(model)`.

An attention module whose class and source are known gets a subclass of its own class, in place:
parameters, buffers, hooks, state_dict names and isinstance stay as they were. Where a call needs
what the kernels do not do (weights, additive masks, masks with holes) the original runs, counted.
"""

from txl_kernels.integrations.accelerate import Report, Row, accelerate, restore
from txl_kernels.integrations.attention import attend, mask_bounds, merge_heads, project_table
from txl_kernels.integrations.peer import Accelerated, Peer, source_hash
from txl_kernels.integrations.registry import peers, register

__all__ = [
    "Accelerated", "Peer", "Report", "Row", "accelerate", "attend", "mask_bounds", "merge_heads", "peers", "project_table",
    "register", "restore", "source_hash",
]  # fmt: skip
