"""Several processes as one, started by torchrun: torch.distributed, DDP, FSDP2."""
