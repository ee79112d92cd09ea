"""`txl sweep`: the rows of an ablation of the paper, trained and scored under one ledger."""

import math
import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from txl.commands.console import tell
from txl.commands.options import in_panel, pick_device
from txl.commands.processes import processes
from txl.distributed.join import local_device
from txl.distributed.world import World
from txl.errors import TxlError
from txl.sweeps import scales, sweep, tables
from txl.training.trainer import Interrupted

_ROW, _RUNNING = "Each row", "How they are run"


def sweep_command(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="table6, table7 or table10 of the paper.")],
    run: Annotated[Path, typer.Option("--run", "-r", help="Folder of the sweep: a run a row, the ledger, the table.")],
    source: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="A prepared corpus, or a text, which becomes words (at scale paper: what the recipes take). Default: the "
            "sweep's own; where it begins the standard library.",
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="paper: the recipes as they are. small: a few minutes a row on two cores. tiny: a second a row, to try the "
            "command.",
        ),
    ] = "small",
    minutes: Annotated[
        float | None,
        in_panel(_ROW, help="Train about so long: sets --steps by a short trial.", show_default=False),
    ] = None,
    steps: Annotated[int | None, in_panel(_ROW, help="Updates; default: the scale's.", show_default=False)] = None,
    eval_tokens: Annotated[
        int | None,
        in_panel(
            _ROW,
            help="Tokens scored at each attention length; 0: the whole split. Default: the scale's.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[str, in_panel(_RUNNING, help="Only these, separated by commas.", show_default=False)] = "",
    devices: Annotated[str, in_panel(_RUNNING, help="A row at a time on each, as cuda:0,cuda:1 or cpu,cpu.")] = "auto",
) -> None:
    """Train and score the rows of the paper's Table 6, 7 or 10.

    After Ctrl-C, an error or a crash the same command goes on where it was.
    """
    with processes("cpu") as (world, _):
        with world.together():
            wanted = tables.find(table)
            scales.find(scale)
            chosen = wanted.chosen(rows)
            if minutes is not None and (steps is not None or not 0 < minutes < math.inf):
                also = "" if steps is None else f" and --steps {steps}"
                raise TxlError(f"--minutes must be > 0 and finite, and without --steps, got {minutes:g}{also}")
            for name, value, least in (("steps", steps, 1), ("eval-tokens", eval_tokens, 0)):
                if value is not None and value < least:
                    raise TxlError(f"--{name} must be >= {least}, got {value}")
            where = _devices(devices, world)
        settings = {"scale": scale, "minutes": minutes, "steps": steps, "eval_tokens": eval_tokens}
        try:
            sweep.run(run, wanted, chosen, source, settings, where, world)
        except (Interrupted, KeyboardInterrupt) as end:
            if world.size > 1:
                if world.first and isinstance(end, Interrupted):
                    tell("interrupted; the same command goes on, with any number of processes")
                raise
            tell(f"interrupted; go on with: {shlex.join(['txl', *sys.argv[1:]])}")
            raise Interrupted from None


def _devices(names: str, world: World) -> list[torch.device]:
    if world.size > 1 and "," in names:
        raise TxlError(f"--devices must be one where torchrun gives each process its rows, got {names!r}")
    try:
        return [
            pick_device(local_device(name.strip()) if world.size > 1 else name.strip()) for name in names.split(",")
        ]
    except TxlError as error:
        raise TxlError(
            f"--devices takes auto, cpu, cuda or cuda:N, several separated by commas, got {names!r}: {error}"
        ) from error
