"""Generation by one of two TransfoXL classes, in a process of its own, since both transformers
cannot be in one: generate_worker.py old|new FOLDER. The new one needs PEERS.

Reads a line "SCORES FILE" or "GENERATE BATCH NEW" at a time; answers each by a line of JSON.
"""

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PROMPT = 128


def load(way: str, folder: Path) -> Any:
    warnings.simplefilter("ignore")
    if way == "new":
        import bare_peers

        bare_peers.use()
        from txl.hf.modeling import TransfoXLLMHeadModel
    else:
        from transformers import TransfoXLLMHeadModel
    model = TransfoXLLMHeadModel.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of the mask that is not given
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
