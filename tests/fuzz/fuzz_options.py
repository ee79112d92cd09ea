"""Every option of every command with numbers and texts that nobody should pass."""

import shutil
from pathlib import Path
from random import Random

import commands
import typer

from txl.commands.cli import app

prepare = commands.prepare
INTEGERS = (
    "-1",
    "0",
    "1",
    "2",
    "3",
    "7",
    "17",
    "1000000000",
    "1000000000000000000",
    "-1000000000",
    "9" * 40,
    "1.5",
    "",
)
NUMBERS = ("-1", "0", "1e-320", "1e-46", "0.5", "1", "3e38", "1e308", "1e999", "inf", "-inf", "nan", "x", "", "0x10")
TEXTS = (
    "", "x", "\udcff", "[bold]x[/bold]", "[/nope]", "é\u202e", "a" * 300, "\n", "-", "--", "/dev/null", "/proc/self/mem",
    "0", "1,2", "1,,2", "-3", "9" * 30, "cpu", "cuda:99", "bytes", "words", "relative", "sgd", "{run}", "{corpus}", "{text}",
    "{run}/last.safetensors", "{corpus}/train.bin", "{corpus}/corpus.json", "{new}/a/b", "{text}/x",
)  # fmt: skip
SMALL_ONLY = ("--steps", "--minutes", "--count", "--n-layer", "--accumulate", "--limit")  # large means long
SLOW = ("--compile", "--recipe", "--help")  # minutes each, or ends everything
BASES = {
    "train": ("--run", "{new}", "--data", "{corpus}", *commands.TRAIN),
    "eval": ("{run}",),
    "generate": ("{run}", "--count", "5"),
    "prepare": ("{new}", "--data", "{text}"),
    "recipes": (),
}


def attempt(random: Random, folder: Path) -> None:
    new = folder / "new"
    name = random.choice(list(BASES))
    arguments = list(BASES[name])
    options = [x for x in typer.main.get_command(app).get_command(None, name).params if x.opts[0] not in SLOW]
    for option in random.sample(options, min(len(options), random.choice((1, 1, 2, 3)))):
        flag = random.choice([*option.opts, *option.secondary_opts])
        if not flag.startswith("-"):  # an argument
            arguments[: len(arguments) > 0] = [_text(random)]
        elif getattr(option, "is_flag", False):
            arguments.append(flag)
        else:
            arguments += [flag, _value(random, flag, str(option.type_descriptor.annotation))]
    if random.random() < 0.05:
        arguments.append(_text(random))
    places = {"new": new, "run": folder / "run", "corpus": folder / "corpus", "text": folder / "text.txt"}
    for key, path in places.items():
        arguments = [x.replace("{" + key + "}", str(path)) for x in arguments]
    try:
        commands.well_behaved(commands.txl(name, *arguments))
    except AssertionError as error:
        raise AssertionError(f"txl {name} {' '.join(map(repr, arguments))}\n{error}") from None
    finally:
        if new.is_dir():
            shutil.rmtree(new)
        else:
            new.unlink(missing_ok=True)


def _value(random: Random, flag: str, kind: str) -> str:
    if random.random() < 0.1:
        return _text(random)
    if "float" in kind:
        values = NUMBERS
    elif "int" in kind:
        values = INTEGERS
    else:
        values = TEXTS
    if flag in SMALL_ONLY:
        values = tuple(x for x in values if len(x) < 3)
    return random.choice(values)


def _text(random: Random) -> str:
    return random.choice(TEXTS)
