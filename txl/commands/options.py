"""Options shared by the commands: console, device, and a checkpoint argument."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from txl.commands.console import PatientConsole
from txl.errors import TxlError

console = PatientConsole(emoji=False)  # names can hold text such as :smile:


def in_panel(panel: str, *names: str, help: str, show_default: bool = True, **kind: Any) -> Any:
    """Make an option that `--help` shows under the heading `panel`."""
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=show_default, **kind)


Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Checkpoint = Annotated[Path, typer.Argument(help="A run folder (its best checkpoint is taken) or a .safetensors file.")]


def pick_device(name: str) -> torch.device:
    """Return the device of a name; raise TxlError if torch does not know it or it is not
    available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise TxlError(f"device must be cpu, cuda or auto, got {name!r}")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TxlError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def numbers(option: str, text: str) -> list[int]:
    """Parse whole numbers separated by commas; raise TxlError that names the option."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise TxlError(f"{option} takes whole numbers separated by commas, got {text!r}") from None


def say(text: object) -> None:
    """Print a line without interpreting markup, so that file names appear as they are."""
    console.print(str(text), markup=False, highlight=False, soft_wrap=True)
