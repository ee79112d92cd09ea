"""`accelerate(model, window=...)` gives what a model's own attention gives if a mask hides the
rest."""

import random
from unittest import mock

import pytest
import torch
from layer_helpers import case_of, compare_seeds
from torch import nn

from implementations import bare_peers
from implementations.peer_cases import answer
from txl_kernels.integrations import accelerate

WINDOW = (9, 4)  # of the mask "limited"
MASKED = ("wav2vec2-conformer", "w2v-bert relative_key", "seamless v2", "parakeet", "nemotron", "nemo", "espnet",
          "espnet zero_triu", "funasr", "espnet legacy", "funasr legacy", "espnet transducer", "funasr chunk", "cosyvoice",
          "speechbrain", "nemo transformer", "xlnet", "t5", "umt5", "mpnet", "zipformer")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in MASKED),
        *((name, {"simplified": True}) for name in ("espnet transducer", "funasr chunk")),
    ],
)
def test_window_equals_mask(name: str, options: dict[str, object]) -> None:
    want = answer(case_of(name, "limited", **options))
    case = case_of(name, "none", **options)
    assert not torch.allclose(answer(case)[case.valid], want[case.valid], atol=1e-3)
    report = accelerate(case.module, strict=True, window=WINDOW)
    torch.testing.assert_close(answer(case), want, atol=2e-5, rtol=1e-4)
    assert not report.fallbacks
    accelerate(case.module, strict=True, window=(None, None))
    whole = answer(case)
    accelerate(case.module, strict=True)
    torch.testing.assert_close(answer(case), whole, atol=2e-6, rtol=1e-5)


def test_window_and_the_models_own_mask() -> None:
    """Padding and chunks hide what they hid."""
    case = case_of("espnet", "chunks padded")
    wide, at = answer(case), torch.arange(case.x.size(1))
    accelerate(case.module, strict=True, window=(100, 100))
    torch.testing.assert_close(answer(case)[case.valid], wide[case.valid], atol=2e-5, rtol=1e-4)
    accelerate(case.module, strict=True, window=(0, 0))
    alone = case.module.linear_out(case.module.linear_v(case.x))
    shown = (at < torch.tensor([[45], [36], [27]])) & case.valid
    torch.testing.assert_close(answer(case)[shown], alone[shown], atol=2e-5, rtol=1e-4)


def test_enformer() -> None:
    """It takes no mask: its shift puts one on the scores."""
    case = case_of("enformer")
    m, at = bare_peers.enformer(), torch.arange(45)
    hidden = ((at.unsqueeze(1) - at) > 9) | ((at.unsqueeze(1) - at) < -4)
    shift = m.relative_shift
    with mock.patch.object(m, "relative_shift", lambda x: shift(x).masked_fill(hidden, -torch.inf)):
        want = answer(case)
    accelerate(case.module, strict=True, window=WINDOW)
    torch.testing.assert_close(answer(case), want, atol=2e-5, rtol=1e-4)


UNMASKED = ("ding", "rllib", "nemo local", "fireredasr", "gemma", "gemma 4", "granite", "wavlm", "espnet beats")


@pytest.mark.parametrize("name", UNMASKED)
def test_distant_frames_are_not_seen(name: str) -> None:
    """Layers that make their own masks, or take none: the last query does not change with a frame 6
    before it."""
    # Three blocks of Granite's: 14 frames before the last one.
    case = case_of(name, "none", **({"context": 15} if name == "granite" else {}))
    if name in ("wavlm", "espnet beats"):  # one layer of the stack, without convolutions
        del case.module.layers[1:]
        case.module.pos_conv_embed = nn.Identity()
    accelerate(case.module, strict=True, weights="none", window=(5, 1))
    axis = 0 if name == "ding" else 1
    before, changed = answer(case), []
    for distance in (6, 5):
        x = case.x.clone()
        x.select(axis, 44 - distance).add_(torch.linspace(-1, 1, 64))
        with torch.no_grad():
            changed.append(not torch.equal(case.call(case.module, x).select(axis, 44), before.select(axis, 44)))
    assert changed == [False, True]


def test_fallbacks_raise() -> None:
    case = case_of("espnet", "holes")
    accelerate(case.module, strict=True, window=(8, 8))
    with pytest.raises(RuntimeError, match=r"window=\(8, 8\)\) holds for the kernels alone.*a mask with holes"):
        answer(case)


@pytest.mark.parametrize("factor", [0.5, 15.0])
def test_zipformer_trains_with_a_window(factor: float) -> None:
    """With its random penalties of large scores, which pairs outside the window get, too, and with
    calls without positions."""
    theirs, ours = case_of("zipformer", "limited"), case_of("zipformer", "none")
    for case in (theirs, ours):
        case.module.train()
        case.module.weights.pos_emb_skip_rate.default = 0.3
        case.module.weights.in_proj.weight.data.mul_(factor)
    report = accelerate(ours.module, strict=True, window=WINDOW)
    compare_seeds(ours, theirs)
    assert set(report.fallbacks) == (
        {"a penalty on large scores, which training adds to some calls"} if factor > 1 else set()
    )


@pytest.mark.parametrize("positions", [True, False])
def test_zipformers_weights_are_those_of_the_window(positions: bool) -> None:
    """Training makes some of them constant where they are not 0."""
    theirs, ours = case_of("zipformer", "limited"), case_of("zipformer", "none")
    accelerate(ours.module, strict=True, window=WINDOW)
    found = []
    for case in (theirs, ours):
        case.module.train()
        case.module.weights.pos_emb_skip_rate.default = 0.0 if positions else 1.0
        with (
            mock.patch.object(case.module, "forward", case.module.weights.forward),
            mock.patch.object(random, "random", return_value=0.5),
        ):
            found.append(case.call(case.module, case.x))
    torch.testing.assert_close(found[1] + 0, found[0], atol=1e-6, rtol=1e-4)
    assert torch.equal(found[1] > 0, found[0] > 0)
