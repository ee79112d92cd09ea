"""One HTML file, without a network, to look around in a model's attention."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from txl.attention.moment import Moment
from txl.paths import replace_text
from txl.text.vocabulary import ByteVocabulary, Tokens, Vocabulary

_TEMPLATE = Path(__file__).with_name("page.html")
_DATA = "/*DATA*/null"


def write_page(path: Path, moment: Moment, tokens: Tokens, vocabulary: Vocabulary, about: dict[str, Any]) -> None:
    """Writes the page of a moment.

    Weights are kept as 8 bits of the square root of a row's share of its maximum, deflated.

    Args:
        tokens: the text that the moment is of.
        about: what the page says of model and text, JSON-able.
    """
    heads, count, window = moment.weights.shape
    weights = moment.weights.numpy()
    most = np.maximum(weights.max(-1), np.finfo(np.float32).tiny)
    levels = np.rint(255 * np.sqrt(weights / most[..., None])).astype(np.uint8)
    shown = [show(vocabulary, int(t)) for t in tokens[moment.first - window : moment.first + count]]
    data = {
        "layers": heads // moment.heads, "heads": moment.heads, "targets": count, "window": window, "tokens": shown,
        "words": vocabulary.unit == "words", "about": about, "levels": _packed(levels),
        "most": _packed(most.astype("<f4")), "shares": _packed(moment.shares.numpy().astype("<f4")),
    }  # fmt: skip
    # "<" is escaped: a token such as </script> must not end the script.
    text = json.dumps(data).replace("<", "\\u003c")
    replace_text(path, _TEMPLATE.read_text(encoding="utf-8").replace(_DATA, text))


def _packed(values: Any) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(values).tobytes(), 9)).decode()


def show(vocabulary: Vocabulary, token: int) -> str:
    """A token as a reader can see it: a line's end as an arrow, bytes that are no character in
    hexadecimal."""
    if isinstance(vocabulary, ByteVocabulary):
        byte = vocabulary.symbols[token]
        return "\u21b5" if byte == 10 else chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}"
    word = vocabulary.decode([token]).decode("utf-8", "replace").strip(" ")
    return "\u21b5" if word in ("", "\n") else word
