"""The `txl` command, and what it shows."""
