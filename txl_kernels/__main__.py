"""`python -m txl_kernels`: which backends work here, which do not and why."""

from txl_kernels.diagnosis import report

print(report())
