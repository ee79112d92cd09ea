"""`python -m txl`: the same as the `txl` command."""

from txl.cli import main

main()
