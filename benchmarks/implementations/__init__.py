"""Implementations to compare, each with a check against float64."""
