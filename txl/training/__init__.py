"""Training: one run folder, resumable bit for bit."""
