"""Turns the records in benchmarks/results/ into REPORT.md, and the documents' figures and plots.

    make report, or PYTHONPATH=benchmarks python -m report [--check]

`--check` writes nothing and fails if they do not say what the published records say.
"""

import argparse
import difflib
import sys

from report.documents import texts, write
from report.records import load, published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the documents differ")
    if not parser.parse_args().check:
        print(*write(load(published())) or ["nothing to change"], sep="\n")
        return
    for path, text in texts(load(published())).items():
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        if found != text:
            changes = difflib.unified_diff(found.splitlines(), text.splitlines(), path.name, "records", lineterm="")
            sys.exit("\n".join([*list(changes)[:40], f"{path.name} does not say what the records say: make report"]))


if __name__ == "__main__":
    main()
