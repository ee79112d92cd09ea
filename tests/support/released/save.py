"""save.py FOLDER..: checkpoints as the released code and NVIDIA's write them, in both formats of
torch.save.

FOLDER/{zip,legacy}/model.pt and cache.pt; FOLDER/{zip,legacy}/checkpoint_last.pt.
FOLDER/options.json: MemTransformerLM's arguments. FOLDER/tensors: the parameters, by the original's
names.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from mem_transformer import MemTransformerLM
from safetensors.torch import load_file
from vocabulary import Vocab


def nvidia_state(state, options):
    """Return the state with the parameter names of NVIDIA's softmax."""
    found = {}
    for name, x in state.items():
        if name.startswith("crit.out_layers."):
            i, kind = name.removeprefix("crit.out_layers.").split(".")
            if kind == "bias":
                found[f"crit.out_layers_biases.{i}"] = x
            elif not options["tie_weight"]:
                found[f"crit.out_layers_weights.{i}"] = x
        elif name.startswith("crit.out_projs."):
            if not options["tie_projs"][int(name.rpartition(".")[2])]:
                found[name] = x
        else:
            found[name] = x
            if name.startswith("word_emb.emb_projs."):
                found[name.replace("word_emb.emb_projs", "crit.shared_out_projs")] = x
    return found


def save(folder):
    """Write all files of one model."""
    options, tensors = json.loads((folder / "options.json").read_text()), load_file(folder / "tensors")
    model = MemTransformerLM(**options)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"pos_emb.inv_freq"}, missing
    vocabulary = Vocab(["<eos>", "<unk>", *(f"w{n}" for n in range(options["n_token"] - 2))])
    for name, new in (("zip", True), ("legacy", False)):
        (folder / name).mkdir(parents=True)
        torch.save(model, folder / name / "model.pt", _use_new_zipfile_serialization=new)
        torch.save(vocabulary, folder / name / "cache.pt", _use_new_zipfile_serialization=new)
        config = options | {"dtype": None, "sample_softmax": -1}
        held = {
            "args": argparse.Namespace(seed=1111, dataset="wt103"),
            "model_config": config,
            "model_state": nvidia_state(model.state_dict(), options),
            "optimizer_state": {
                "state": {0: {"exp_avg": torch.zeros(3)}},
                "param_groups": [{"lr": 0.01, "params": [0]}],
            },
            "scheduler_state": {"base_lrs": [0.01], "last_epoch": 3},
            "vocab": vocabulary,
            "amp_state": None,
            "epoch": 1,
            "best_val_loss": 3.5,
        }
        torch.save(held, folder / name / "checkpoint_last.pt", _use_new_zipfile_serialization=new)


for given in sys.argv[1:]:
    save(Path(given))
