"""Implementations of the instructions, which `ptx.decode` imports."""
