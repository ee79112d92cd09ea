"""Executor of PTX, as Triton and nvcc emit it, on the CPU, one block at a time.

It computes results, and raises `Fault` for errors: accesses out of bounds, races, reads of
asynchronous copies and products before they were waited for, barriers that not all threads reach,
and waits without end. Memory and registers that were never written are NaN. Races are found from
the order that synchronisation guarantees (`order.py`), not from the schedule that happened to run.
Anything else raises `NotModelled`; nothing is guessed. See docs/kernels-gpu.md.
"""
