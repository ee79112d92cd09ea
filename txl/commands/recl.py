"""`txl recl`: relative effective context lengths of a group of models."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from txl.commands.evaluate import split_of
from txl.commands.measuring import losses_of
from txl.commands.options import Device, console, in_panel, say
from txl.commands.processes import Devices, processes, start_processes
from txl.distributed.reading import agree_on_reading
from txl.errors import TxlError
from txl.language_model import LanguageModel, load
from txl.model.transformer import TransformerXL
from txl.paths import make_folder, replace_text
from txl.pictures import missing
from txl.recl.figures import draw_gains, draw_perplexity
from txl.recl.networks import NetworkLosses
from txl.recl.positions import Plan
from txl.recl.result import GroupResult, group_result

_TEXT, _MEASURING = "What is measured", "How"


def recl_command(
    runs: Annotated[
        list[Path], typer.Argument(help="The group: run folders (their best checkpoints) or .safetensors files.")
    ],
    source: Annotated[
        Path | None,
        in_panel(
            _TEXT, "--data", help="A prepared corpus, or a text file. Default: the first run's.", show_default=False
        ),
    ] = None,
    split: Annotated[str, in_panel(_TEXT, help="train, valid or test, of a corpus.")] = "test",
    samples: Annotated[int, in_panel(_TEXT, help="Positions, the same for all models.")] = 2000,
    step: Annotated[int, in_panel(_MEASURING, help="Tokens of the first context, and of each step.")] = 100,
    contexts: Annotated[int, in_panel(_MEASURING, help="Contexts: step, 2 step, ..")] = 10,
    ratio: Annotated[
        str, in_panel(_MEASURING, help="Shares r of the positions, those hardest from a short context.")
    ] = "0.1,0.5,1",
    attn_len: Annotated[
        int | None, in_panel(_MEASURING, help="Keys a token sees. Default: all of its context.", show_default=False)
    ] = None,
    clamp_len: Annotated[
        int | None, in_panel(_MEASURING, help="Largest distance told apart. Default: the model's.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result. Default: recl in the first run's.", show_default=False)
    ] = None,
    device: Device = "auto",
    devices: Devices = None,
) -> None:
    """How far back models make use of a text: the paper's RECL, figures 3 and 4.

    Every prediction is made from exactly so many tokens and an empty state. Started again, the
    command goes on where it was interrupted, with however many processes.
    """
    if devices is not None:
        start_processes(devices, device)
        return
    with processes(device) as (world, where):
        with world.together():
            ratios = _ratios(ratio)
            group = _group([load(path, where) for path in runs], runs)
            first = next(iter(group.values()))
            tokens = split_of(first, source, split)
            plan = Plan(len(tokens), samples, step, contexts)
            measured = _readings(group, step, attn_len, clamp_len)
            folder = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "recl"
            if world.first:
                make_folder(folder, "--out")
        digests = {name: model.digest for name, model in group.items()}
        options = {"--samples": samples, "--step": step, "--contexts": contexts, "--attn-len": attn_len}
        agree_on_reading(world, digests, tokens, options | {"--clamp-len": clamp_len})
        positions = len(plan.positions())
        if positions < samples:
            say(f"the text has {positions:,} positions after a context of {plan.longest:,}; all are taken")
        losses, seconds = {}, {}
        for name, each in measured.items():
            began = time.perf_counter()
            losses[name] = losses_of(name, each, tokens, plan, folder, world).values
            seconds[name] = time.perf_counter() - began
        with world.together():
            if world.first:
                result = group_result(losses, plan, ratios, {name: each.limit for name, each in measured.items()})
                settings = {
                    "models": {name: str(model.path) for name, model in group.items()}, "samples": samples, "step": step,
                    "checkpoints": digests, "attn_len": attn_len, "clamp_len": clamp_len, "seconds": seconds,
                }  # fmt: skip
                _write(folder, settings, result)


def _write(folder: Path, settings: dict[str, Any], result: GroupResult) -> None:
    """Files, table and figures."""
    replace_text(folder / "recl.json", json.dumps(settings | result.to_json(), indent=2) + "\n")
    replace_text(folder / "recl.csv", result.to_csv())
    _print(result)
    reason = missing()
    if reason is None:
        draw_gains(result, folder / "figure-3.png")
        draw_perplexity(result, folder / "figure-4.png")
    else:
        say(f"the figures were left out: {reason}")
    say(f"in {folder}: recl.json, recl.csv{'' if reason else ', figure-3.png, figure-4.png'}")


def _ratios(text: str) -> list[float]:
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        raise TxlError(f"--ratio takes numbers separated by commas, got {text!r}") from None
    if not all(0 < r <= 1 for r in ratios):
        raise TxlError(f"--ratio must be in (0, 1], got {text}")
    return ratios


def _group(models: list[LanguageModel], paths: list[Path]) -> dict[str, LanguageModel]:
    """By the names of their folders or files, or whole paths where two are alike."""
    for model in models[1:]:
        if model.vocabulary != models[0].vocabulary:
            raise TxlError(f"{model.path}: its vocabulary is not that of {models[0].path}; a group needs one")
    files = [model.path.resolve() for model in models]
    if len(set(files)) < len(files):
        raise TxlError("a model is given twice: " + ", ".join(sorted({str(f) for f in files if files.count(f) > 1})))
    names = [path.resolve().name.removesuffix(".safetensors") for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return dict(zip(names, models, strict=True))


def _readings(
    group: dict[str, LanguageModel], step: int, attn_len: int | None, clamp_len: int | None
) -> dict[str, NetworkLosses]:
    """How each model is read.

    Raises:
        TxlError: an option is taken by no model of the group or is out of range, or a model cannot
            read the first context.
    """
    for name, value in (("--attn-len", attn_len), ("--clamp-len", clamp_len)):
        if value is not None and value < 1:
            raise TxlError(f"{name} must be >= 1, got {value}")
    if attn_len is not None and not any(map(_attends, group.values())):
        raise TxlError("--attn-len is for Transformers, and there is none in the group")
    if clamp_len is not None and not any(map(_clamps, group.values())):
        raise TxlError("--clamp-len is for models of encoding 'relative', and there is none in the group")
    measured = {
        name: NetworkLosses(model, attn_len if _attends(model) else None, clamp_len if _clamps(model) else None)
        for name, model in group.items()
    }
    for name, each in measured.items():
        if each.limit is not None and each.limit < step:
            raise TxlError(
                f"{name}: contexts begin at {step} tokens, beyond the {each.limit} that its absolute positions reach; "
                f"--step must be at most {each.limit}"
            )
    return measured


def _attends(model: LanguageModel) -> bool:
    return isinstance(model.model, TransformerXL)


def _clamps(model: LanguageModel) -> bool:
    return getattr(model.model.config, "encoding", None) == "relative"


def _print(result: GroupResult) -> None:
    table = Table(
        "model", *[f"r = {r:g}" for r in result.effective], "ppl, shortest", "ppl, longest",
        title=f"RECL in tokens, {result.positions:,} positions, contexts to {result.contexts[-1]:,}",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in result.perplexity.items():
        found = [group[name] for group in result.effective.values()]
        lengths = [("at least " if each.reached_end else "") + f"{each.length:,}" for each in found]
        table.add_row(Text(name), *lengths, f"{values[0]:.3f}", f"{values[-1]:.3f}")
    console.print(table)
