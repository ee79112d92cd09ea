"""`txl generate`: a text goes on."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from txl.commands import presets, side_by_side
from txl.commands.continuing import Source, check_detokenised, continue_corpus, continue_prompt
from txl.commands.options import Checkpoint, Device, in_panel, pick_device
from txl.commands.presets import Settings
from txl.errors import TxlError
from txl.language_model import load

_TEXT, _SAMPLING, _READING, _PRESET = "Text", "Sampling", "How it is read", "As published"


def generate_command(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str | None, in_panel(_TEXT, help="Text to continue; @FILE reads it from a file. Default: the start of a text.")
    ] = None,
    count: Annotated[int | None, in_panel(_TEXT, help="Tokens to generate: bytes, or words. Default: 500.")] = None,
    stop: Annotated[
        list[str] | None, in_panel(_TEXT, help="End before this text, as in the tokens; may be repeated.")
    ] = None,
    as_text: Annotated[
        bool | None,
        in_panel(
            _TEXT,
            "--detokenise/--as-tokenised",
            help="Undo the tokenisation of WikiText, a line at a time. Default: with --preset only.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        in_panel(_SAMPLING, help="0 takes the likeliest token; 1 samples as the model predicts. Default: 0.8."),
    ] = None,
    top_k: Annotated[
        int | None, in_panel(_SAMPLING, help="Draw from the k likeliest; 0: from all. Default: 0.")
    ] = None,
    top_p: Annotated[
        float | None, in_panel(_SAMPLING, help="Draw from the likeliest that sum to p. Default: 1.")
    ] = None,
    seed: Annotated[
        int | None,
        in_panel(_SAMPLING, min=0, max=2**63 - 1, help="Repeatable output. Default: another text each time."),
    ] = None,
    attn_len: Annotated[int | None, in_panel(_READING, help="Keys a token sees. Default: as in training.")] = None,
    clamp_len: Annotated[
        int | None, in_panel(_READING, help="Largest distance told apart. Default: as in training.")
    ] = None,
    zeros: Annotated[
        bool | None,
        in_panel(
            _READING,
            "--zeros/--empty",
            help="What precedes a text: zero states, attended, or nothing. Default: as in training.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        in_panel(
            _PRESET,
            help="paper: continue a text of a corpus, and show what followed, by --top-k 40 --temperature 1 "
            "--attn-len 1601 --clamp-len 1000 --zeros; any of them that is given is taken instead.",
        ),
    ] = None,
    source: Annotated[Path | None, in_panel(_PRESET, "--data", help="A prepared corpus. Default: the run's.")] = None,
    split: Annotated[str | None, in_panel(_PRESET, help="train, valid or test. Default: test.")] = None,
    context: Annotated[int | None, in_panel(_PRESET, help="Tokens to continue. Default: 512.")] = None,
    samples: Annotated[int | None, in_panel(_PRESET, help="Texts, of seeds from --seed on. Default: 1.")] = None,
    out: Annotated[Path | None, in_panel(_PRESET, help="A JSON file for texts, settings and speed.")] = None,
    device: Device = "auto",
) -> None:
    """Continue a text.

    With relative positions and recurrence memory and time a token are constant however long it
    gets; otherwise each token reads its window anew.
    """
    for name, number in (("count", count), ("context", context), ("samples", samples)):
        if number is not None and number < 1:
            raise TxlError(f"--{name} must be >= 1, got {number}")
    only = {"data": source, "split": split, "context": context, "samples": samples, "out": out}
    wrong = [f"--{name}" for name, value in only.items() if value is not None]
    if preset is None and wrong:
        raise TxlError(f"{wrong[0]} is for --preset ({', '.join(presets.PRESETS)})")
    if preset is not None and prompt is not None:
        raise TxlError("--prompt cannot be given with --preset, which continues texts of a corpus")
    if out is not None:
        side_by_side.check_place(out)
    usual = presets.USUAL if preset is None else presets.find(preset)
    asked: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = dataclasses.replace(usual.sampling, **{name: x for name, x in asked.items() if x is not None})
    settings = Settings(
        usual.count if count is None else count, sampling, attn_len, clamp_len, zeros, tuple(stop or ())
    )
    saved = load(checkpoint, pick_device(device))
    if as_text:
        check_detokenised(saved)
    if preset is None:
        continue_prompt(saved, prompt, settings, seed, bool(as_text))
        return
    as_text = saved.vocabulary.unit == "words" if as_text is None else as_text
    contexts = Source(source, split or "test", context, samples or 1)
    continue_corpus(saved, preset, contexts, settings, seed, as_text, out)
