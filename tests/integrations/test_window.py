"""`accelerate(model, window=...)` gives what a model's own attention gives if a mask hides the
rest."""

from unittest import mock

import pytest
import torch
from layer_helpers import case_of
from torch import nn

from implementations import bare_peers
from implementations.peer_cases import answer
from txl_kernels.integrations import accelerate

WINDOW = (9, 4)  # of the mask "limited"
MASKED = ("wav2vec2-conformer", "w2v-bert relative_key", "seamless v2", "parakeet", "nemotron", "nemo", "espnet",
          "espnet zero_triu", "funasr", "espnet legacy", "funasr legacy", "espnet transducer", "funasr chunk", "cosyvoice",
          "speechbrain", "nemo transformer", "xlnet", "t5", "umt5", "mpnet", "zipformer")  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_window_equals_mask(name: str) -> None:
    want = answer(case_of(name, "limited"))
    case = case_of(name, "none")
    assert not torch.allclose(answer(case)[case.valid], want[case.valid], atol=1e-3)
    report = accelerate(case.module, strict=True, window=WINDOW)
    torch.testing.assert_close(answer(case), want, atol=2e-5, rtol=1e-4)
    assert not report.fallbacks
    accelerate(case.module, strict=True, window=(None, None))
    whole = answer(case)
    accelerate(case.module, strict=True)
    torch.testing.assert_close(answer(case), whole, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["espnet transducer", "funasr chunk"])
def test_simplified_scores(name: str) -> None:
    want = answer(case_of(name, "limited", simplified=True))
    case = case_of(name, "none", simplified=True)
    report = accelerate(case.module, strict=True, window=WINDOW)
    torch.testing.assert_close(answer(case), want, atol=2e-5, rtol=1e-4)
    assert not report.fallbacks


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
