"""The object that an accelerated module of Zipformer returns in place of attention weights, by its
uses; and calls that the original answers."""

import logging
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from layer_helpers import both, case_of, compare
from torch import Tensor

from implementations.peer_cases import answer
from txl_kernels.integrations import accelerate
from txl_kernels.integrations.adapters.pair_weights import PairWeights, Scores

ASKED = "attention weights asked for"


def masked(case: Any, padding: Tensor | None, hidden: Tensor | None) -> Any:
    encodings = torch.randn(1, 89, 48, generator=torch.Generator().manual_seed(2))
    case.call = lambda f, x: f(x, encodings.to(x.dtype), padding, hidden)
    return case


def test_queries_without_keys() -> None:
    """By padding of a whole row, and by chunks behind which all is padding: equal weights."""
    at = torch.arange(45)
    padding = at >= torch.tensor([45, 9, 0]).unsqueeze(1)
    own = at // 8
    behind = own.unsqueeze(1) - own
    for hidden in (None, (behind < 0) | (behind > 1)):
        case = masked(case_of("zipformer", "none"), padding, hidden)
        values = torch.randn(4, 3, 45, 6)
        weights = case.module.weights
        want = both(case)
        report = accelerate(case.module, strict=True)
        compare(both(case), want, 2e-5)
        mean = torch.matmul(weights(case.x, torch.randn(1, 89, 48), padding, hidden), values)[:, 2]
        torch.testing.assert_close(mean, values[:, 2].mean(1, keepdim=True).expand_as(mean))
        assert not report.fallbacks


def test_wide_values_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for GPUs support values up to some width."""
    case = case_of("zipformer", "right")
    want = both(case)
    accelerate(case.module, strict=True)
    monkeypatch.setattr("txl_kernels.integrations.adapters.pair_weights.max_width", lambda device: 5)
    compare(both(case), want)


FALLBACKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "holes": (lambda case: masked(case, None, (torch.arange(45) % 7 == 3).expand(45, 45)), "a mask with holes"),
    "holes in padding": (lambda case: masked(case, (torch.arange(45) % 7 == 3).expand(3, 45), None), "a mask with holes"),
    "a hook": (lambda case: case.module.weights.register_forward_hook(lambda m, args, out: out * 0.5),
               "a hook on its calls, which may read the weights"),
    "a hook of gradients": (lambda case: case.module.weights.register_full_backward_hook(lambda *args: None),
                            "a hook on its calls, which may read the weights"),
    "dropout": (lambda case: (setattr(case.module.weights, "dropout", 0.5), case.module.train()),
                "dropout of weights that several modules share"),
}  # fmt: skip


@pytest.mark.parametrize("name", FALLBACKS)
def test_original_answers_and_is_counted(name: str) -> None:
    change, reason = FALLBACKS[name]
    case = case_of("zipformer", "none")
    change(case)

    def run() -> Tensor:
        torch.manual_seed(0)
        random.seed(0)
        return answer(case)

    want = run()
    report = accelerate(case.module, strict=True)
    assert torch.equal(run(), want)
    assert report.fallbacks == {reason: 1}


def test_errors_are_the_originals() -> None:
    case = case_of("zipformer", "none")
    weights, encodings = case.module.weights, torch.randn(1, 89, 48)
    calls: list[tuple[Any, type[Exception]]] = [
        ((encodings[:, 1:],), RuntimeError),
        ((encodings, torch.zeros(3, 44).bool()), AssertionError),
        ((encodings, None, torch.zeros(45, 45)), AssertionError),
        ((encodings, None, torch.zeros(44, 44).bool()), RuntimeError),
    ]
    for accelerated in (False, True):
        if accelerated:
            accelerate(case.module, strict=True)
        for arguments, kind in calls:
            with pytest.raises(kind):
                weights(case.x, *arguments)


def test_weights_that_are_read() -> None:
    """Every other use gets the weights, by the original's formula, and is counted."""
    case = case_of("zipformer", "right")
    weights, (x, encodings) = case.module.weights, (case.x, torch.randn(1, 89, 48))
    padding = torch.arange(45) >= torch.tensor([45, 30, 0]).unsqueeze(1)
    with torch.no_grad():
        want = weights(x, encodings, padding)
        report = accelerate(case.module, strict=True)
        found = weights(x, encodings, padding)
    assert isinstance(found, PairWeights)
    assert found.shape == want.shape == found.size()
    assert (found.size(0), found.dim()) == (4, 4)
    assert isinstance(found[1:3], PairWeights)
    assert found[1:3].shape == want[1:3].shape
    assert found.to("cpu") is found
    values = torch.randn(4, 3, 45, 7)
    for product in (torch.matmul(found, values), found @ values, found.matmul(values)):
        torch.testing.assert_close(product, want @ values)
    torch.testing.assert_close(found[1:3] @ values[1:3], want[1:3] @ values[1:3])
    assert not report.fallbacks
    reads: list[Callable[[Any], Tensor]] = [
        lambda w: w > 0.0,
        lambda w: (w[0:1] > 0.0).to(torch.float32),
        lambda w: w * 2,
        lambda w: 2 * w,
        lambda w: 1 - w,
        lambda w: w.sum(-1),
        lambda w: torch.cat([w, w]),
        lambda w: w[0],
        lambda w: w[..., :3],
        lambda w: w.to(torch.float64),
        lambda w: torch.matmul(w, values[0, 0]),
        lambda w: torch.stack(list(w)),
        torch.log1p,
    ]
    for n, read in enumerate(reads, 1):
        with torch.no_grad():
            torch.testing.assert_close(read(weights(x, encodings, padding)), read(want))
        assert report.fallbacks == {ASKED: n}


def test_gradients_of_weights_that_are_read() -> None:
    case = masked(case_of("zipformer", "none"), torch.arange(45) >= torch.tensor([45, 30, 0]).unsqueeze(1), None)
    case.call = lambda f, x, call=case.call: (
        call(f, x) + f.weights(x, torch.ones(1, 89, 48))[0, :, :, :1].transpose(0, 1)
    )
    want = both(case)
    report = accelerate(case.module, strict=True)
    compare(both(case), want)
    assert report.fallbacks == {ASKED: 1}


@contextmanager
def entropies(caplog: pytest.LogCaptureFixture, level: int) -> Iterator[list[str]]:
    """Make all calls draw the diagnostics, and collect what they log."""
    found: list[str] = []
    caplog.clear()
    with caplog.at_level(level), mock.patch.object(random, "random", return_value=0.0):
        yield found
    found += [record.getMessage() for record in caplog.records]


def test_diagnostics(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entropy of all weights is logged, a block of queries at a time."""
    case = case_of("zipformer", "right")
    with entropies(caplog, logging.INFO) as theirs:
        answer(case)
    report = accelerate(case.module, strict=True)
    monkeypatch.setattr("txl_kernels.integrations.adapters.zipformer.MAX_PAIRS", 7 * 3 * 4 * 45)
    whole = Scores.of_pairs
    sizes: list[int] = []

    def of_pairs(self: Scores, queries: slice) -> Tensor:
        found = whole(self, queries)
        sizes.append(found.size(2))
        return found

    monkeypatch.setattr(Scores, "of_pairs", of_pairs)
    with entropies(caplog, logging.INFO) as ours:
        answer(case)
    assert sizes == [7] * 6 + [3]
    (wanted,), (found,) = theirs, ours
    names, numbers = zip(*(line.split("tensor") for line in (found, wanted)), strict=True)
    assert names[0] == names[1]
    a, b = (torch.tensor([float(n) for n in re.findall(r"[\d.]+", text)]) for text in numbers)
    torch.testing.assert_close(a, b, atol=2e-4, rtol=0)
    sizes.clear()
    with entropies(caplog, logging.WARNING) as ours:
        answer(case)
    assert not sizes
    assert not ours
    assert not report.fallbacks
