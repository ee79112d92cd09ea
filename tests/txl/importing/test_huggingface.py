"""Imported checkpoints of transformers 4.37.2 have its logits over three segments."""

import io
import json
import pickle
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_helpers import in_process, one_line, succeeded
from hugging_face_model import SIZES, transfo_xl
from safetensors.torch import load_file, save_file

import txl
from txl.errors import TxlError
from txl.importing.checkpoint import convert, export
from txl.importing.vocabulary import SETTINGS
from txl.text.corpus import prepare
from txl.text.datasets import PrepareOptions
from txl.text.vocabulary import ByteVocabulary, WordVocabulary

pytest.importorskip("transformers", reason="needs the `peers` extra: transformers==4.37.2")
VOCAB = SIZES["vocab_size"]
WORDS = ["<eos>", "<unk>", *(f"wörd{n}" for n in range(VOCAB - 2))]
BINS = {"cutoffs": [10, 20, 35], "d_embed": 64}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "same_length, clamped": {"same_length": True, "clamp_len": 4},
    "untied biases, pre-norm": {"untie_r": True, "pre_lnorm": True},
    "bins": BINS,
    "bins, div_val 2": BINS | {"div_val": 2},
    "bins, div_val 4": BINS | {"div_val": 4},
    "bins, projections of their own": BINS | {"proj_share_all_but_first": False},
    "bins, div_val 2, projections of their own": BINS | {"div_val": 2, "proj_share_all_but_first": False},
    "bins, tables of their own": BINS | {"div_val": 2, "tie_word_embeddings": False, "proj_share_all_but_first": False},
    "another norm eps": {"layer_norm_epsilon": 1e-3},
}


def vocabulary(folder: Path) -> None:
    """Write a vocabulary as the tokenizer pickles it."""
    fields = {"counter": Counter(WORDS), "idx2sym": WORDS, "sym2idx": OrderedDict((w, n) for n, w in enumerate(WORDS)),
              "lower_case": False, "unk_idx": 1}  # fmt: skip
    (folder / "vocab.pkl").write_bytes(pickle.dumps(fields))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    transfo_xl(**BINS, div_val=2).save_pretrained(folder)
    vocabulary(folder)
    return folder


@pytest.mark.parametrize(("name", "safe"), [*((name, True) for name in OPTIONS), ("bins, div_val 2", False)])
def test_logits(name: str, safe: bool, tmp_path: Path) -> None:
    model, folder = transfo_xl(**OPTIONS[name]), tmp_path / "saved"
    model.save_pretrained(folder, safe_serialization=safe)
    vocabulary(folder)
    out = tmp_path / "ours.safetensors"
    convert(folder, out)
    loaded = txl.load(out)
    assert isinstance(loaded.vocabulary, WordVocabulary)
    assert list(loaded.vocabulary.words) == WORDS
    mems = memory = None
    with torch.no_grad():
        for length in (7, 12, 3):
            tokens = torch.randint(VOCAB, (2, length))
            want = model(tokens, mems=mems)
            logits, memory = loaded.model(tokens, memory)
            torch.testing.assert_close(logits.log_softmax(-1), want.prediction_scores, rtol=1e-4, atol=1e-4)
            mems = want.mems


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name: str, tmp_path: Path) -> None:
    """All parameters' gradients, with a memory. Theirs are imported as if they were weights."""
    theirs, loaded = transfo_xl(**OPTIONS[name]), []
    first, second = torch.randint(VOCAB, (2, 2, 9))
    mems, weight = theirs(first).mems, torch.randn(2, 9, VOCAB)
    (theirs(second, mems=mems).prediction_scores * weight).sum().backward()
    for part in ("weights", "gradients"):
        if part == "gradients":
            for p in theirs.parameters():
                p.data = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        theirs.save_pretrained(tmp_path / part)
        vocabulary(tmp_path / part)
        convert(tmp_path / part, tmp_path / f"{part}.safetensors")
        loaded.append(txl.load(tmp_path / f"{part}.safetensors").model)
    ours, want = loaded
    logits, _ = ours(second, ours(first)[1])
    (logits.log_softmax(-1) * weight).sum().backward()
    for parameter, p in want.named_parameters():
        grad = ours.get_parameter(parameter).grad
        assert grad is not None, parameter
        torch.testing.assert_close(grad, p.detach(), rtol=1e-4, atol=2e-4, msg=parameter)


OTHER_NAMES = {"vocab_size": "n_token", "d_model": "hidden_size", "n_head": "num_attention_heads",
               "n_layer": "num_hidden_layers"}  # fmt: skip


@pytest.mark.parametrize("names", [*([x] for x in OTHER_NAMES), [*OTHER_NAMES]], ids=",".join)
def test_names_of_transformers_attribute_map(names: list[str], saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "a.safetensors")
    path = saved / "config.json"
    given = json.loads(path.read_text())
    renamed = {OTHER_NAMES[name] if name in names else name: x for name, x in given.items()}
    for number, fields in enumerate((renamed, given | renamed)):
        path.write_text(json.dumps(fields))
        convert(saved, tmp_path / f"{number}.safetensors")
        assert (
            txl.load(tmp_path / f"{number}.safetensors").model.config
            == txl.load(tmp_path / "a.safetensors").model.config
        )
    for name in names:
        path.write_text(json.dumps({key: x for key, x in given.items() if key != name}))
        with pytest.raises(TxlError, match=f"configuration lacks {name}"):
            convert(saved, tmp_path / "b.safetensors")


def test_import_command(saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ours.safetensors"
    done = succeeded(in_process(capfd, "import", saved, out))
    assert "3 layers, 50 tokens" in done.stdout
    assert "wörd" in in_process(capfd, "generate", out, "--prompt", "wörd1", "--count", 5).stdout
    one_line(in_process(capfd, "import", saved, out), "exists already; choose another file")
    one_line(in_process(capfd, "import", saved, tmp_path / "ours.bin"), "must end in .safetensors")
    one_line(in_process(capfd, "import", tmp_path, tmp_path / "other.safetensors"), "not a checkpoint that is known")
    done = in_process(capfd, "import", saved, tmp_path / "other.safetensors", "--mem-len", 3)
    one_line(done, "give them for TensorFlow's only")
    words = tmp_path / "words.txt"
    words.write_text("\n".join(WORDS))
    succeeded(in_process(capfd, "import", saved, tmp_path / "other.safetensors", "--vocabulary", words))


def _edit(name: str, value: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {name: value}))

    return edit


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({name: x.clone() for name, x in tensors.items()}, folder / "model.safetensors")

    return edit


def _cut(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return edit


def _words(count: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": WORDS[:count]}))

    return edit


LAST = "transformer.layers.2.pos_ff.layer_norm.weight"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no such file or folder"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "no vocabulary": (lambda f: (f / "vocab.pkl").unlink(), "holds no vocabulary .* pass one with --vocabulary"),
    "another model": (_edit("model_type", "xlnet"), "model_type must be 'transfo-xl', got 'xlnet'"),
    "invalid JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "model_type must be 'transfo-xl', got 'list'"),
    "another kind of attention": (_edit("attn_type", 2), "attn_type 2 is none"),
    "projections tied otherwise": (_edit("tie_projs", [True, False, True, False]), "tie_projs must be none, all, or"),
    "another size": (_edit("d_inner", 41), r"CoreNet.0.weight has shape \[40, 24\], the configuration needs \[41, 24\]"),
    "a huge size": (_edit("d_inner", 2**30), r"has shape \[40, 24\], the configuration needs \[1073741824, 24\]"),
    "a size as text": (_edit("n_layer", "three"), "n_layer must be a whole number, got 'three'"),
    "NaN": (_edit("mem_len", float("nan")), "mem_len must be a whole number, got nan"),
    "a flag as text": (_edit("same_length", "1"), "same_length must be true or false, got '1'"),
    "infinite eps": (_edit("layer_norm_epsilon", float("inf")), r"norm_eps must be <= 1e\+38, got inf"),
    "a width as bool": (_edit("d_inner", True), "d_inner must be a whole number, got True"),
    "too many bins": (_edit("cutoffs", list(range(1, 20_000))), "cutoffs must be fewer than 1000, got 19,999"),
    "no words": (lambda f: [(f / "vocab.pkl").unlink(), (f / "vocab.txt").write_text("")], "vocab.txt: holds no words"),
    "another vocabulary": (_words(49), "has 49 words, the configuration needs 50"),
    "a tensor too many": (_tensors(lambda t: t.update(extra=torch.zeros(2))), "unknown tensors: extra"),
    "a tensor too few": (_tensors(lambda t: t.pop(LAST)), "missing tensors: layers.2.pos_ff.layer_norm.weight"),
    "integers": (_tensors(lambda t: t.update({LAST: torch.ones(24).long()})), "must hold floats, got torch.int64"),
    "tied weights that differ": (
        _tensors(lambda t: t.update({"crit.out_layers.0.weight": torch.zeros(10, 64)})),
        "crit.out_layers.0.weight should repeat word_emb.emb_layers.0.weight and differs"),
    "truncated weights": (_cut("model.safetensors"), "model.safetensors: cannot be read"),
    "truncated vocabulary": (_cut("vocab.pkl"), "vocab.pkl: not a whole file of tensors and data"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, saved: Path, tmp_path: Path) -> None:
    harm, message = REFUSED[name]
    harm(saved)
    with pytest.raises(TxlError, match=message):
        convert(saved, tmp_path / "ours.safetensors")
    assert not (tmp_path / "ours.safetensors").exists()


def test_hostile_pickle_of_weights(saved: Path, tmp_path: Path) -> None:
    """A pickled call in place of tensors is refused and not made."""

    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harmed",))

    (saved / "model.safetensors").unlink()
    torch.save({"a": Harm()}, saved / "pytorch_model.bin")
    with pytest.raises(TxlError, match=r"pytorch_model\.bin: must hold tensors by name"):
        convert(saved, tmp_path / "ours.safetensors")
    assert not (tmp_path / "harmed").exists()


def test_bytes_as_decimal_words(saved: Path, tmp_path: Path) -> None:
    """The original's script writes bytes of enwik8 as decimal words; Python 2 pickles strings."""
    symbols = list(range(32, 32 + VOCAB))
    words = b"".join(b"U" + bytes([len(str(n))]) + str(n).encode() for n in symbols)
    (saved / "vocab.pkl").write_bytes(b"\x80\x02}U\x07idx2sym](" + words + b"es.")  # Python 2's strings
    convert(saved, tmp_path / "ours.safetensors")
    assert txl.load(tmp_path / "ours.safetensors").vocabulary == ByteVocabulary(bytes(symbols))


TRUE = ["<eos>", "<unk>", "voilà", "café", "Å", "\u2019", "東京", "10\xa0km", "\x85", "\u3000x"]
PLAIN_WORDS = [f"w{n}" for n in range(VOCAB - len(TRUE))]
KINDS: dict[str, tuple[str, Callable[[list[str]], bytes]]] = {
    "pickle": ("vocab.pkl", lambda words: pickle.dumps({"idx2sym": words})),
    "torch.save": ("vocab.bin", lambda words: _saved({"idx2sym": words})),
    "text": ("vocab.txt", lambda words: "".join(f"{word}\n" for word in words).encode()),
}


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def mojibake(words: list[str]) -> list[str]:
    return [word.encode().decode("latin-1") for word in words]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [TRUE, [x for x in TRUE if x.split() == [x]]], ids=["spaces", "none"])
def test_words_read_as_latin_1_are_repaired(
    kind: str, given: list[str], saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hugging Face's WikiText-103 has such words; in a checkpoint and a corpus prepared for it."""
    right, out = [*given, *(f"w{n}" for n in range(VOCAB - len(given)))], tmp_path / "ours.safetensors"
    name, content = KINDS[kind]
    (saved / "vocab.pkl").unlink()
    (saved / name).write_bytes(content(mojibake(right)))
    convert(saved, out)
    assert f"{len(given) - 2} words of the vocabulary were UTF-8 read as Latin-1" in caplog.text
    found = txl.load(out).vocabulary
    assert isinstance(found, WordVocabulary)
    assert list(found.words) == right
    assert found.encode((" ".join(right[2:]) + "\n").encode()).tolist() == [*range(2, VOCAB), 0]
    if kind == "text":
        text = tmp_path / "text"
        text.write_text(f"{' '.join(right[2:])}\n" * 60)
        corpus = prepare(text, tmp_path / "c", PrepareOptions("words", vocabulary=saved / name))
        assert corpus.vocabulary == found


@pytest.mark.parametrize("words", [["<eos>", "a b"], ["a", "b"], ["<eos>", "a", "a"], ["<eos>", 3], []], ids=str)
def test_error_of_a_vocabulary_names_the_option(words: list[Any], saved: Path, tmp_path: Path) -> None:
    (saved / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": words}))
    with pytest.raises(TxlError, match=r"vocab\.pkl: .*; pass another with --vocabulary$"):
        convert(saved, tmp_path / "ours.safetensors")


def test_exported_vocabulary_is_not_repaired(saved: Path, tmp_path: Path) -> None:
    """An exported vocabulary is read as it is, even if all its words look like UTF-8 in Latin-1."""
    words = [*mojibake(TRUE), *PLAIN_WORDS]
    (saved / "vocab.pkl").unlink()
    (saved / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    _edit(SETTINGS, {"unit": "words"})(saved)
    convert(saved, tmp_path / "a.safetensors")
    export(tmp_path / "a.safetensors", tmp_path / "exported")
    convert(tmp_path / "exported", tmp_path / "b.safetensors")
    for name in "ab":
        found = txl.load(tmp_path / f"{name}.safetensors").vocabulary
        assert isinstance(found, WordVocabulary)
        assert list(found.words) == words
