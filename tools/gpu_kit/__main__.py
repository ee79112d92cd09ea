"""The commands. See the package."""

import argparse
import os
import sys
from pathlib import Path

import gpu_kit
from gpu_kit.records import Record


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="gpu_kit", description=gpu_kit.__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="fills gpu-kit/, without a GPU")
    preparing.add_argument("--triton", default="3.6.0", help="the device's version")
    preparing.add_argument("--python", default="python3.12", help="a Python like the device's, to build a wheel with")
    preparing.add_argument("--processes", type=int, default=os.cpu_count())
    for name, what in (("fill", "compiles with the Triton at hand, and packs"), ("found", "unpacks, compiles nothing")):
        filling = commands.add_parser(name, help=f"{what} (used by prepare)")
        filling.add_argument("cache", type=Path)
        filling.add_argument("--processes", type=int, default=os.cpu_count())
    calling = commands.add_parser("call", help="one of the three calls, on the device")
    calling.add_argument("number", type=int, choices=(1, 2, 3))
    calling.add_argument("folder", type=Path)
    piece = commands.add_parser("part", help="what one step's process does")
    piece.add_argument("name")
    piece.add_argument("record", type=Path)
    piece.add_argument("arguments", nargs=argparse.REMAINDER)
    telling = commands.add_parser("summary", help="one screen, from the calls' records")
    telling.add_argument("folder", type=Path)
    telling.add_argument("--predictions", type=Path, help="default tools/ptx/predictions.json")
    a = parser.parse_args()
    if a.command == "prepare":
        from gpu_kit import prepare

        return prepare.prepare(a.triton, a.python, a.processes)
    if a.command in ("fill", "found"):
        from gpu_kit import prepare

        return (prepare.fill if a.command == "fill" else prepare.found)(a.cache, a.processes)
    if a.command == "call":
        from gpu_kit import calls

        return 0 if calls.run(a.number, a.folder.absolute(), os.environ.get("TRITON_INTERPRET") == "1") else 1
    if a.command == "part":
        from gpu_kit.parts import PARTS

        PARTS[a.name](Record(a.record), *a.arguments)
        return 0
    from gpu_kit import summary

    print(summary.text(a.folder, a.predictions or summary.PREDICTIONS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
