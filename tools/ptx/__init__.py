"""Runs a GPU's code on the CPU: PTX, as Triton and nvcc write it, one block at a time.

What is right is computed; what is wrong is a `Fault`: accesses out of bounds, races, reads of
asynchronous copies and products before they are waited for, barriers that not all threads reach,
waits without end. Memory and registers that nobody wrote are NaN. Order is checked by who has seen
whose accesses (`order.py`), not by the schedule that happened to run. What is not modelled raises
`NotModelled`; nothing is guessed. See docs/kernels-gpu.md.
"""
