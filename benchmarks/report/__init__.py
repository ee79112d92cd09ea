"""From the records in benchmarks/results/ to REPORT.md, its plots, and the figures of the README
and docs/speed.md."""
