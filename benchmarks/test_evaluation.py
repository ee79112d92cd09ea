"""Evaluation speed (paper, section 4.5 and Table 9) and generation with whole models, batch 1, memory full.

The vanilla model of Al-Rfou et al. slides its window one token at a time: one prediction a forward pass. Transformer-XL
reads whole segments; every token sees exactly as many keys as the vanilla model's window holds.
"""

import functools
from typing import Any

import models
import torch
from machine import Machine
from models import EVALUATORS
from race import Entry, Race, races
from records import PAPER
from torch import Tensor

from txl import ModelConfig, TransformerXL

ATTENTION_LENGTHS = tuple(PAPER)
OURS, ORIGINAL, HUGGING_FACE = EVALUATORS
VANILLA = {
    "vanilla, eager as published": "eager",
    "vanilla, flash SDPA": "flash",
    "vanilla, flash SDPA, compiled": "compiled",
    "vanilla, compiled, last layer for one token": "last",
}
SEGMENT, LONG_SEGMENT = 128, 512


@functools.lru_cache(1)
def built(config: ModelConfig, machine: Machine) -> TransformerXL:
    torch.manual_seed(0)
    return TransformerXL(config).to(machine.device, machine.dtype).eval()


def text(machine: Machine, length: int) -> Tensor:
    return torch.randint(204, (1, length), generator=torch.Generator().manual_seed(0)).to(machine.device)


def evaluator(
    name: str, config: ModelConfig, machine: Machine, attn_len: int, segment: int, calls: int = 1, warm_up: bool = True
) -> Entry:
    """`calls` segments in a row."""
    make = EVALUATORS[name]
    model = built(config, machine)
    evaluate = make(model, 1, attn_len, segment)
    evaluate.remember(torch.randn(1, attn_len, config.d_model).to(machine.device, machine.dtype))
    tokens = text(machine, segment)

    def run() -> None:
        for _ in range(calls):
            evaluate(tokens)

    check = functools.partial(models.check_evaluator, make, machine.dtype, machine.device)
    return Entry(run, check, per=segment * calls, warm_up=warm_up)


def vanilla(name: str, config: ModelConfig, machine: Machine, attn_len: int) -> Entry:
    how = VANILLA[name]
    predict = models.vanilla(built(config, machine), how)
    window = text(machine, attn_len)
    slow = machine.kind == "cpu" and attn_len > 800 and how in ("eager", "flash")  # seconds, and nothing to compile
    check = functools.partial(models.check_vanilla, how, machine.dtype, machine.device)
    seconds_long = machine.kind == "cpu" and attn_len > 1800 and how == "eager"
    most, extra = 2 if seconds_long else None, {"paper_speedup": PAPER[attn_len]}
    return Entry(lambda: predict(window), check, warm_up=not slow, most=most, extra=extra)


def table_9(machine: Machine, full: bool) -> list[Race]:
    if machine.kind == "rehearsal" or not machine.backends:
        return []
    configs = {"enwik8-base, 12 layers": models.ENWIK8_BASE}
    if full:
        configs["enwik8-large, 24 layers"] = models.ENWIK8_LARGE
    found = []
    for label, config in configs.items():
        for attn_len in ATTENTION_LENGTHS:
            size = (config, machine, attn_len)
            runs = {f"{OURS}, segments of {SEGMENT}": functools.partial(evaluator, OURS, *size, SEGMENT)}
            runs[f"{OURS}, segments of {LONG_SEGMENT}"] = functools.partial(evaluator, OURS, *size, LONG_SEGMENT)
            runs[f"{ORIGINAL}, segments of {SEGMENT}"] = functools.partial(evaluator, ORIGINAL, *size, SEGMENT)
            if full or attn_len == max(ATTENTION_LENGTHS):
                runs[f"{HUGGING_FACE}, segments of {SEGMENT}"] = functools.partial(
                    evaluator, HUGGING_FACE, *size, SEGMENT
                )
            if full:
                runs[f"{ORIGINAL}, segments of {LONG_SEGMENT}"] = functools.partial(
                    evaluator, ORIGINAL, *size, LONG_SEGMENT
                )
            for name, how in VANILLA.items():
                if how == "compiled" and not full and attn_len not in (min(ATTENTION_LENGTHS), max(ATTENTION_LENGTHS)):
                    continue  # the strongest, which is compiled too, is measured everywhere
                runs[name] = functools.partial(vanilla, name, *size)
            case = f"{label}, attention length {attn_len}, one token"
            found.append(Race("evaluation speed", case, runs, clock="wall", seconds=6, least=3, most=30))
    return found


@races(table_9)
def test_table_9(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)


def generation(machine: Machine, full: bool) -> list[Race]:
    """One token a call."""
    if machine.kind == "rehearsal" or not machine.backends:
        return []
    config, found = models.ENWIK8_BASE, []
    for attn_len in (512, 3800):
        runs = {OURS: functools.partial(evaluator, OURS, config, machine, attn_len, 1, 20)}
        for name in (ORIGINAL, HUGGING_FACE):
            runs[name] = functools.partial(evaluator, name, config, machine, attn_len, 1)
        case = f"enwik8-base, 12 layers, attention length {attn_len}, one token"
        found.append(Race("generation", case, runs, clock="wall", seconds=10, least=3, most=30))
    return found


@races(generation)
def test_generation(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)
