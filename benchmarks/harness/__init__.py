"""The benchmark harness: shapes and cases, checks, interleaved timing, clocks, limits, and the
record."""
