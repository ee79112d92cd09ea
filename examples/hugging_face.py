"""TransfoXL in today's transformers: trained by its Trainer, saved, read again, and generating at a
constant cost a token.

pip install ".[hf]" accelerate; python examples/hugging_face.py
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

try:
    import accelerate  # noqa: F401 - transformers' Trainer needs it
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
except ImportError as error:
    sys.exit(f'{error}: pip install ".[hf]" accelerate')

from txl.hf.configuration import TransfoXLConfig
from txl.hf.modeling import TransfoXLLMHeadModel
from txl.hf.tokenization import TransfoXLTokenizer
from txl.text.vocabulary import ByteVocabulary


def examples(tokens: torch.Tensor, length: int) -> list[dict[str, Any]]:
    """Texts of one length, which are their own labels."""
    return [{"input_ids": x, "labels": x} for x in tokens.split(length) if len(x) == length]


def main(steps: int = 300, width: int = 128, mem_len: int = 128, new: int = 200) -> float:
    text = "".join(f"{n} and {n + 1} are {2 * n + 1}; " for n in range(2000)).encode()
    tokenizer = TransfoXLTokenizer.from_vocabulary(ByteVocabulary(bytes(sorted(set(text)))))
    tokens = torch.tensor(tokenizer(text.decode())["input_ids"])

    torch.manual_seed(0)
    config = TransfoXLConfig(
        vocab_size=len(tokenizer), cutoffs=[], d_model=width, d_embed=width, n_head=4, d_head=width // 4, d_inner=2 * width,
        div_val=1, n_layer=3, mem_len=mem_len, clamp_len=-1, same_length=False, untie_r=False, initial_memory="empty",
        init_std=0.05, eos_token_id=None,
    )  # fmt: skip
    model = TransfoXLLMHeadModel(config)
    folder = Path(tempfile.mkdtemp())
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=8, learning_rate=2e-3, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    loss = Trainer(model, arguments, train_dataset=examples(tokens, 128)).train().training_loss
    print(f"mean loss {loss:.2f}; before training it is about {torch.tensor(len(tokenizer)).log():.2f}")

    model.save_pretrained(folder / "saved")
    tokenizer.save_pretrained(folder / "saved")
    again = AutoModelForCausalLM.from_pretrained(folder / "saved")
    words = AutoTokenizer.from_pretrained(folder / "saved")
    prompt = words("71 and 72 are ", return_tensors="pt")
    for count in (new, 2 * new):
        began = time.perf_counter()
        out = again.generate(**prompt, max_new_tokens=count, do_sample=False)
        print(f"{count} tokens, {(time.perf_counter() - began) / count * 1e3:.2f} ms each")
    print(words.decode(out[0]))
    return float(loss)


if __name__ == "__main__":
    main()
