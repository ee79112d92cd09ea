"""The `txl` command: its subcommands, and the reporting of errors."""

import inspect
import io
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import typer

import txl_kernels
from txl.commands.console import discard, one_line, reason, tell
from txl.commands.convert import export_command, import_command
from txl.commands.demo import demo_command
from txl.commands.evaluate import evaluate_command
from txl.commands.generate import generate_command
from txl.commands.measure import attention_command, recl_command
from txl.commands.prepare import prepare
from txl.commands.recipes import recipes_command
from txl.commands.train import train_command
from txl.errors import Interrupted, TxlError

COMMANDS: dict[str, Callable[..., None]] = {
    "prepare": prepare, "train": train_command, "eval": evaluate_command, "recl": recl_command,
    "attention": attention_command, "generate": generate_command, "recipes": recipes_command, "import": import_command,
    "export": export_command, "demo": demo_command,
}  # fmt: skip
_TEXTS = ("--prompt", "--stop")  # options that accept an empty value

app = typer.Typer(
    name="txl",
    help="Transformer-XL language models: prepare a text, train, evaluate, generate. Start with `txl demo`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in COMMANDS.items():
    _paragraphs = inspect.getdoc(_command).split("\n\n")  # type: ignore[union-attr]
    # A paragraph is one line, which the terminal wraps.
    app.command(_name, help="\n\n".join(" ".join(x.split()) for x in _paragraphs))(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"txl {txl_kernels.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    several = os.environ.get("RANK") and os.environ.get("WORLD_SIZE", "1") != "1"
    if several and context.invoked_subcommand != "train":
        raise TxlError(f"txl {context.invoked_subcommand} runs in one process; torchrun is for txl train")


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Raise TxlError for an empty option value, such as from an unset shell variable, since an
    empty path would mean the current folder."""
    for before, given in zip(["", *arguments], arguments, strict=False):
        name = before if given == "" else given[:-1] if given.startswith("-") and given.endswith("=") else None
        if name is not None and not {name, before} & set(_TEXTS):
            where = name if name.startswith("-") else "an argument"
            raise TxlError(f"{where} is empty; give it a value, or leave it out")


_UsageError: Any = typer.BadParameter.__base__  # of the click version that typer uses


def main() -> None:
    """Entry point. A user's error is printed as one line on stderr with exit code 1, any other one
    with its traceback; Ctrl-C exits with 130."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed by the shell, as in `txl generate >&-`
            discard(number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names can hold any bytes
    try:
        _refuse_empty(sys.argv[1:])
        if app(standalone_mode=False) == 130:  # newer typers return it; older ones raise Abort
            raise KeyboardInterrupt
    except _UsageError as error:
        error.show()
        sys.exit(error.exit_code)
    except Interrupted:  # has been reported already
        sys.exit(130)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        discard(sys.stdout.fileno())  # as below; click has turned the broken pipe into exit code 1
        sys.exit(0)
    except (KeyboardInterrupt, typer.Abort):
        tell("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has closed it, as in `txl generate | head`
        discard(sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        known = reason(error)
        if known is None:
            raise
        tell(one_line(known))
        sys.exit(1)
