"""Checkpoints of other code: the original's, Hugging Face's. Nothing in a file is executed."""
