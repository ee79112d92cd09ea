"""Is the working tree slower than another revision? `make bench-compare BASE=<revision>`"""
