"""Import of checkpoints of other code: the original's, transformers' and NVIDIA's. Nothing in a
file is executed."""
