"""The `txl` command: its subcommands, and the reporting of errors."""

import errno
import importlib
import inspect
import io
import os
import platform
import sys
import tempfile
import traceback
from typing import Annotated, Any

import torch
import typer
import typer.core
import typer.main

import txl_kernels
from txl.commands.console import discard, one_line, tell
from txl.errors import Interrupted, TxlError

COMMANDS = {
    "prepare": (
        "prepare",
        "prepare",
        "Turn text into a corpus of bytes or words, data sets into their standard splits.",
    ),
    "train": (
        "train",
        "train_command",
        "Train a model, or continue a run. Ctrl-C writes a checkpoint and exits with 130.",
    ),
    "eval": ("evaluate", "evaluate_command", "Bits per token, perplexity and speed at each attention length."),
    "recl": ("measure", "recl_command", "How far back models make use of a text (RECL)."),
    "attention": ("measure", "attention_command", "What the heads attend to: figures and a page."),
    "generate": ("generate", "generate_command", "Continue a text."),
    "recipes": ("recipes", "recipes_command", "List the paper's models, or show one with its commands."),
    "import": ("convert", "import_command", "Turn a checkpoint of other code into one of ours."),
    "export": ("convert", "export_command", "Turn a checkpoint of ours into one of transformers."),
    "demo": ("demo", "demo_command", "Train a small model for minutes, see what memory is worth, a sample."),
}
"""Commands: module, function, and what each does, where Python leaves docstrings out (-OO)."""


_TEXTS = ("--prompt", "--stop")  # options that accept an empty value


class _Commands(typer.core.TyperGroup):
    """A group whose commands are imported when they run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raise TxlError for an empty option value, such as from an unset shell variable, since an
        empty path would mean the current folder."""
        for before, given in zip(["", *args], args, strict=False):
            name = before if given == "" else given[:-1] if given.startswith("-") and given.endswith("=") else None
            if name is not None and not {name, before} & set(_TEXTS):
                where = name if name.startswith("-") else "an argument"
                raise TxlError(f"{where} is empty; give it a value, or leave it out")
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in COMMANDS:
            return None
        if name != "train" and os.environ.get("RANK") and os.environ.get("WORLD_SIZE", "1") != "1":
            raise TxlError(f"txl {name} runs in one process; torchrun is for txl train")
        module, function, help_text = COMMANDS[name]
        command = getattr(importlib.import_module(f"txl.commands.{module}"), function)
        alone = typer.Typer(**_STYLE)
        alone.command(name, help=inspect.getdoc(command) or help_text)(command)
        return typer.main.get_command(alone)


_STYLE: dict[str, Any] = {
    "add_completion": False, "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}  # fmt: skip
app = typer.Typer(
    name="txl",
    cls=_Commands,
    help="Transformer-XL language models: prepare a text, train, evaluate, generate. Start with `txl demo`.",
    no_args_is_help=True,
    **_STYLE,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"txl {txl_kernels.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass  # the option's callback does the work; the help text is the app's


_UsageError: Any = typer.BadParameter.__base__  # of the click version that typer uses


def main() -> None:
    """Entry point. A user's error is printed as one line on stderr with exit code 1; Ctrl-C exits
    with 130."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed by the shell, as in `txl generate >&-`
            discard(number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names can hold any bytes
    try:
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
        known = _reason(error)
        if known is None:
            _report_unforeseen(error)
        else:
            tell(one_line(known))
        sys.exit(1)


def _report_unforeseen(error: BaseException) -> None:
    """Print an unexpected error on stderr, with the file to which its traceback was written."""
    text = "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(prefix="txl-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        where = f"the traceback is in {path}"
    except OSError:
        where = "its traceback could not be written"
    summary = " ".join(str(error).split())[:500]
    print(f"error: {type(error).__name__}: {summary or 'no more is known'} ({where})", file=sys.stderr)


def _reason(error: BaseException) -> str | None:
    """Return the message of an error that is expected; None for any other."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return f"standard output: {error.strerror}"  # errors of files have a file name
    return str(error) if isinstance(error, (TxlError, OSError)) else memory_summary(error)


def memory_summary(error: BaseException) -> str | None:
    """Return the message if memory is exhausted, a number overflows or a kernel setting is invalid;
    else None."""
    text = str(error)
    if text.startswith("TXL_KERNELS_"):  # an environment variable with an invalid value
        return text
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return f"there is not enough memory for these sizes ({' '.join(text.split())[:200] or 'MemoryError'})"
    if isinstance(error, OverflowError) or "Storage size calculation overflowed" in text:
        return f"a number is beyond what can be computed with ({' '.join(text.split())[:200]})"
    return None
