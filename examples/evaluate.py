"""A trained model in Python: scored at several lengths of attention, and going on with a text.

txl train --run runs/a --minutes 2
python examples/evaluate.py runs/a
"""

import sys

import txl
from txl.evaluation.generate import Sampling

TEXT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n"


def main(run: str, prompt: str = "def ", text: str = TEXT) -> None:
    language_model = txl.load(run)
    parameters = sum(p.numel() for p in language_model.model.parameters())
    print(
        f"{language_model.path}: {parameters / 1e6:.2f}M parameters, trained on {language_model.segment} tokens a segment"
    )

    for attn_len in (8, 32, language_model.attn_len):
        score = language_model.evaluate(text, attn_len, batch=1)
        print(f"{attn_len} keys: {score.bpc:.3f} bits a token, {score.ppl:.2f} perplexity")

    print(prompt, end="")
    for piece in language_model.stream(prompt, 60, Sampling(temperature=0.8, top_p=0.95), seed=0):
        print(piece.decode(errors="replace"), end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/evaluate.py RUN, a folder of txl train")
    main(sys.argv[1])
