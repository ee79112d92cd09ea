"""Evaluation speed (paper, section 4.5 and Table 9) and generation with whole models, with batch 1
and a full memory.

The vanilla model of Al-Rfou et al. moves its window by one token, so each prediction takes a
forward pass over the window. Transformer-XL reads whole segments; every token sees as many keys as
the vanilla model's window has.
"""

import functools

import torch

from harness.case import SPEED_UP, Case
from harness.comparison import Comparison, Entry, Implementation, comparisons
from harness.limits import arithmetic
from harness.machine import Machine
from implementations.evaluators import (
    EVALUATORS,
    ORIGINAL,
    OURS,
    OURS_EAGER,
    VANILLA,
    check_evaluator,
    check_vanilla,
    operations,
    vanilla,
    vanilla_operations,
)
from implementations.models import ENWIK8_BASE, ENWIK8_LARGE, text
from txl import ModelConfig, TransformerXL, graphs

ATTENTION_LENGTHS = tuple(SPEED_UP)
SEGMENT, LONG_SEGMENT = 128, 512


@functools.lru_cache(1)
def built(config: ModelConfig, machine: Machine) -> TransformerXL:
    torch.manual_seed(0)
    return TransformerXL(config).to(machine.device, machine.dtype).eval()


def evaluator(
    algorithm: str, config: ModelConfig, machine: Machine, attn_len: int, segment: int, calls: int = 1, batch: int = 1
) -> Entry:
    """Make an entry that evaluates `calls` segments in succession, of `batch` parallel texts."""
    make = EVALUATORS[algorithm].make
    evaluate = make(built(config, machine), batch, attn_len, segment)
    evaluate.remember(torch.randn(batch, attn_len, config.d_model).to(machine.device, machine.dtype))
    tokens = text(batch, segment, machine.device)
    if machine.kind == "cuda":
        for _ in range(graphs.WARM_UP + 4):  # until both graphs are captured
            evaluate(tokens)

    def run() -> None:
        for _ in range(calls):
            evaluate(tokens)

    check = functools.partial(check_evaluator, make, machine.dtype, machine.device)
    tokens_read = batch * segment * calls
    return Entry(run, check, per=tokens_read, operations=tokens_read * operations(config, attn_len))


def window(algorithm: str, config: ModelConfig, machine: Machine, attn_len: int) -> Entry:
    """Make an entry that predicts one token with the vanilla model."""
    predict = vanilla(built(config, machine), algorithm)
    tokens = text(1, attn_len, machine.device)
    slow = machine.kind == "cpu" and attn_len > 800 and algorithm != "vanilla-last"  # seconds, and nothing is compiled
    check = functools.partial(check_vanilla, algorithm, machine.dtype, machine.device)
    maximum = 2 if machine.kind == "cpu" and attn_len > 1800 and algorithm == "vanilla-eager" else None
    work = vanilla_operations(config, algorithm, attn_len)
    return Entry(lambda: predict(tokens), check, operations=work, warm_up=not slow, maximum=maximum)


@comparisons("cpu", "cuda")
def test_table_9(machine: Machine, full: bool) -> list[Comparison]:
    on_gpu = machine.kind == "cuda"
    configs = {"enwik8-base": ENWIK8_BASE} | ({"enwik8-large": ENWIK8_LARGE} if full or on_gpu else {})
    all_lengths = (min(ATTENTION_LENGTHS),) if machine.brief else ATTENTION_LENGTHS  # the code is the same for each
    longest = max(all_lengths)
    found = []
    for model, config in configs.items():
        lengths = all_lengths if full or config is ENWIK8_BASE else (longest,)
        # Lengths for which "vanilla-last" is compiled, which takes a minute each on a GPU; there a
        # graph of the layers stands for it.
        compiled = () if on_gpu else lengths
        for attn_len in sorted(lengths, reverse=on_gpu):  # the longest first, as a GPU may be borrowed
            size = (config, machine, attn_len)
            chosen = [(OURS, SEGMENT), (OURS, LONG_SEGMENT), (ORIGINAL, SEGMENT)]
            chosen += [(OURS, 2048), (OURS_EAGER, SEGMENT), (OURS_EAGER, LONG_SEGMENT)] * on_gpu
            chosen += [(ORIGINAL, LONG_SEGMENT)] if full else []
            runs = []
            for algorithm, segment in chosen:
                name, role, _ = EVALUATORS[algorithm]
                prepare = functools.partial(evaluator, algorithm, *size, segment)
                title = f"{name}, segments of {segment}"
                runs.append(Implementation(title, prepare, role, segment=segment))
            if on_gpu:
                prepare = functools.partial(evaluator, OURS, *size, LONG_SEGMENT, batch=8)
                title = f"{EVALUATORS[OURS].name}, 8 streams, segments of {LONG_SEGMENT}"
                runs.append(Implementation(title, prepare, "part", segment=LONG_SEGMENT))
            for algorithm, name in VANILLA.items():
                if algorithm.endswith("-graph") and not on_gpu:
                    continue
                if full or algorithm != "vanilla-last" or attn_len in compiled:
                    runs.append(Implementation(name, functools.partial(window, algorithm, *size)))
            case = Case(unit="token", model=model, layers=config.n_layer, attn_len=attn_len)
            runs.append(arithmetic(machine))
            found.append(Comparison("evaluation speed", case, runs, clock="wall", seconds=6, minimum=3, maximum=30))
    return found


@comparisons("cpu", "cuda")
def test_generation(machine: Machine, full: bool) -> list[Comparison]:
    """Generation of one token a call."""
    config, found = ENWIK8_BASE, []
    for attn_len in (512, 1601, 3800):  # 1,601 is the length in the authors' sampling script
        runs = []
        for algorithm, (name, role, _) in EVALUATORS.items():
            if algorithm == OURS_EAGER and machine.kind != "cuda":
                continue
            calls = 20 if algorithm == OURS else 1
            prepare = functools.partial(evaluator, algorithm, config, machine, attn_len, 1, calls)
            runs.append(Implementation(name, prepare, role, segment=1))
        case = Case(unit="token", model="enwik8-base", layers=config.n_layer, attn_len=attn_len)
        found.append(Comparison("generation", case, runs, clock="wall", seconds=10, minimum=3, maximum=30))
    return found
