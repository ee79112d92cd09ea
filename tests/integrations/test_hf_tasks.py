"""`txl.hf` in transformers' Trainer, with padded batches, a vocabulary of another size, a
classifier, and pipelines."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent / "transfo_xl"
NAMES = ("plain", "bins", "untied")
PROMPTS = ([3, 4, 5, 6, 7], [8], [9, 2, 30, 41, 5, 6, 11, 12, 13, 14, 44, 16, 7, 8, 1])  # longer than mem_len, 10


def padded(rows: Any, side: str, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and mask [B, longest]."""
    longest = max(len(row) for row in rows)
    tokens, mask = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest, dtype=torch.long)
    for n, row in enumerate(rows):
        place = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        tokens[n, place], mask[n, place] = torch.tensor(row), 1
    return tokens, mask


def test_trainer(hf: Any, tmp_path: Path) -> None:
    """It learns, saves, evaluates, loads its best model, and resumes to the same bits."""
    from transformers import Trainer, TrainingArguments

    config = hf.TransfoXLConfig(
        vocab_size=50, n_layer=2, d_model=24, n_head=3, d_head=8, d_inner=40, mem_len=10, cutoffs=[10, 20], d_embed=24,
        div_val=1, clamp_len=4, same_length=False, untie_r=False,
    )  # fmt: skip
    data = [dict.fromkeys(("input_ids", "labels"), torch.arange(n, n + 16) % 50) for n in range(64)]

    def train(**options: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = hf.TransfoXLLMHeadModel(config)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=20, per_device_train_batch_size=8, learning_rate=1e-2, save_steps=10, eval_steps=10,
            eval_strategy="steps", load_best_model_at_end=True, use_cpu=True, report_to=[],
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
        trainer.train(**options)
        return model, trainer.evaluate()["eval_loss"]

    model, loss = train()
    assert loss < 2.5  # from log(50) = 3.9
    resumed, _ = train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert all(torch.equal(x, resumed.state_dict()[key]) for key, x in model.state_dict().items())


def by_hand(model: Any, rows: Any, smoothing: float = 0.0) -> torch.Tensor:
    """Return the mean loss of all labels that have a token before them and are not -100."""
    losses = []
    for row in rows:
        tokens, labels = row["input_ids"][None], row["labels"]
        log_probs = model(tokens).logits[0].double()
        for n in range(1, len(labels)):
            if labels[n] != -100:
                scores = log_probs[n - 1]
                losses.append(-(1 - smoothing) * scores[labels[n]] - smoothing * scores.mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("length", [3, 9])
def test_trainers_losses(length: int, accumulated: int, smoothing: float, hf: Any, tmp_path: Path) -> None:
    """The losses that are logged and evaluated, and their gradients, are those of the mean over the
    labels of an update, however they are distributed over its batches."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = hf.TransfoXLLMHeadModel.from_pretrained(HERE / "bins")
    rows = [{"input_ids": x, "labels": x.clone()} for x in torch.randint(50, (6, length))]
    for n in range(4):
        rows[n]["labels"][: n % length] = -100  # rows of different counts
    want = by_hand(model, rows, smoothing)
    want.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=6 // accumulated, gradient_accumulation_steps=accumulated,
        per_device_eval_batch_size=6, learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
        label_smoothing_factor=smoothing, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want.item(), rel=1e-5)
    before = copy.deepcopy(model.state_dict())
    assert trainer.train().training_loss == pytest.approx(want.item(), rel=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] - p, gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_padding_on_the_left(name: str, hf: Any) -> None:
    """With a cache, scores and losses are those of the text alone; without one it raises."""
    model = hf.TransfoXLLMHeadModel.from_pretrained(HERE / name)
    tokens, mask = padded(PROMPTS, "left")
    labels = tokens.masked_fill(mask == 0, -100)
    with torch.no_grad():
        found = model(tokens, attention_mask=mask, cache=model.transformer.new_cache(3)).logits
        loss = model(tokens, attention_mask=mask, cache=model.transformer.new_cache(3), labels=labels).loss
        for n, row in enumerate(PROMPTS):
            torch.testing.assert_close(found[n, -len(row) :], model(torch.tensor([row])).logits[0])
        summed = sum(model(torch.tensor([row]), labels=torch.tensor([row])).losses.sum() for row in PROMPTS)
        torch.testing.assert_close(loss, summed / sum(len(row) - 1 for row in PROMPTS))
        with pytest.raises(ValueError, match="attention_mask must have zeros only at the rows' ends"):
            model(tokens, attention_mask=mask)


@pytest.mark.parametrize(("name", "memory"), [("plain", "zeros"), ("bins", "empty"), ("untied", "empty")])
def test_generation_from_prompts_of_several_lengths(name: str, memory: str, hf: Any) -> None:
    """Each gives what it gives alone, greedily far beyond the memory, and with beams."""
    config = hf.TransfoXLConfig.from_pretrained(HERE / name, initial_memory=memory)
    model = hf.TransfoXLLMHeadModel.from_pretrained(HERE / name, config=config)
    model.generation_config.eos_token_id = None
    tokens, mask = padded(PROMPTS, "left")
    for options in ({"max_new_tokens": 30}, {"max_new_tokens": 6, "num_beams": 3}):
        options = {"do_sample": False, "pad_token_id": 0, "output_logits": True} | options
        options["return_dict_in_generate"] = True
        found = model.generate(tokens, attention_mask=mask, **options)
        for n, row in enumerate(PROMPTS):
            alone = torch.tensor([row])
            want = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
            assert torch.equal(found.sequences[n, tokens.size(1) :], want.sequences[0, len(row) :])
            if "num_beams" not in options:
                torch.testing.assert_close(found.logits[0][n], want.logits[0][0])
    cache = model.transformer.new_cache(3, max_segment=8)
    with pytest.raises(ValueError, match=r"at most the 8 tokens of the cache's max_segment, got 14"):
        model.generate(tokens, attention_mask=mask, cache=cache, max_new_tokens=2)


def test_vocabulary_of_another_size(hf: Any, tmp_path: Path) -> None:
    """Old rows are unchanged; new ones are drawn, trained, saved and loaded."""
    for name in NAMES:
        model = hf.TransfoXLLMHeadModel.from_pretrained(HERE / name)
        tokens = torch.tensor([[3, 30, 49, 5]])
        with torch.no_grad():
            before, hidden = model(tokens).logits, model.transformer(tokens).last_hidden_state
        embedding = model.resize_token_embeddings(53, pad_to_multiple_of=5)
        assert embedding is model.get_input_embeddings()
        assert model.config.vocab_size == 55
        new = torch.tensor([[3, 54, 50]])
        with torch.no_grad():
            logits = model(tokens).logits
            assert logits.shape == (1, 4, 55)
            assert torch.equal(model.transformer(tokens).last_hidden_state, hidden)
            first = 35 if name == "bins" else 0  # of the last bin, whose probability new tokens share
            change = (logits[..., :50] - before)[..., first:]
            torch.testing.assert_close(change, change[..., :1].expand_as(change), rtol=0, atol=1e-5)
            if first:
                torch.testing.assert_close(logits[..., :first], before[..., :first])
        model(new, labels=new).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        model.save_pretrained(tmp_path / name)
        again = hf.TransfoXLLMHeadModel.from_pretrained(tmp_path / name)
        with torch.no_grad():
            assert torch.equal(again(new).logits, model(new).logits)
            assert again.resize_token_embeddings(50) is again.get_input_embeddings()
            torch.testing.assert_close(again(tokens).logits, before)
        with pytest.raises(IndexError, match="out of range"):
            again(new)
    torch.manual_seed(0)
    model.resize_token_embeddings(60, mean_resizing=False)
    table = model.get_input_embeddings().tables[-1]
    assert table[-5:].std().item() == pytest.approx(model.config.init_std, rel=0.3)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.config.vocab_size == 60


@pytest.mark.parametrize("name", NAMES)
def test_classifier(name: str, hf: Any, tmp_path: Path) -> None:
    """It starts from a language model, scores each row's last token (by attention_mask or
    pad_token_id), and is saved and loaded."""
    import transformers

    model = hf.TransfoXLForSequenceClassification.from_pretrained(HERE / name, num_labels=3)
    labels = torch.tensor([2, 0, 1])
    with torch.no_grad():
        states = [model.transformer(torch.tensor([row])).last_hidden_state[0, -1] for row in PROMPTS]
    want = torch.stack(states) @ model.score.weight.t()
    tokens, mask = padded(PROMPTS, "right")
    found = model(tokens, attention_mask=mask, labels=labels)
    torch.testing.assert_close(found.logits, want)
    torch.testing.assert_close(found.loss, torch.nn.functional.cross_entropy(want, labels))
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="attention_mask must be given for several rows"):
        model(tokens)
    model.config.pad_token_id = 0
    torch.testing.assert_close(model(tokens).logits, want)
    with pytest.raises(ValueError, match="attention_mask must have zeros only at the rows' ends"):
        model(padded(PROMPTS, "left")[0])
    found.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype="auto")
    assert isinstance(again, hf.TransfoXLForSequenceClassification)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert hf.TransfoXLModel.from_pretrained(tmp_path)(tokens).last_hidden_state.isfinite().all()


def test_text_generation_pipeline(hf: Any, tmp_path: Path) -> None:
    """Prompts that end with a space, alone and in a batch; a vocabulary of bytes."""
    import transformers

    from txl.text.vocabulary import ByteVocabulary

    model = hf.TransfoXLLMHeadModel.from_pretrained(HERE / "plain")
    tokenizer = transformers.AutoTokenizer.from_pretrained(HERE / "plain")
    tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = ["word1 word3 ", "word2 ", "word4 word5 word6 "]
    options = {"max_new_tokens": 3, "do_sample": False}
    want = []
    for prompt in prompts:
        tokens = tokenizer(prompt, return_tensors="pt")
        new = model.generate(**tokens, **options)[0, tokens["input_ids"].size(1) :]
        want.append(f"{prompt}{tokenizer.decode(new, skip_special_tokens=True)}")
    pipe = transformers.pipeline("text-generation", str(tmp_path))
    assert [pipe(prompt, **options)[0]["generated_text"] for prompt in prompts] == want
    assert [found[0]["generated_text"] for found in pipe(prompts, batch_size=3, **options)] == want
    added = pipe(prompts[0], return_full_text=False, **options)[0]["generated_text"]
    assert prompts[0] + added == want[0]
    symbols = hf.TransfoXLTokenizer.from_vocabulary(ByteVocabulary(bytes(sorted(b"1 and2;"))))
    model.resize_token_embeddings(len(symbols))
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=symbols)
    tokens = symbols("1 and", return_tensors="pt")
    assert pipe("1 and", **options)[0]["generated_text"] == symbols.decode(model.generate(**tokens, **options)[0])
