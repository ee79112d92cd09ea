"""Comparison of the working tree's speed with another revision's: `make bench-compare
BASE=REVISION`."""
