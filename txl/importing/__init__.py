"""Checkpoints of other code: the original's, Hugging Face's, NVIDIA's. Nothing in a file is
executed."""
