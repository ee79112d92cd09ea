"""How benchmarks are run: shapes and cases, checks, turns, clocks, limits, and the record."""
