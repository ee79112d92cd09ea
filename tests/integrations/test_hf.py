"""`txl.hf` against the files and results of transformers 4.37.2's own TransfoXL
(transfo_xl/write.py)."""

import copy
import json
import pickle
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent / "transfo_xl"
NAMES = ("plain", "bins", "untied")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # its mask is float32


def outputs(name: str) -> dict[str, torch.Tensor]:
    return load_file(HERE / name / "outputs")


@pytest.fixture
def plain(hf: Any) -> Any:
    return hf.TransfoXLLMHeadModel.from_pretrained(HERE / "plain")


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_the_old_class(name: str, hf: Any) -> None:
    """Scores, memory, hidden states and attentions of three segments; losses."""
    import transformers

    model, want = transformers.AutoModelForCausalLM.from_pretrained(HERE / name), outputs(name)
    assert isinstance(model, hf.TransfoXLLMHeadModel)
    mems = None
    with torch.no_grad():
        for i in range(3):
            found = model(want[f"{i}.tokens"], mems=mems, output_attentions=True, output_hidden_states=True)
            torch.testing.assert_close(found.prediction_scores, want[f"{i}.scores"], **CLOSE)
            for kind in ("mems", "hidden_states", "attentions"):
                expected = [x for key, x in sorted(want.items()) if key.startswith(f"{i}.{kind}.")]
                assert len(getattr(found, kind)) == len(expected)
                for ours, theirs in zip(getattr(found, kind), expected, strict=True):
                    torch.testing.assert_close(ours, theirs, **CLOSE)
            mems = found.mems
        found = model(want["1.tokens"], labels=want["labels"])
    # The old class has losses in order of the bins, ours in order of the positions.
    torch.testing.assert_close(found.losses.flatten().sort().values, want["losses"].flatten().sort().values, **CLOSE)
    torch.testing.assert_close(found.loss, want["loss"], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_generated_tokens_equal_the_old_class(name: str, hf: Any) -> None:
    model, want = hf.TransfoXLLMHeadModel.from_pretrained(HERE / name), outputs(name)
    model.generation_config.eos_token_id = None
    tokens, new = want["1.tokens"][:1], want["generated"].size(1) - want["1.tokens"].size(1)
    options = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(model.generate(tokens, **options), want["generated"])


def test_cache_has_constant_size(plain: Any) -> None:
    """The text is far longer than the memory, the prompt longer than the cache's segments."""
    cache = plain.transformer.new_cache(1, max_segment=4)
    before = sum(layer.nbytes for layer in cache.layers)
    tokens = torch.arange(30)[None] % 50
    plain.generation_config.eos_token_id = None
    found = plain.generate(tokens, cache=cache, max_new_tokens=60, do_sample=False)
    assert found.shape == (1, 90)
    assert cache.get_seq_length() == 89
    assert sum(layer.nbytes for layer in cache.layers) == before
    with pytest.raises(ValueError, match="input_ids must begin with the 89 tokens"):
        plain.generate(tokens, cache=cache, max_new_tokens=2)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_each_token_is_read_once(name: str, plain: Any) -> None:
    """With the cache under its new name and its old one, which generate() returns."""
    import transformers

    plain.generation_config.eos_token_id = None
    cache, lengths = plain.transformer.new_cache(1), []
    plain.transformer.register_forward_pre_hook(lambda m, args: lengths.append(args[0].size(1)))
    found = plain.generate(
        torch.arange(5)[None], max_new_tokens=4, do_sample=False, return_dict_in_generate=True, **{name: cache}
    )
    assert lengths == [5, 1, 1, 1]
    new = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    assert getattr(found, "cache" if new else "past_key_values") is cache
    with torch.no_grad():
        output = plain(torch.tensor([[1]]), **{name: cache})
    assert output.cache is cache
    assert output["cache"] is cache
    assert output.past_key_values is cache
    assert output.mems is None


def test_failed_call_does_not_change_the_cache(plain: Any) -> None:
    """Labels of a wrong shape are noticed after the text was read. Three segments cannot be
    removed."""
    tokens = torch.randint(31, (1, 11))
    cache = plain.eval().transformer.new_cache(1, max_segment=4)
    with torch.no_grad():
        twin = plain.transformer.new_cache(1, max_segment=4)
        for part in (slice(0, 4), slice(4, 7)):
            with pytest.raises(ValueError, match="labels must be"):
                plain(tokens[:, part], cache=cache, labels=tokens)
            assert cache.get_seq_length() == part.start
            found, want = (plain(tokens[:, part], cache=it).prediction_scores for it in (cache, twin))
            assert torch.equal(found, want)
        cache = plain.transformer.new_cache(1, max_segment=4)
        with pytest.raises(ValueError, match="labels must be"):
            plain(tokens, cache=cache, labels=tokens[:, 1:])
        with pytest.raises(RuntimeError, match="cache is not whole"):
            plain(tokens, cache=cache)


def test_unknown_name_of_transformers_cache(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from txl.hf.modeling import name_in_generation

    def renamed(self: Any, input_ids: Any, remembered: Any = None, **kwargs: Any) -> None: ...

    name_in_generation.cache_clear()
    monkeypatch.setattr(transformers.GenerationMixin, "prepare_inputs_for_generation", renamed)
    with pytest.raises(RuntimeError, match="names its cache neither cache nor past_key_values"):
        plain.generate(torch.arange(5)[None], max_new_tokens=2)
    with pytest.raises(ValueError, match="remembered"):
        plain.generate(torch.arange(5)[None], max_new_tokens=2, remembered=plain.transformer.new_cache(1))


def test_beams_and_samples(plain: Any) -> None:
    """Beam search with the cache equals reading the whole text again at each step."""
    plain.generation_config.eos_token_id = None
    tokens = torch.tensor([[3, 4, 5], [6, 7, 8]])
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    # In so short a text no token sees further than the memory: both are the same computation.
    plain.transformer.trunk.config = copy.copy(plain.transformer.trunk.config)
    object.__setattr__(plain.transformer.trunk.config, "initial_memory", "empty")
    by_cache = plain.generate(tokens, **options)
    assert torch.equal(by_cache, plain.generate(tokens, use_cache=False, **options))
    torch.manual_seed(0)
    sampled = plain.generate(tokens, max_new_tokens=6, do_sample=True, top_k=5, attention_mask=torch.ones_like(tokens))
    assert sampled.shape == (2, 9)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load(name: str, hf: Any, tmp_path: Path) -> None:
    """Under the old names; the base model, too; in another dtype."""
    model = hf.TransfoXLLMHeadModel.from_pretrained(HERE / name)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(key.startswith(("transformer.", "crit.")) for key in tensors)
    again = hf.TransfoXLLMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in model.state_dict().items())
    base = hf.TransfoXLModel.from_pretrained(tmp_path)
    base.save_pretrained(tmp_path / "base")
    base = hf.TransfoXLModel.from_pretrained(tmp_path / "base")
    tokens = torch.arange(9)[None]
    assert torch.equal(base(tokens).last_hidden_state, model.transformer(tokens).last_hidden_state)
    half = hf.TransfoXLLMHeadModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half(tokens).logits.isfinite().all()


def test_tokenizer(hf: Any, tmp_path: Path) -> None:
    """The old tokenizer's vocab.pkl is read by AutoTokenizer, and saved as tokenizer.json."""
    import transformers

    from txl.importing import vocabulary
    from txl.text.vocabulary import ByteVocabulary

    tokenizer = transformers.AutoTokenizer.from_pretrained(HERE / "plain")
    assert isinstance(tokenizer, hf.TransfoXLTokenizer)
    text = "word1 word3 nothing word7\nword2\n"
    read = vocabulary.read(HERE / "plain" / "vocab.pkl")
    assert tokenizer(text)["input_ids"] == read.encode(text.encode()).tolist()
    assert tokenizer.decode([3, 5, 1, 0]) == "word1 word3 <unk> <eos>"
    tokenizer.save_pretrained(tmp_path)
    again = hf.TransfoXLTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    symbols = bytes(sorted(set("héllo, wörld\n\t ~".encode())))
    of_bytes = hf.TransfoXLTokenizer.from_vocabulary(ByteVocabulary(symbols))
    sentence = "hö, wé \n\tllo~"
    assert of_bytes(sentence)["input_ids"] == [symbols.index(byte) for byte in sentence.encode()]
    assert of_bytes.decode(of_bytes(sentence)["input_ids"]) == sentence


def test_tokenizer_of_words_read_as_latin_1(hf: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Read as the importer reads them, also after saving."""
    from txl.importing import vocabulary

    words = ["<eos>", "<unk>", "é", "voilà", "10\xa0km", "\x85", "東京\u3000x", "café"]
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": [x.encode().decode("latin-1") for x in words]}))
    tokenizer = hf.TransfoXLTokenizer.from_pretrained(tmp_path)
    assert "6 words of the vocabulary were UTF-8 read as Latin-1" in caplog.text
    tokenizer.save_pretrained(tmp_path / "saved")
    again = hf.TransfoXLTokenizer.from_pretrained(tmp_path / "saved")
    for n, word in enumerate(words[3:], 3):
        text = f"é {word}\té x {word}\n{word}"
        want = vocabulary.read(tmp_path / "vocab.pkl").encode(text.encode()).tolist()
        assert tokenizer(text)["input_ids"] == again(text)["input_ids"] == want == [2, n, 2, 1, n, 0, n]


def test_gradient_checkpointing(plain: Any) -> None:
    """The gradients are the same."""
    tokens, found = torch.arange(20)[None], []
    plain.train()
    for enabled in (False, True):
        (plain.activation_checkpointing_enable if enabled else plain.activation_checkpointing_disable)()
        assert all(block.recompute == enabled for block in plain.transformer.trunk.layers)
        plain.zero_grad()
        torch.manual_seed(0)
        plain(tokens, labels=tokens).loss.backward()
        found.append([p.grad.clone() for p in plain.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def _config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_wrong_files(hf: Any, tmp_path: Path) -> None:
    from txl.errors import TxlError

    folder, load = shutil.copytree(HERE / "plain", tmp_path / "plain"), hf.TransfoXLLMHeadModel.from_pretrained
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("transformer.layers.1.pos_ff.layer_norm.bias")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TxlError, match=r"missing tensors: layers.1.pos_ff.layer_norm.bias"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"0" * 20)
    with pytest.raises(OSError, match="cannot be read"):
        load(folder)
    with pytest.raises(OSError, match=r"holds no config\.json"):
        load(tmp_path)
    with pytest.raises(OSError, match=r"holds no tokenizer\.json and no vocabulary"):
        hf.TransfoXLTokenizer.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"holds no weights \(model\.safetensors\)"):
        load(HERE / "bins", use_safetensors=True)
    with pytest.raises(ValueError, match="variant must be None"):
        load(HERE / "bins", variant="fp16")


MEMS = torch.zeros(4, 1, 24)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 0]])}, "only at the rows' ends"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]]), "cache": True}, "only at the rows' beginnings"),
    ({"mems": [MEMS, None]}, "mems must be None or 3 tensors"),
    ({"mems": [MEMS, MEMS, torch.zeros(5, 1, 24)]}, "mems must be None or 3 tensors"),
    ({"mems": [torch.zeros(4, 2, 24)] * 3}, r"mems must be None or 3 tensors \[M, B, d_model\] = \[M, 1, 24\]"),
    ({"mems": [MEMS]}, "mems must be None or 3 tensors"),
    ({"attention_mask": torch.ones(1, 5)}, r"attention_mask must be \[1, 6\]"),
    ({"cache": True, "output_attentions": True}, "goes with neither mems"),
    ({"cache": True, "past_key_values": True}, "either cache or past_key_values"),
    ({"labels": torch.arange(5)[None]}, r"labels must be \[1, 6\]"),
    ({"inputs_embeds": torch.zeros(1, 6, 24)}, "either input_ids or inputs_embeds"),
]


def test_wrong_arguments(hf: Any, plain: Any) -> None:
    import transformers

    tokens, cache = torch.arange(6)[None], plain.transformer.new_cache(1)
    for options, message in WRONG:
        given = {name: cache if x is True and "output" not in name else x for name, x in options.items()}
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            plain(tokens, **given)
    plain.train()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"call model\.eval"):
        plain(tokens, cache=cache)
    with pytest.raises(TypeError, match="cache must be a TransfoXLCache, got list"):
        plain(tokens, cache=[])
    with pytest.raises(TypeError, match="cache must be a TransfoXLCache, got DynamicCache"):
        plain.eval().generate(tokens, cache=transformers.DynamicCache(), max_new_tokens=2)
    plain.config.mem_len = 3
    with pytest.raises(ValueError, match=r"call reset_memory_length\(3\)"):
        plain(tokens)
    bins = hf.TransfoXLLMHeadModel.from_pretrained(HERE / "bins")
    with pytest.raises(IndexError, match="out of range"):
        bins(torch.tensor([[1, 50, -7]]))
    with pytest.raises(ValueError, match=r"new_num_tokens must be above the last of cutoffs, \[10, 20, 35\], got 35"):
        bins.resize_token_embeddings(35)


def test_options_of_loading(hf: Any, plain: Any, tmp_path: Path) -> None:
    """Several files, a subfolder, tensors under the old names, information about the loading, the
    settings of generation."""
    plain.generation_config.max_new_tokens = 4
    plain.save_pretrained(tmp_path / "sub", max_shard_size="20KB")
    assert len(list((tmp_path / "sub").glob("model-*.safetensors"))) > 1
    again, known = hf.TransfoXLLMHeadModel.from_pretrained(tmp_path, subfolder="sub", output_loading_info=True)
    assert not known["missing_keys"]
    assert again.generation_config.max_new_tokens == 4
    theirs = load_file(HERE / "plain" / "model.safetensors")
    for model in (again, hf.TransfoXLLMHeadModel.from_pretrained(None, config=plain.config, state_dict=theirs)):
        assert all(torch.equal(x, model.state_dict()[key]) for key, x in plain.state_dict().items())
    index = tmp_path / "sub" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(OSError, match="is no name of a file beside it"):
        hf.TransfoXLLMHeadModel.from_pretrained(tmp_path / "sub")


def test_files_of_a_repository(hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are asked for inside the subfolder; a name that is no repository raises OSError."""
    shutil.copytree(HERE / "bins", tmp_path / "sub")
    wanted: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        wanted.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("txl.hf.weights.snapshot_download", download)
    hf.TransfoXLTokenizer.from_pretrained("some/where", subfolder="sub")
    assert all(pattern.startswith("sub/") for pattern in wanted[-1])
    monkeypatch.undo()
    for kind in (hf.TransfoXLLMHeadModel, hf.TransfoXLTokenizer):
        with pytest.raises(OSError, match="/no/such/folder: no such folder, and no name of a repository"):
            kind.from_pretrained("/no/such/folder")


@pytest.mark.parametrize("options", [{"dtype": "auto"}, {"torch_dtype": "auto"}, {}], ids=str)
def test_dtype_of_the_file(options: dict[str, str], hf: Any, tmp_path: Path) -> None:
    """The configuration's, else the tensors'; by the Auto class, too."""
    import transformers

    folder = shutil.copytree(HERE / "bins", tmp_path / "bins")
    for loader in (hf.TransfoXLLMHeadModel, transformers.AutoModelForCausalLM):
        assert loader.from_pretrained(HERE / "bins", **options).dtype == torch.float32
        half = {name: x.half() for name, x in torch.load(HERE / "bins" / "pytorch_model.bin").items()}
        torch.save(half, folder / "pytorch_model.bin")
        fields = json.loads((HERE / "bins" / "config.json").read_text())
        fields.pop("torch_dtype")
        (folder / "config.json").write_text(json.dumps(fields))
        assert loader.from_pretrained(folder, **options).dtype == torch.float16
        _config(folder, dtype="bfloat16")
        assert loader.from_pretrained(folder, **options).dtype == torch.bfloat16
        assert loader.from_pretrained(folder, torch_dtype=torch.float64).dtype == torch.float64


def test_reset_memory_length(hf: Any, tmp_path: Path) -> None:
    """A saved and loaded model has the new length; the window of same_length follows."""
    tokens, found = torch.arange(24)[None], []
    model = hf.TransfoXLLMHeadModel.from_pretrained(HERE / "bins")
    model.reset_memory_length(4)
    model.save_pretrained(tmp_path)
    for it in (model, hf.TransfoXLLMHeadModel.from_pretrained(tmp_path)):
        assert it.config.mem_len == it.transformer.config.mem_len == 4
        first = it(tokens)
        assert first.mems[0].shape == (4, 1, 24)
        found.append(it(tokens, mems=first.mems).logits)
    assert torch.equal(*found)


def test_padding_at_the_end(plain: Any) -> None:
    """No token before it sees it; its labels are not scored; the output has no memory."""
    tokens = torch.arange(12)[None]
    mask = torch.ones_like(tokens)
    mask[0, 8:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    with torch.no_grad():
        padded = plain(tokens, attention_mask=mask, labels=labels)
        torch.testing.assert_close(padded.loss, plain(tokens[:, :8], labels=tokens[:, :8]).loss)
    assert padded.mems is None


def test_attentions_in_generation(plain: Any) -> None:
    """Without a cache. generate() does not accept mems."""
    plain.generation_config.eos_token_id = None
    tokens = torch.tensor([[3, 4, 5]])
    options = {"max_new_tokens": 3, "do_sample": False}
    shown = plain.generate(tokens, output_attentions=True, return_dict_in_generate=True, **options)
    assert shown.attentions[0][0].shape == (1, 3, 3, 13)
    assert torch.equal(shown.sequences, plain.generate(tokens, **options))
    with torch.no_grad():
        mems = plain(tokens).mems
    with pytest.raises(ValueError, match="mems must be None in generate"):
        plain.generate(tokens, mems=mems, **options)


def test_the_example(hf: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hugging_face.py"))["main"]
    assert main(steps=30, width=32, mem_len=32, new=8) < 3.0  # from log(18) = 2.9
    assert "71 and 72 are" in capsys.readouterr().out
