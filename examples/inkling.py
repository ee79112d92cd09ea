"""A small Inkling 2 on 8,192 tokens, as it is and accelerated: time and memory of its text model.

pip install "transformers>=5.24" txl-kernels; python examples/inkling.py

The model has random weights, a sliding and a full layer, and the attention of Inkling 2: position
queries of width 16, a table of 1,024 distances (512 in the sliding layer), grouped heads, sinks.
Each case runs in its own process; the accelerated model is first compared with the original on 600
tokens. Then the case runs forward without gradients, and forward + backward, once each. The script
prints seconds, and by how much the process's peak memory grew. --figure also runs other lengths and
plots all of them (pip install "txl-kernels[plots]").
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

try:
    from transformers import Inkling2TextConfig, Inkling2TextModel
except ImportError as error:
    sys.exit(f'{error}: pip install "transformers>=5.24"')

from txl_kernels.integrations import accelerate

WAYS = ("original", "accelerated")
LENGTHS = {"original": (1024, 2048, 4096, 8192), "accelerated": (1024, 2048, 4096, 8192, 16384)}  # of the figure
Found = dict[str, dict[str, float]]  # by way: seconds and MiB of each direction


def text_model() -> Any:
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    sliding = {f"swa_{name}": value for name, value in heads.items()}
    config = Inkling2TextConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, layer_types=["hybrid_sliding", "hybrid"], **heads, **sliding,
        sliding_window_size=512, rel_extent=1024, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        attn_implementation="eager", use_cache=False, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return Inkling2TextModel(config)


def peak() -> float:
    """Return the most memory that this process has had, in MiB."""
    try:
        # Not ru_maxrss: there a new process starts with the peak of the one that started it.
        return float(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) / 2**10
    except FileNotFoundError:  # macOS, where ru_maxrss counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def case(way: str, tokens: int) -> dict[str, float]:
    model, few = text_model(), torch.randint(1, 1000, (1, 600))
    with torch.no_grad():
        expected = model(few).last_hidden_state
        if way == "accelerated":
            accelerate(model, strict=True)
            torch.testing.assert_close(model(few).last_hidden_state, expected, rtol=1e-3, atol=1e-3)
    x = torch.randint(1, 1000, (1, tokens))
    before, began = peak(), time.perf_counter()
    with torch.no_grad():
        model(x)
    found = {"forward, s": time.perf_counter() - began, "forward, MiB": peak() - before}
    began = time.perf_counter()
    model(x).last_hidden_state.square().mean().backward()
    return found | {"forward + backward, s": time.perf_counter() - began, "forward + backward, MiB": peak() - before}


def run(way: str, tokens: int) -> dict[str, float]:
    """Run a case in a process of its own."""
    command = [sys.executable, __file__, "--case", way, "--tokens", str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{tokens} tokens, {way}: exit status {done.returncode} (-9: the memory was not enough)")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def figure(path: Path, found: dict[str, dict[int, dict[str, float]]]) -> None:
    """Draw seconds and MiB of both directions against the number of tokens; found: by way and
    number of tokens."""
    from txl.pictures import BLUE, RED, new_figure, save

    picture = new_figure(10.0, 4.2)
    for n, unit in enumerate(("s", "MiB")):
        axes = picture.add_subplot(1, 2, n + 1)
        for way, color, marker in zip(WAYS, (BLUE, RED), "so", strict=True):
            for direction, line in (("forward", "--"), ("forward + backward", "-")):
                values = [x[f"{direction}, {unit}"] for x in found[way].values()]
                values = [max(x, 1.0) for x in values] if unit == "MiB" else values  # a short text may need none
                name = f"{'transformers' if way == 'original' else way}, {direction}"
                axes.plot(list(found[way]), values, color=color, linestyle=line, marker=marker, label=name)
                label = f"{values[-1]:,.0f}" if values[-1] >= 100 else f"{values[-1]:.3g}"
                axes.annotate(label, (max(found[way]), values[-1]), xytext=(6, 0), textcoords="offset points")
        ticks = sorted({tokens for way in WAYS for tokens in found[way]})
        axes.set(xscale="log", yscale="log", xlabel="tokens", title="seconds" if unit == "s" else "peak memory, MiB")
        axes.set(xlim=(min(ticks) / 1.2, max(ticks) * 1.8))
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    picture.suptitle("Inkling 2: two layers, B1 H2 D64, float32", fontsize=10)
    save(picture, path)


def main(tokens: int = 8192, path: Path | None = None) -> Found:
    """Print a table; with a path also draw it, and other lengths, there."""
    found = {way: run(way, tokens) for way in WAYS}
    print(f"{'':25}" + "".join(f"{way:>14}" for way in WAYS))
    for name in found["original"]:
        print(f"{name:25}" + "".join(f"{found[way][name]:>14.4g}" for way in WAYS))
    if path is not None:
        others = {way: {n: found[way] if n == tokens else run(way, n) for n in LENGTHS[way]} for way in WAYS}
        figure(path, others)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--figure", type=Path, help="also draw time and memory against the length, to this file")
    parser.add_argument("--case", choices=WAYS, help="only this, printed as JSON")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(case(given.case, given.tokens)))
    else:
        main(given.tokens, given.figure)
