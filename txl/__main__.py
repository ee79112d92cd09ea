"""Entry point of the `txl` command and of `python -m txl`; a missing package is reported in one
line."""

import importlib.util
import sys

from txl.errors import NEEDED


def main() -> None:
    """Run the command; exit with code 1 if a package is missing."""
    try:
        from txl.commands import cli

        cli.main()
    except ModuleNotFoundError as error:
        if error.name is None or "." in error.name:  # a fault inside some package, not a missing one
            raise
        names = sorted({error.name, *(name for name in NEEDED if importlib.util.find_spec(name) is None)})
        print(f"error: txl needs {', '.join(names)}: pip install {' '.join(names)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
