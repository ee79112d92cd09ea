"""Writes this folder: TransfoXL models saved by transformers 4.37.2, and their outputs. Needs
sacremoses 0.1.1 for its tokenizer:

    python tests/integrations/transfo_xl/write.py

The tests compare `txl.hf` with it: today's transformers and that one cannot be installed together.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "support"))
V, LENGTHS, NEW = 50, (7, 12, 3), 24
BINS = {"cutoffs": [10, 20, 35], "d_embed": 64}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"clamp_len": 6},
    "bins": BINS | {"div_val": 2, "same_length": True},
    "untied": BINS | {"untie_r": True, "pre_lnorm": True, "proj_share_all_but_first": False},
}
SAFE = {"plain": True, "bins": False, "untied": True}
WORDS = ["<eos>", "<unk>", *(f"word{n}" for n in range(V - 2))]


def outputs(model: Any) -> dict[str, torch.Tensor]:
    """Return the outputs of three segments, losses, and greedily generated tokens."""
    torch.manual_seed(1)
    found: dict[str, torch.Tensor] = {}
    mems = None
    with torch.no_grad():
        for i, length in enumerate(LENGTHS):
            tokens = torch.randint(V, (2, length))
            output = model(tokens, mems=mems, output_attentions=True, output_hidden_states=True)
            mems = output.mems
            found |= {f"{i}.tokens": tokens, f"{i}.scores": output.prediction_scores}
            for name in ("mems", "hidden_states", "attentions"):
                found |= {f"{i}.{name}.{n}": x for n, x in enumerate(getattr(output, name))}
        tokens = found["1.tokens"]
        labels = tokens.clone()
        labels[0, 3:6] = -100
        losses = model(tokens, labels=labels)
        found |= {"labels": labels, "losses": losses.losses, "loss": losses.loss}
        model.generation_config.eos_token_id = None  # all of NEW
        found["generated"] = model.generate(tokens[:1], max_new_tokens=NEW, do_sample=False)
    return {name: x.contiguous().clone() for name, x in found.items()}


def write() -> None:
    import transformers
    from hugging_face_model import transfo_xl

    assert transformers.__version__ == "4.37.2"
    for name, options in MODELS.items():
        model: Any = transfo_xl(**options)
        folder = HERE / name
        model.save_pretrained(folder, safe_serialization=SAFE[name])
        save_file(outputs(model), folder / "outputs")
        words = folder / "words"
        words.write_text("\n".join(WORDS) + "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = transformers.TransfoXLTokenizer(vocab_file=str(words))
        words.unlink()
        tokenizer.save_vocabulary(str(folder))


if __name__ == "__main__":
    write()
