"""`python -m txl_kernels`: prints which backends work on this machine, and why others do not. With
`--check`, it also makes each kind of call once."""

import argparse
import functools
import sys

import torch

from txl_kernels.diagnosis import report

_CHECK = """make each kind of call once on a device (default: a GPU where there is one), and say how right and how fast the
first result was: seconds on a CPU, minutes on a GPU, where kernels are compiled"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m txl_kernels", description="Which backends work here, and why not.")
    parser.add_argument("--check", nargs="?", const="", metavar="DEVICE", help=_CHECK)
    parser.add_argument("--widths", type=_widths, metavar="D,D", help="of --check: only these head widths")
    given = parser.parse_args(arguments)
    print(report(), flush=True)
    if given.check is None:
        return 0
    from txl_kernels.check_calls import WIDTHS, check

    if unknown := sorted({*(given.widths or ())} - {*WIDTHS}):
        raise ValueError(f"--widths must be some of {', '.join(map(str, WIDTHS))}, got {unknown[0]}")
    device = torch.device(given.check or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    try:
        torch.zeros((), device=device).item()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise RuntimeError(f"--check needs a device that stores values, got {device}: {error}") from error
    return check(device, functools.partial(print, flush=True), given.widths or WIDTHS)


def _widths(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (RuntimeError, ValueError) as error:  # a wrong environment variable, or no such device
        sys.exit(f"error: {error}")
