"""The benchmarks measure nothing that is wrong, and say what failed."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contestants
import models
import pytest
import test_training
import torch
from benchmark_helpers import FakeMachine
from contestants import check, fused
from inputs import Inputs, Shape
from race import Entry, Race, Races, Unavailable
from torch import Tensor

from txl import TransformerXL

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def without_position_bias(x: Inputs) -> Tensor:
    return fused(x | {"position_bias": torch.zeros_like(x["position_bias"])}, "reference")


def shifted_by_one(x: Inputs) -> Tensor:
    return fused(x | {"r": x["r"].roll(1, 1)}, "reference")


def without_memory(x: Inputs) -> Tensor:
    return fused(x | {"k_mem": x["k_mem"][:, :, :0], "v_mem": x["v_mem"][:, :, :0]}, "reference")


def sees_the_future(x: Inputs) -> Tensor:
    return contestants.plain_sdpa(x)


def a_thousandth_off(x: Inputs) -> Tensor:
    return fused(x, "reference") * 1.001


def not_a_number(x: Inputs) -> Tensor:
    return fused(x, "reference") * torch.nan


@pytest.mark.parametrize(
    "wrong",
    [without_position_bias, shifted_by_one, without_memory, sees_the_future, a_thousandth_off, not_a_number],
)
@pytest.mark.parametrize("backward", [False, True])
def test_wrong_values_are_refused(wrong: Callable[[Inputs], Tensor], backward: bool) -> None:
    with pytest.raises(AssertionError, match="out is wrong"):
        check(wrong, backward, torch.float32, CPU)


@pytest.mark.parametrize("name", ["q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem"])
def test_a_wrong_gradient_is_refused(name: str) -> None:
    def wrong(x: Inputs) -> Tensor:
        # The same value with 1.01 times the gradient.
        return fused(x | {name: x[name] * 1.01 - 0.01 * x[name].detach()}, "reference")

    check(wrong, False, torch.float32, CPU)
    with pytest.raises(AssertionError, match=f"gradient of {name} is wrong"):
        check(wrong, True, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [n for n in contestants.OTHERS if n not in (contestants.YARDSTICK, contestants.FLEX)])
def test_the_contestants_are_right(name: str, dtype: torch.dtype) -> None:
    check(contestants.OTHERS[name], True, dtype, CPU)


def wrong_for_one_query(x: Inputs) -> Tensor:
    return fused(x) * (1.001 if x["q"].size(2) == 1 else 1.0)


def test_the_check_takes_the_path_that_is_timed() -> None:
    decode = Shape(1, 8, 1, 3800, 64)
    check(wrong_for_one_query, False, torch.float32, CPU)
    check(fused, False, torch.float32, CPU, decode)
    with pytest.raises(AssertionError, match="out is wrong"):
        check(wrong_for_one_query, False, torch.float32, CPU, decode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_are_right(dtype: torch.dtype) -> None:
    for make in models.EVALUATORS.values():
        try:
            models.check_evaluator(make, dtype, CPU)
        except Unavailable:
            assert make is models.HuggingFaceEvaluator
    for how in ("eager", "flash"):
        models.check_vanilla(how, dtype, CPU)


def test_wrong_models_are_refused() -> None:
    class Forgetful(models.CachedEvaluator):
        def __call__(self, tokens: Tensor) -> Tensor:
            self.reset()
            return super().__call__(tokens)

    models.check_evaluator(models.CachedEvaluator, torch.float32, CPU)
    with pytest.raises(AssertionError, match="logits is wrong"):
        models.check_evaluator(Forgetful, torch.float32, CPU)
    with pytest.raises(AssertionError, match="logits is wrong"):  # one key too many
        models.check_evaluator(
            lambda model, batch, attn_len, segment: models.CachedEvaluator(model, batch, attn_len + 1, segment),
            torch.float32,
            CPU,
        )


def test_a_wrong_training_step_is_refused() -> None:
    def without_memory(model: TransformerXL, batch: int) -> test_training.Trained:
        return model, lambda tokens: model(tokens)[0]

    for name, make in test_training.TRAINED.items():
        try:
            test_training.check(make, CPU)
        except Unavailable:
            assert name.startswith("Hugging Face")
    with pytest.raises(AssertionError, match="wrong"):
        test_training.check(without_memory, CPU)


def test_who_fails_gets_no_time_and_stops_nobody(tmp_path: Path) -> None:
    def raises(error: Exception) -> Any:
        raise error

    late = iter(range(3))

    def dies_later() -> None:
        if next(late) == 2:
            raise MemoryError("no more")

    entries = {
        "right": lambda: Entry(lambda: None, operations=5e9),
        "limit": lambda: Entry(lambda: None, operations=10e9, limit="operations"),
        "wrong": lambda: Entry(lambda: None, functools.partial(raises, AssertionError("out is wrong"))),
        "not installed": lambda: raises(Unavailable("needs it")),
        "cannot run": lambda: Entry(functools.partial(raises, RuntimeError("no kernel"))),
        "dies later": lambda: Entry(dies_later),
    }
    races = Races(FakeMachine(), tmp_path / "record.json", float("inf"))  # type: ignore[arg-type]
    rows = races.of(Race("group", "case", entries, seconds=0, least=5))
    assert rows is not None
    assert list(rows) == list(entries)
    assert rows["right"]["median_ms"] == 250
    assert rows["right"]["rounds"] == 5
    assert rows["right"]["share_of_operations"] == 0.5
    assert rows["wrong"] == {"status": "failed", "error": "AssertionError: out is wrong"}
    assert rows["not installed"] == {"status": "unavailable", "error": "needs it"}
    assert rows["cannot run"]["status"] == rows["dies later"]["status"] == "failed"
    written = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert [(row["contestant"], row["status"]) for row in written] == [(n, row["status"]) for n, row in rows.items()]


WRONG_KERNEL = """
import txl_kernels.native as native

right = native.forward

def forward(call, memo=None, need_lse=True):
    out, lse = right(call, memo, need_lse)
    return out.mul_(1.001), lse

native.forward = forward
"""


def test_a_wrong_kernel_gets_no_time(tmp_path: Path) -> None:
    """The benchmarks as users run them, on a kernel that is a thousandth off."""
    (tmp_path / "wrong_kernel.py").write_text(WRONG_KERNEL)
    record = tmp_path / "record.json"
    command = "-m pytest -p wrong_kernel benchmarks/test_attention.py --benchmark-only -q -p no:cacheprovider --record"
    selected = ["--device", "cpu", "-k", "test_length and L128 and not backward"]
    done = subprocess.run(
        [sys.executable, *command.split(), str(record), *selected], cwd=ROOT, capture_output=True, text=True,
        env={n: x for n, x in os.environ.items() if "XDIST" not in n} | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "1 failed, 5 passed" in done.stdout
    rows = {row["contestant"]: row for row in json.loads(record.read_text())["rows"]}
    wrong = rows.pop("rel_attention, native")
    assert wrong["status"] == "failed"
    assert "out is wrong" in wrong["error"]
    assert not any(key in wrong for key in ("median_ms", "gflops"))
    assert all("median_ms" in row for row in rows.values())
