"""The `triton` backend takes tensors on the CPU as if they lay on a GPU; what launches is replaced
by whoever pretends."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from txl_kernels.backends import triton as backend
from txl_kernels.backends.triton import passes, plan


@contextlib.contextmanager
def pretended_gpu(capability: int, multiprocessors: int) -> Iterator[None]:
    """capability: 80, 90. Launches are laid out for it, and not kept."""
    patch = mock.patch.object
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch(backend, "_absent_from", return_value=None))
        stack.enter_context(patch(plan, "capability", lambda device: divmod(capability, 10)))
        for module in (plan, passes):
            stack.enter_context(patch(module, "multiprocessors", lambda device: multiprocessors))
        plan.forget()
        stack.callback(plan.forget)
        yield
