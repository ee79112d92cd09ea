"""`python -m txl_kernels`: which backends work here, which do not and why."""

import sys

from txl_kernels.diagnosis import report

try:
    print(report())
except (RuntimeError, ValueError) as error:  # of a setting in the environment that is none
    sys.exit(f"error: {error}")
