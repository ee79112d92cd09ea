"""Text: data sets, preparation to tokens on disk, and the order in which tokens are read."""
