"""Entry point of `python -m txl`."""

from txl.commands.cli import main

if __name__ == "__main__":
    main()
