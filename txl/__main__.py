"""Entry point of `txl` and of `python -m txl`."""

import sys

import txl


def main() -> None:
    """Run the command; without the packages that it needs, print the line that names them."""
    if txl.missing is not None:
        sys.exit(f"error: {txl.missing}")
    from txl.commands.cli import main as command

    command()


if __name__ == "__main__":
    main()
