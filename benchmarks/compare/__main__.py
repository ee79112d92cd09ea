"""Is this working tree slower than another revision on the CPU? Both are built, and run in turns,
case by case.

    make bench-compare BASE=REVISION, or PYTHONPATH=benchmarks python -m compare REVISION

Each round times a case once on both sides. The ratio of the two times is taken round by round, so
that a machine that slows down for a while slows both; the interval is a 95% bootstrap interval of
the median ratio. A case has regressed if its median ratio is above 1.10 and its interval holds no
1.00. Exit status 1: some case has regressed; 2: could not compare.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from compare.compare import Failed, built, compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="what to compare the working tree with")
    parser.add_argument(
        "--sites", nargs=2, type=Path, metavar=("BASE", "HEAD"), help="folders with built packages instead"
    )
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each case")
    a = parser.parse_args()
    if (a.revision is None) == (a.sites is None):
        parser.error("give a revision, or --sites")
    try:
        given = [] if a.sites is None else [site.resolve() for site in a.sites]
        with built(a.revision) if a.revision else contextlib.nullcontext(given) as sites:
            good = compare(*sites, a.only, a.seconds)
    except (Failed, OSError, ValueError) as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if good else "slower than the base by more than 10%")


if __name__ == "__main__":
    main()
