"""`generate()` of transformers' old TransfoXL and of `txl.hf`'s, with the same weights, each in a
separate process because they need different versions of transformers.

    python -m implementations.generation old|new FOLDER; the new one needs PEERS

A process reads lines "SCORES FILE" or "GENERATE BATCH NEW" and answers each with a line of JSON.
"""

import atexit
import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from harness.comparison import Entry, Unavailable, require
from implementations import bare_peers
from implementations.models import ENWIK8_BASE
from txl import TransformerXL
from txl.importing.checkpoint import export
from txl.text.vocabulary import ByteVocabulary
from txl.training import checkpoint as checkpoints

OLD, NEW = "transformers 4.37.2", "txl.hf"
PROMPT, TOKENS = 128, 64
_HERE = Path(__file__).parents[1]


@functools.cache
def saved(mem_len: int) -> Path:
    """Write enwik8-base with random weights to a folder that both classes can load."""
    folder = Path(tempfile.mkdtemp(prefix="txl-generation-"))
    torch.manual_seed(0)
    model = TransformerXL(replace(ENWIK8_BASE, mem_len=mem_len, initial_memory="zeros"))
    checkpoints.save(folder / "a.safetensors", model, ByteVocabulary(bytes(range(ENWIK8_BASE.vocab_size))), {}, {})
    export(folder / "a.safetensors", folder / "model")
    return folder / "model"


class Worker:
    """A process with one of the classes; `ask` sends a line and waits for the answer."""

    def __init__(self, way: str, mem_len: int) -> None:
        """Raise Unavailable if the required version of transformers is not installed."""
        paths = [_HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "implementations.generation", way, saved(mem_len)]
        self._process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        )  # fmt: skip
        atexit.register(self._process.kill)
        missing = self._read().get("missing")
        if missing:
            raise Unavailable(f"{way} class: {missing}")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError((self._process.stderr.read().strip().splitlines() or ["ended"])[-1])
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._read()


@functools.cache
def worker(way: str, mem_len: int) -> Worker:
    return Worker(way, mem_len)


def _require() -> None:
    if not bare_peers.AVAILABLE:
        raise Unavailable("transformers >= 5 is not here: `make peers`, and PEERS=.peers in the environment")


@functools.cache
def _exact(mem_len: int) -> torch.Tensor:
    """Compute the scores of two segments by `txl`'s own model."""
    from txl.importing.checkpoint import convert

    with tempfile.TemporaryDirectory() as folder:
        model = convert(saved(mem_len), Path(folder, "a.safetensors")).model.double().eval()
    tokens = prompt(2, ENWIK8_BASE.vocab_size)
    with torch.no_grad():
        first, memory = model(tokens)
        after, _ = model(tokens.flip(1), memory)
    return torch.stack([first.log_softmax(-1), after.log_softmax(-1)])


def entry(way: str, mem_len: int, batch: int) -> Entry:
    """Make an entry that generates greedily after a prompt; times are measured inside the
    process."""
    _require()
    running = worker(way, mem_len)

    def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            running.ask(f"SCORES {folder}/scores")
            require(load_file(f"{folder}/scores")["scores"], _exact(mem_len), way, 1e-4)

    return Entry(lambda: float(running.ask(f"GENERATE {batch} {TOKENS}")["seconds"]), check, per=batch * TOKENS)


def load(way: str, folder: Path) -> Any:
    warnings.simplefilter("ignore")
    if way == "new":
        bare_peers.use()
        from txl.hf.modeling import TransfoXLLMHeadModel
    else:
        from transformers import TransfoXLLMHeadModel
    model = TransfoXLLMHeadModel.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    logging.getLogger("transformers").setLevel(logging.ERROR)  # no warning that attention_mask is missing
    return model


def prompt(batch: int, vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def answer(model: Any, line: str) -> dict[str, Any]:
    what, *arguments = line.split()
    if what == "SCORES":
        tokens = prompt(2, model.config.vocab_size)
        first = model(tokens)
        after = model(tokens.flip(1), mems=first.mems)
        save_file({"scores": torch.stack([first.prediction_scores, after.prediction_scores])}, arguments[0])
        return {"saved": arguments[0]}
    batch, new = map(int, arguments)
    tokens = prompt(batch, model.config.vocab_size)
    began = time.perf_counter()
    model.generate(tokens, max_new_tokens=new, do_sample=False)
    return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    try:
        model = load(sys.argv[1], Path(sys.argv[2]))
    except ImportError as error:
        sys.exit(print(json.dumps({"missing": str(error)})))
    print(json.dumps({"missing": ""}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, line)), flush=True)
