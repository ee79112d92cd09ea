"""Training: a run in one folder, which can be resumed bit for bit."""
