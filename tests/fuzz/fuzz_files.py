"""Damaged files of runs and corpora: refused in a line, or of no consequence whatever."""

import json
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import commands
import torch

from txl.training import checkpoint as checkpoints

COMMANDS = {
    "eval": ("eval", "{run}", "--attn-len", "8,32"),
    "generate": ("generate", "{run}", "--count", "12", "--seed", "3"),
    "resume": ("train", "--run", "{run}", "--resume", "--steps", "8"),
}
ODD = (None, True, -1, 0, 10**30, 1e999, "", "x", [], {}, [[]], float("nan"))


def prepare(folder: Path) -> None:
    """A run, a corpus, and what commands make of them undamaged."""
    commands.prepare(folder)
    results = {name: _result(name, folder / "run", folder) for name in COMMANDS}
    torch.save(results, folder / "expected.pt")


def attempt(random: Random, folder: Path) -> None:
    files = [x for name in ("run", "corpus") for x in sorted((folder / name).iterdir()) if x.name != ".lock"]
    victim = random.choice(files)
    whole = victim.read_bytes()
    name = random.choice(list(COMMANDS))
    try:
        what = _damage(random, victim, whole)
        try:
            result = _result(name, folder / "run", folder)
        except AssertionError as error:
            raise AssertionError(f"{victim.name}, {what}, then {name}: {error}") from None
        if result is not None:
            expected = torch.load(folder / "expected.pt")[name]
            assert _same(result, expected), f"{victim.name}, {what}, then {name}: another result, and no complaint"
    finally:
        if victim.is_dir():
            shutil.rmtree(victim)
        victim.write_bytes(whole)


def _result(name: str, run: Path, folder: Path) -> Any:
    """What a command came to; None if it refused."""
    copy = folder / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".lock"))
    try:
        done = commands.txl(*(x.replace("{run}", str(copy)) for x in COMMANDS[name]))
        commands.well_behaved(done)
        if done.returncode != 0:
            return None
        if name == "resume":
            return checkpoints.load(copy / "last.safetensors").tensors
        rows = re.findall(r"│([^│]*)│([^│]*)│([^│]*)│[^│]*│", done.stdout)  # but for tokens per second
        return str([[x.strip() for x in row] for row in rows]) if name == "eval" else done.stdout
    finally:
        shutil.rmtree(copy)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, str):
        return bool(a == b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _damage(random: Random, file: Path, whole: bytes) -> str:
    """Does something to a file, and says what."""
    kind = random.choice(
        ("flip", "flip", "cut", "remove", "empty", "append", "zero", "swap", "folder", "text", "json", "json")
    )
    at = random.randrange(max(len(whole), 1))
    if kind == "remove":
        file.unlink()
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "json" and file.suffix in (".json", ".jsonl"):
        file.write_bytes(_odd_json(random, whole))
    else:
        file.write_bytes(_altered(random, kind, whole, at))
    return f"{kind} at {at} of {len(whole)}"


def _altered(random: Random, kind: str, whole: bytes, at: int) -> bytes:
    if kind in ("flip", "json"):
        return whole[:at] + bytes([whole[at] ^ 1 << random.randrange(8)]) + whole[at + 1 :] if whole else b"x"
    if kind == "cut":
        return whole[:at]
    if kind == "append":
        return whole + random.randbytes(random.choice((1, 8, 1000)))
    if kind == "zero":
        return whole[:at] + bytes(len(whole[at : at + 64])) + whole[at + 64 :]
    if kind == "swap":
        return whole[at:] + whole[:at]
    return b"" if kind == "empty" else b"What is this?\n"


def _odd_json(random: Random, whole: bytes) -> bytes:
    """One value somewhere inside replaced, or a key removed."""
    lines = whole.decode().splitlines() if whole.count(b"\n{") else [whole.decode()]
    n = random.randrange(len(lines))
    try:
        value = json.loads(lines[n])
    except ValueError:
        return b"{"
    inside = value
    while isinstance(inside, dict) and inside:
        key = random.choice(list(inside))
        if not isinstance(inside[key], dict) or random.random() < 0.3:
            if random.random() < 0.3:
                del inside[key]
            else:
                inside[key] = random.choice(ODD)
            break
        inside = inside[key]
    lines[n] = json.dumps(value)
    return "\n".join(lines).encode()
