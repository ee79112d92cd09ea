"""The `txl` command: its parts, and what becomes of errors."""

import io
import os
import sys
from typing import Any

import typer

from txl.commands.average import average_command
from txl.commands.demo import demo_command
from txl.commands.evaluate import evaluate_command
from txl.commands.generate import generate_command
from txl.commands.prepare import prepare
from txl.commands.recipes import recipes_command
from txl.commands.train import train
from txl.errors import TxlError
from txl.training.trainer import Interrupted

app = typer.Typer(
    name="txl",
    help="Transformer-XL language models: prepare a text, train, evaluate, generate. Start with `txl demo`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(prepare)
app.command()(train)
app.command("eval")(evaluate_command)
app.command("generate")(generate_command)
app.command("recipes")(recipes_command)
app.command("average")(average_command)
app.command("demo")(demo_command)

_UsageError: Any = typer.BadParameter.__base__  # whichever click typer uses


def main() -> None:
    """Entry point: a user's error is one line on stderr and exit code 1; Ctrl-C is 130."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold any bytes
    try:
        app(standalone_mode=False)
    except _UsageError as error:
        error.show()
        sys.exit(error.exit_code)
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output is gone, as in `txl generate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
