"""Texts: where they come from, how they become tokens on disk, in what order they are read."""
