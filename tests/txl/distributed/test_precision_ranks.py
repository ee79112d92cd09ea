"""Several processes take one precision, whatever each would have measured alone."""

from pathlib import Path

from ranks import run_ranks

from txl.text.corpus import Corpus

CASES = {
    "both faster": [("amx", 0.5), ("avx512_bf16", 0.6)],
    "the second slower": [("amx", 0.5), ("amx", 2.0)],
    "the first slower": [("amx", 2.0), ("amx", 0.5)],
    "the second without units": [("amx", 0.5), ("avx2", 0.5)],
    "the first without units": [("avx2", 0.5), ("amx", 0.5)],
}
FOUND = {
    "both faster": "bf16",
    "the second slower": "fp32",
    "the first slower": "fp32",
    "the second without units": "auto",
    "the first without units": "auto",
}


def test_two_processes_take_one(corpus: Corpus, tmp_path: Path) -> None:
    for rank in run_ranks("rank_precision:decide", 2, {"corpus": corpus.folder, "cases": CASES}, tmp_path):
        assert rank == FOUND
