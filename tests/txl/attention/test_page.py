"""The page of attention: its data is the moment's, and a browser shows them without a network."""

import base64
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import opened

from txl.attention.moment import Moment
from txl.attention.page import show, write_page
from txl.text.vocabulary import ByteVocabulary, WordVocabulary

WORDS = WordVocabulary(["<eos>", "the", "</script><b>bold", "dog", "&amp;", "\u00e9t\u00e9"])
TEXT = np.array([1, 3, 2, 4, 5, 0] * 4, dtype=np.uint8)
LAYERS, HEADS, WINDOW, TARGETS, FIRST = 2, 3, 8, 5, 12


@pytest.fixture(scope="module")
def moment() -> Moment:
    torch.manual_seed(0)
    made = Moment(LAYERS, HEADS, WINDOW, FIRST, TARGETS)
    made.weights = (3 * torch.randn(LAYERS * HEADS, TARGETS, WINDOW)).softmax(-1)
    made.shares = torch.randn(LAYERS * HEADS, TARGETS, 4)
    return made


@pytest.fixture(scope="module")
def page(moment: Moment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "attention.html"
    write_page(path, moment, TEXT, WORDS, {"title": "A <title>", "text": "of <model>"})
    return path


def unpacked(text: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype).reshape(shape)


def test_the_page_holds_the_moment(page: Path, moment: Moment) -> None:
    text = page.read_text(encoding="utf-8")
    found = re.search(r"const data = (.*);\n", text)
    assert found
    data = json.loads(found.group(1))
    levels = unpacked(data["levels"], "u1", (LAYERS * HEADS, TARGETS, WINDOW)).astype(float) / 255
    most = unpacked(data["most"], "<f4", (LAYERS * HEADS, TARGETS))
    # Half a level of 255 of the root: at most 1 / 255 of the largest weight.
    np.testing.assert_allclose(levels**2 * most[..., None], moment.weights, rtol=0, atol=float(most.max()) / 255)
    np.testing.assert_array_equal(unpacked(data["shares"], "<f4", moment.shares.shape), moment.shares)
    expected = [show(WORDS, int(t)) for t in TEXT[FIRST - WINDOW : FIRST + TARGETS]]
    assert data["tokens"] == expected
    assert text.count("</script>") == 1  # the page's own, none of a token's
    assert "http" not in text.replace("http-equiv", "")


def test_pointing_at_tokens_layers_and_heads(page: Path, moment: Moment) -> None:
    with opened(page) as shown:
        shown.wait_for_selector("body[data-ready=yes]")
        assert shown.title() == "A <title>"
        assert shown.locator("#about").inner_text() == "of <model>"
        tokens = shown.locator(".token")
        assert tokens.all_inner_texts() == [show(WORDS, int(t)) for t in TEXT[FIRST - WINDOW : FIRST + TARGETS]]
        target, head = 3, 4
        shown.locator("#heads button").nth(head).click()
        shown.locator(".target").nth(target).hover()
        assert "layer 2, head 2" in shown.locator("#which").inner_text()
        colours = [tokens.nth(n).evaluate("e => e.style.backgroundColor") for n in range(WINDOW + TARGETS)]
        weights = moment.weights[head, target]
        for d in range(WINDOW):
            root = float((weights[d] / weights.max()).sqrt())
            colour = colours[WINDOW + target - 1 - d]
            shade = float(colour.rstrip(")").split(",")[-1]) if colour else 0.0
            assert shade == pytest.approx(0.85 * root, abs=0.02)
        assert not any(colours[:target])
        assert not any(colours[WINDOW + target + 1 :])
        rows = shown.locator("#shares tr").all_inner_texts()
        assert [float(row.split()[-1]) for row in rows] == pytest.approx(
            moment.shares[head, target].tolist(), abs=0.006
        )
        first = shown.locator("#top tr").first.inner_text().split()
        assert int(first[-3]) == int(weights.argmax()) + 1
        assert float(first[-1]) == pytest.approx(float(weights.max()), abs=1e-3)


def test_arrow_keys_go_round(page: Path) -> None:
    with opened(page, dark=True) as shown:
        shown.wait_for_selector("body[data-ready=yes]")
        assert "layer 1, head 1" in shown.locator("#which").inner_text()
        shown.keyboard.press("ArrowUp")
        assert "layer 2, head 3" in shown.locator("#which").inner_text()
        shown.keyboard.press("ArrowDown")
        shown.keyboard.press("ArrowLeft")
        assert shown.locator(".current").inner_text() == show(WORDS, int(TEXT[FIRST + TARGETS - 1]))


def test_bytes_that_are_no_characters_can_be_seen() -> None:
    vocabulary = ByteVocabulary(b"\n a\xe9\x00")
    assert [show(vocabulary, t) for t in range(5)] == ["\u21b5", " ", "a", "\\xe9", "\\x00"]
