"""An hour of audio through a layer of Parakeet's size, as it is and accelerated: time and memory.

pip install "transformers>=5.23" "txl-kernels[plots]"; python examples/hour_of_audio.py

A layer of transformers' ParakeetEncoder (8 heads, 1,024 wide, random weights) reads 5 to 60
minutes of frames, 12.5 a second after the subsampling: the original where the machine has the
memory for it, accelerated, and accelerated with a limited context. Each case is a process of its
own, is first compared with the original on a few frames, and gives the median of up to three runs
(one if it is over 10 s) and the process' peak memory. The encoder's 24 layers are 24 of these, so
their time is extrapolated; only one layer's work is in memory at a time. The subsampling before the
layers runs in pieces, as at once it takes more memory than they do. Writes hour_of_audio.json and
hour_of_audio.png to the folder of --out.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from transformers import ParakeetEncoder, ParakeetEncoderConfig
except ImportError as error:
    sys.exit(f'{error}: pip install "transformers>=5.23"')

from txl_kernels.integrations import accelerate

WIDTH, HEADS, LAYERS, STRIDE = 1024, 8, 24, 8
FRAMES = 750  # of the encoder in a minute: one each 80 ms
WINDOW = (128, 128)  # frames before and after its own that a frame sees: 10 seconds each
WAYS = ("subsampling", "window", "accelerated", "original")
NAMES = {"original": "transformers", "accelerated": "accelerated", "window": f"accelerated, window={WINDOW}"}
Found = dict[str, dict[str, dict[str, float]]]  # by way and minutes: seconds, GiB


def needed(frames: int) -> float:
    """GiB of the original's largest two tensors, alive together: the terms of positions
    [H, T, 2T - 1], and what they are padded to for their shift."""
    return 2 * HEADS * frames * (2 * frames - 1) * 4 / 2**30


def fits(minutes: float) -> bool:
    """Whether the original leaves a gibibyte of the machine's memory for the rest."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return needed(round(minutes * FRAMES)) < there - 1


def encoder() -> Any:
    """One layer of its configuration's default size."""
    torch.manual_seed(0)
    config = ParakeetEncoderConfig(num_hidden_layers=1, hidden_size=WIDTH, num_attention_heads=HEADS)
    config._attn_implementation = "sdpa"
    return ParakeetEncoder(config).eval()


def in_pieces(
    subsampling: Callable[[Tensor], Tensor], features: Tensor, attention_mask: Tensor | None = None, size: int = 500
) -> Tensor:
    """The subsampling of features [B, T, mels] without padding: the same, `size` frames at a time.

    Each of its convolutions looks one step back: a piece begins a frame early, which is dropped.
    """
    if attention_mask is not None:
        raise ValueError("attention_mask: only None is accepted, recordings without padding")
    length = -(-features.size(1) // STRIDE)
    pieces = (features[:, STRIDE * max(n - 1, 0) : STRIDE * (n + size)] for n in range(0, length, size))
    return torch.cat([subsampling(piece)[:, int(n > 0) :] for n, piece in enumerate(pieces)], 1)


def prepared(way: str) -> Callable[[Tensor], Tensor]:
    """What runs the layer, or the subsampling; compared with the original on a few frames."""
    model = encoder()
    layer, whole = model.layers[0], model.subsampling
    if way == "subsampling":
        features = torch.randn(1, 1001, 80)
        torch.testing.assert_close(in_pieces(whole, features, size=50), whole(features), rtol=1e-4, atol=1e-5)
        return lambda features: in_pieces(whole, features)

    def run(frames: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = layer(frames, attention_mask=mask, position_embeddings=model.encode_positions(frames))
        return out

    few, at = torch.randn(1, 2 * sum(WINDOW), WIDTH), torch.arange(2 * sum(WINDOW))
    behind = at.unsqueeze(1) - at
    seen = (behind <= WINDOW[0]) & (behind >= -WINDOW[1])
    expected = run(few, seen[None, None] if way == "window" else None)
    if way != "original":
        accelerate(model, strict=True, window=WINDOW if way == "window" else None)
        torch.testing.assert_close(run(few), expected, rtol=1e-3, atol=1e-3)
    return run


def peak() -> float:
    """Return the most memory that this process has had, in MiB."""
    try:
        # Not ru_maxrss: there a new process starts with the peak of the one that started it.
        return float(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) / 2**10
    except FileNotFoundError:  # macOS, where ru_maxrss counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@torch.no_grad()
def case(way: str, minutes: float) -> dict[str, float]:
    """Seconds of the layer (or of the subsampling), and GiB of this process at most."""
    frames = round(minutes * FRAMES)
    work = prepared(way)
    x = torch.randn(1, frames * STRIDE, 80) if way == "subsampling" else torch.randn(1, frames, WIDTH)
    times: list[float] = []
    while len(times) < 3 and sum(times) < 10:
        began = time.perf_counter()
        work(x)
        times.append(time.perf_counter() - began)
    return {"seconds": statistics.median(times), "gib": peak() / 2**10}


def draw(found: Found, minutes: Sequence[float], path: Path) -> None:
    """Time and memory against minutes; what the original would need, dashed."""
    from txl.pictures import BLUE, OTHERS, RED, new_figure, save

    looks = {"original": (BLUE, "s"), "accelerated": (RED, "o"), "window": (OTHERS[1], "^")}
    figure = new_figure(10.0, 4.2)
    panels = (("seconds", "s", "time of one layer, seconds"), ("gib", "GiB", "peak memory, GiB"))
    for n, (key, unit, title) in enumerate(panels):
        axes = figure.add_subplot(1, 2, n + 1)
        ends: dict[tuple[float, float], str] = {}
        for way, (color, marker) in looks.items():
            points = sorted((float(m), x[key]) for m, x in found[way].items())
            if points:
                axes.plot(*zip(*points, strict=True), color=color, marker=marker, label=NAMES[way])
                ends |= {points[-1]: f"{points[-1][1]:.3g} {unit}"}
            longer = [m for m in sorted(minutes) if way == "original" and not fits(m)]
            if key == "gib" and longer:
                would = [*points[-1:], *((m, needed(round(m * FRAMES))) for m in longer)]
                axes.plot(*zip(*would, strict=True), color=color, linestyle="--", label="transformers, would need")
                ends |= {would[-1]: f"{would[-1][1]:.0f} {unit}"}
        placed: list[float] = []  # lines that end together have one label
        for (x, y), text in ends.items():
            if all(abs(y / other - 1) > 0.2 for other in placed):
                axes.annotate(text, (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
                placed.append(y)
        axes.set(
            title=title,
            xlabel="minutes of audio",
            xscale="log",
            yscale="log",
            xlim=(min(minutes) / 1.2, max(minutes) * 1.6),
        )
        axes.set_xticks(minutes, [f"{m:g}" for m in minutes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left")
    figure.suptitle(f"A layer of Parakeet's size, forward: B1 H{HEADS} D{WIDTH // HEADS}, float32", fontsize=10)
    save(figure, path)


def main(out: Path, minutes: Sequence[float] = (5, 10, 30, 60)) -> Found:
    found: Found = {way: {} for way in WAYS}
    for m in minutes:
        for way in WAYS:
            if way == "original" and not fits(m):
                print(f"{m:g} minutes, original: would need {needed(round(m * FRAMES)):.0f} GiB", flush=True)
                continue
            command = [sys.executable, __file__, "--case", way, "--minutes", f"{m:g}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"{m:g} minutes, {way}: exit status {done.returncode} (-9: the memory was not enough)")
            x = found[way][f"{m:g}"] = json.loads(done.stdout.splitlines()[-1])
            (out / "hour_of_audio.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            layers = f" ({LAYERS} layers: {LAYERS * x['seconds'] / 60:.2g} minutes)" if way != "subsampling" else ""
            print(f"{m:g} minutes, {way}: {x['seconds']:.3g} s{layers}, {x['gib']:.3g} GiB", flush=True)
    draw(found, minutes, out / "hour_of_audio.png")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(), help="where results go")
    parser.add_argument("--minutes", type=float, nargs="+", default=[5, 10, 30, 60])
    parser.add_argument("--case", choices=WAYS, help="only this, printed as JSON")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(case(given.case, given.minutes[0])))
    else:
        main(given.out, given.minutes)
