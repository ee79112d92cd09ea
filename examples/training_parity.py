"""A small Conformer with CTC trained on real speech, padded, as it is and accelerated: the same
losses?

pip install "transformers>=5.23" "txl-kernels[plots]"; apt install pocketsphinx-testdata
python examples/training_parity.py /usr/share/pocketsphinx/test/data/librivox

Five sentences of a LibriVox recording in one batch, a model of transformers' Parakeet (3 layers, 96
wide) from the same weights, 300 steps, float32 and bfloat16 (autocast), three seeds. So few clips
are learned by heart: that shows equality and stability, not quality. Nothing is dropped, as the two
draw other random numbers. Training enlarges what rounding leaves: how much, a third run says, the
original again from weights whose last bit is another. Writes training_parity.json and
training_parity.png to the folder of --out.
"""

import argparse
import json
import re
import sys
import wave
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from transformers import ParakeetCTCConfig, ParakeetForCTC
except ImportError as error:
    sys.exit(f'{error}: pip install "transformers>=5.23"')

from txl_kernels.integrations import accelerate

LETTERS = " 'abcdefghijklmnopqrstuvwxyz"
RATE, WINDOW, HOP, MELS = 16_000, 400, 160, 80
WAYS = ("original", "accelerated", "nudged")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def clips(folder: Path) -> list[tuple[Tensor, str]]:
    """Samples and words of each recording."""
    lines = (folder / "transcription").read_text(encoding="utf-8").splitlines()
    said = dict(reversed(re.fullmatch(r"<s> (.*) </s> \((.*)\)", line.strip()).groups()) for line in lines)  # type: ignore[union-attr]
    found = []
    for name, words in said.items():
        with wave.open(str(folder / f"{name}.wav")) as file:
            samples = torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16)
        found.append((samples / 32768, words))
    return found


def mel_filters() -> Tensor:
    """[frequencies, MELS], triangles that are equally wide on the mel scale."""
    highest = 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700))
    corners = 700 * (10 ** (torch.linspace(0, 1, MELS + 2) * highest / 2595) - 1)
    at = torch.linspace(0, RATE / 2, WINDOW // 2 + 1).unsqueeze(1)
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    return torch.minimum((at - low) / (middle - low), (high - at) / (high - middle)).clamp(min=0)


def batch(recordings: list[tuple[Tensor, str]]) -> dict[str, Tensor]:
    """Log-mel features [B, T, MELS], a mask of the frames that are real, and letters padded."""
    filters, features, letters = mel_filters(), [], []
    for samples, words in recordings:
        spectrum = torch.stft(samples, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
        mel = (spectrum.abs().square().T @ filters + 1e-6).log()
        features.append((mel - mel.mean(0)) / (mel.std(0) + 1e-5))
        letters.append(torch.tensor([LETTERS.index(letter) for letter in words]))
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(x), dtype=torch.long) for x in features], batch_first=True)
    return {
        "input_features": torch.nn.utils.rnn.pad_sequence(features, batch_first=True),
        "attention_mask": mask,
        "labels": torch.nn.utils.rnn.pad_sequence(letters, batch_first=True, padding_value=len(LETTERS)),
    }


def model(seed: int, width: int, layers: int) -> Any:
    torch.manual_seed(seed)
    nothing = dict.fromkeys(
        ("dropout", "dropout_positions", "layerdrop", "activation_dropout", "attention_dropout"), 0.0
    )
    encoder = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * width,
        "num_mel_bins": MELS, "subsampling_factor": 4, "subsampling_conv_channels": 16, **nothing,
    }  # fmt: skip
    config = ParakeetCTCConfig(vocab_size=len(LETTERS) + 1, pad_token_id=len(LETTERS), encoder_config=encoder)
    return ParakeetForCTC(config).train()


def train(
    seed: int, dtype: torch.dtype, way: str, data: dict[str, Tensor], steps: int, width: int, layers: int
) -> list[float]:
    """The loss of every step."""
    network = model(seed, width, layers)
    if way == "accelerated":
        report = accelerate(network, strict=True)
    elif way == "nudged":
        with torch.no_grad():
            for p in network.parameters():
                p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=1e-3)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = network(**data).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        warm.step()
        losses.append(loss.item())
    if way == "accelerated" and report.fallbacks:
        sys.exit(f"the original answered: {report.fallbacks}")
    return losses


def draw(losses: dict[str, dict[str, dict[str, list[float]]]], path: Path) -> None:
    """Two panels, a dtype each: original lines, and accelerated ones dashed over them."""
    from txl.pictures import new_figure, save

    figure = new_figure(9.0, 3.8)
    for n, dtype in enumerate(DTYPES):
        axes = figure.add_subplot(1, 2, n + 1)
        for color, (seed, lines) in zip(("tab:blue", "tab:orange", "tab:green"), losses[dtype].items(), strict=False):
            axes.plot(
                lines["nudged"], color=color, linewidth=0.6, linestyle=":", label=f"seed {seed}, original, last bits"
            )
            axes.plot(lines["original"], color=color, linewidth=2.5, alpha=0.45, label=f"seed {seed}, original")
            axes.plot(lines["accelerated"], color=color, linewidth=1, linestyle="--", label=f"seed {seed}, accelerated")
        axes.set(title=dtype, xlabel="step", ylabel="CTC loss", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    save(figure, path)


def main(folder: Path, out: Path, steps: int = 300, seeds: int = 3, width: int = 96, layers: int = 3) -> dict[str, Any]:
    data = batch(clips(folder))
    losses: dict[str, dict[str, dict[str, list[float]]]] = {}
    differences: dict[str, dict[str, dict[str, float]]] = {}
    for name, dtype in DTYPES.items():
        losses[name] = {}
        for seed in range(seeds):
            found = {way: train(seed, dtype, way, data, steps, width, layers) for way in WAYS}
            losses[name][str(seed)] = found
            said = differences[f"{name}, seed {seed}"] = {}
            for way in WAYS[1:]:
                off = [abs(a - b) for a, b in zip(found["original"], found[way], strict=True)]
                said[way] = {"greatest": max(off), "at step": off.index(max(off)), "first ten": max(off[:10])}
            print(
                f"{name}, seed {seed}: " + ", ".join(f"{found[way][-1]:.4f} {way}" for way in WAYS) + f"; {said}",
                flush=True,
            )
    record = {"steps": steps, "differences": differences, "losses": losses}
    (out / "training_parity.json").write_text(json.dumps(record), encoding="utf-8")
    draw(losses, out / "training_parity.png")
    return record


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of Debian's pocketsphinx-testdata: .../test/data/librivox")
    parser.add_argument("--out", type=Path, default=Path(), help="where results go")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if not (given.folder / "transcription").is_file():
        sys.exit(f"{given.folder} has no file transcription: apt install pocketsphinx-testdata")
    main(given.folder, given.out, given.steps, given.seeds)
