"""What a call must be, before any kernel runs. `check` reads no tensor's values;
`check_bound_values` does."""

from txl_kernels.call import Call
from txl_kernels.checks.bounds import check_bound_values, check_bounds, check_table
from txl_kernels.checks.gradients import check_gradients
from txl_kernels.checks.settings import check_seed, check_settings
from txl_kernels.checks.tensors import check_tensors

__all__ = ["check", "check_bound_values", "check_gradients", "check_seed"]


def check(call: Call) -> None:
    """All that shapes, dtypes, devices, strides and settings decide; the seed apart, which changes
    at every call.

    Raises:
        TypeError, ValueError: an argument, by name, with what was given and what is accepted.
    """
    check_tensors(call)
    check_bounds(call)
    check_settings(call)
    check_table(call)
