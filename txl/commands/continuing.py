"""What `txl generate` does: continues a prompt, or texts of a corpus as a preset says."""

import dataclasses
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from txl.commands import presets, samples, side_by_side
from txl.commands.console import EvaluationProgress, tell
from txl.commands.options import console
from txl.commands.presets import Settings
from txl.errors import TxlError
from txl.language_model import LanguageModel
from txl.text import files
from txl.text.detokenise import detokenise


def check_detokenised(saved: LanguageModel) -> None:
    """Raises TxlError if the model's tokens are no words."""
    if saved.vocabulary.unit != "words":
        raise TxlError(f"--detokenise is for models of words; the tokens of {saved.path} are {saved.vocabulary.unit}")


def continue_prompt(
    saved: LanguageModel, prompt: str | None, settings: Settings, seed: int | None, as_text: bool
) -> None:
    """Writes a prompt and what follows as it comes: each token, or detokenised each line."""
    text = None if prompt is None else _prompt(prompt)
    pieces = saved.stream(
        text, settings.count, settings.sampling, attn_len=settings.attn_len, clamp_len=settings.clamp_len,
        zeros=settings.zeros, seed=seed, stop=settings.stop,
    )  # fmt: skip
    shown: Iterable[bytes] = chain([text or b""], pieces)
    if as_text:
        shown = (detokenise(line.decode("utf-8", "replace")).encode() for line in _lines(shown))
    write = sys.stdout.buffer
    for piece in chain(shown, [b"\n"]):
        write.write(piece)
        write.flush()


def _prompt(prompt: str) -> bytes:
    if not prompt.startswith("@"):
        return os.fsencode(prompt)  # the bytes that were typed, UTF-8 or not
    return files.read(prompt[1:])


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, and what is after the last."""
    held = b""
    for piece in pieces:
        *whole, held = (held + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
    yield held


@dataclass(frozen=True)
class Source:
    """Where contexts are taken from; None for the run's corpus, the preset's length."""

    corpus: Path | None
    split: str
    context: int | None
    count: int


def continue_corpus(
    saved: LanguageModel,
    name: str,
    source: Source,
    asked: Settings,
    seed: int | None,
    as_text: bool,
    out: Path | None,
) -> None:
    """Shows contexts of a corpus, continued as the preset says, and what followed them."""
    preset = presets.find(name)
    split = samples.find_split(saved, source.corpus, source.split)
    size, context = len(split.tokens), preset.context if source.context is None else source.context
    if context > size:
        raise TxlError(f"--context must be from 1 to the {size:,} tokens of the {split.name} split, got {context:,}")
    settings, not_applied = presets.fitted(preset, asked, saved)
    if not_applied:
        tell(f"preset {name}: {not_applied}")
    if context + settings.count > size:
        tell(f"the {split.name} split has {size:,} tokens: the reference is {size - context:,}, not {settings.count:,}")
    seed, drawn = secrets.randbits(31) if seed is None else seed, []
    told = {"preset": name, "context": context, "corpus": str(split.corpus), "detokenised": as_text}
    for n in range(source.count):
        with EvaluationProgress(console, f"text {n + 1} of {source.count}", settings.count) as bar:
            sample = samples.draw(saved, split, context, settings, (seed + n) % 2**63, as_text, bar.update)
        drawn.append(sample)
        if out is not None:
            side_by_side.write(out, drawn, told | dataclasses.asdict(settings), saved.path)
        side_by_side.show(sample, console)
    tokens, seconds = sum(s.generated_tokens for s in drawn), sum(s.seconds for s in drawn)
    tell(f"{tokens:,} tokens in {seconds:.1f} s, contexts of {context:,} read: {tokens / seconds:,.1f} tokens/s")
