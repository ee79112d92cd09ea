"""Inkling's text models with caches, and their generated text, against the originals."""

from typing import Any

import pytest
import torch
from inkling_models import LEFT, NAMES, TOKENS, WINDOW, L, model_of, same
from torch import Tensor

from txl_kernels.integrations import accelerate


def in_pieces(model: Any, lengths: tuple[int, ...], cache: Any = None, mask: Tensor | None = None) -> Tensor:
    """Return logits of calls with a cache, one after the other."""
    found, at = [], 0
    with torch.no_grad():
        for n in lengths:
            given = {} if mask is None else {"attention_mask": mask[:, : at + n]}
            out = model(TOKENS[:, at : at + n], cache=cache, use_cache=True, **given)
            found.append(out.logits)
            cache, at = out.cache, at + n
    result = torch.cat(found, 1)
    return result if mask is None else result[mask.bool()]


# Not padding one token at a time: the originals' convolutions let it through, our output is 0.
@pytest.mark.parametrize(("lengths", "mask"), [((11, 7, 1), None), ((11, 7, 1), LEFT), ((1,) * L, None)])
@pytest.mark.parametrize("name", NAMES)
def test_dynamic_cache(name: str, lengths: tuple[int, ...], mask: Tensor | None) -> None:
    """The sliding layers' cache drops keys from the seventh on."""
    model = model_of(name)
    want = in_pieces(model, lengths, mask=mask)
    report = accelerate(model, strict=True)
    same(in_pieces(model, lengths, mask=mask), want)
    assert not report.fallbacks


@pytest.mark.parametrize("name", NAMES)
def test_static_cache(name: str) -> None:
    """It also returns its unused room. Inkling's own code reads the number of cached tokens after
    it has grown, so the original is compared with a cache that does not grow in place."""
    from transformers import StaticCache

    model = model_of(name)
    pieces = (11, 7, 1)
    caches = [StaticCache(config=model.config, max_cache_len=24) for _ in range(2)]
    want = in_pieces(model, pieces, None if name == "Inkling" else caches[0], LEFT)
    report = accelerate(model, strict=True)
    same(in_pieces(model, pieces, caches[1], LEFT), want)
    assert not report.fallbacks


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "no cache": {"use_cache": False},
    "candidates": {"prompt_lookup_num_tokens": 3},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("kind", GENERATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_generation(name: str, kind: str) -> None:
    """Candidates are checked several at a time, and some are removed from the cache."""
    window = 40 if kind == "static" else WINDOW  # the original raises for a static cache longer than the window
    model = model_of(name, sliding_window_size=window)
    rows = slice(0, 1) if kind == "candidates" else slice(None)
    given = {"attention_mask": LEFT[rows], "max_new_tokens": 9, "do_sample": False, **GENERATIONS[kind]}
    theirs = given if (name, kind) != ("Inkling", "static") else given | {"cache_implementation": "dynamic"}
    want = model.generate((TOKENS * LEFT)[rows], **theirs)
    report = accelerate(model, strict=True)
    assert torch.equal(model.generate((TOKENS * LEFT)[rows], **given), want)
    assert want[:, L:].unique().numel() > 3
    assert not report.fallbacks
