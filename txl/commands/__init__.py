"""The `txl` command and its terminal output."""
