"""From the records in benchmarks/results/ to REPORT.md, its plots and the README's figures."""
