"""One page of a run: what was trained and what has been measured of it."""
