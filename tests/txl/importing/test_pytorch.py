"""The released code's pickled modules, and NVIDIA's checkpoints, in both formats of torch.save."""

import io
import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_model import PLAIN, SIZES, transfo_xl
from safetensors.torch import save_file

import txl
from txl.errors import TxlError
from txl.importing import pickles, pytorch
from txl.importing.checkpoint import convert
from txl.importing.pickles import Inert
from txl.text.vocabulary import WordVocabulary

pytest.importorskip("transformers", reason="needs the `peers` extra: transformers==4.37.2")
RELEASED = Path(__file__).parents[2] / "support" / "released"
BINS = {"cutoffs": [10, 20, 35], "d_embed": 64}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"clamp_len": 4},
    "bins": BINS,
    "bins, div_val 2, same length": BINS | {"div_val": 2, "same_length": True},
    "bins, projections of their own": BINS | {"div_val": 2, "proj_share_all_but_first": False, "pre_lnorm": True},
    "bins, tables of their own": BINS | {"div_val": 4, "tie_word_embeddings": False, "proj_share_all_but_first": False},
}  # fmt: skip
FILES = {"pytorch": "model.pt", "nvidia": "checkpoint_last.pt"}


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the released class."""
    o = PLAIN | SIZES | options
    shared = [False] + [bool(o["proj_share_all_but_first"])] * len(o["cutoffs"])
    same = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "dropout", "dropatt", "d_embed", "div_val", "mem_len")
    more = ("cutoffs", "same_length", "clamp_len", "pre_lnorm")
    return {name: o[name] for name in same + more} | {
        "n_token": o["vocab_size"], "tie_weight": o["tie_word_embeddings"], "tie_projs": shared, "tgt_len": 7, "ext_len": 0,
        "attn_type": 0,
    }  # fmt: skip


def write_model(folder: Path, options: dict[str, Any], model: torch.nn.Module) -> None:
    """Write a model's parameters, and the arguments of the released class, for save.py."""
    folder.mkdir()
    flipped = ("crit.cluster_weight", "crit.cluster_bias")
    given = {name.removeprefix("transformer."): x for name, x in model.state_dict().items()}
    kept = {name: (x.flip(0) if name in flipped else x).clone() for name, x in given.items() if "dec_attn.r_" not in name
            or "r_net" in name}  # fmt: skip
    save_file(kept, folder / "tensors")
    (folder / "options.json").write_text(json.dumps(arguments(options)))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each of OPTIONS, with the files that the released code writes of the model."""
    folder = tmp_path_factory.mktemp("released")
    for name, options in OPTIONS.items():
        write_model(folder / name, options, transfo_xl(**options))
    command = [sys.executable, RELEASED / "save.py", *folder.iterdir()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", OPTIONS)
def test_logits(name: str, released: Path, tmp_path: Path) -> None:
    options = OPTIONS[name]
    model = transfo_xl(**options)
    torch.manual_seed(1)
    segments = [torch.randint(SIZES["vocab_size"], (2, length)) for length in (7, 12, 3)]
    mems, want = None, []
    with torch.no_grad():
        for tokens in segments:
            output = model(tokens, mems=mems)
            mems = output.mems
            want.append(output.prediction_scores)
    for form, file in FILES.items():
        for kind in ("zip", "legacy"):
            out = tmp_path / f"{form}-{kind}.safetensors"
            convert(released / name / kind / file, out)
            loaded = txl.load(out)
            assert (loaded.model.config.initial_memory, loaded.segment) == ("empty", 7)
            assert isinstance(loaded.vocabulary, WordVocabulary)
            assert list(loaded.vocabulary.words[:3]) == ["<eos>", "<unk>", "w0"]
            if form == "nvidia" and options.get("same_length"):  # one key more, by its code
                assert loaded.model.config.window == SIZES["mem_len"] + 1
                continue
            # Hugging Face's code begins with zeros.
            memory: Any = tuple(torch.zeros(2, SIZES["mem_len"], SIZES["d_model"]) for _ in range(SIZES["n_layer"]))
            for tokens, scores in zip(segments, want, strict=True):
                with torch.no_grad():
                    logits, memory = loaded.model(tokens, memory)
                torch.testing.assert_close(logits.log_softmax(-1), scores, rtol=1e-4, atol=1e-4)


@pytest.fixture
def files(released: Path) -> Path:
    return released / "bins, div_val 2, same length"


@pytest.mark.parametrize("module", ["__main__", "package.pytorch.{}"])
@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_classes_of_any_module(kind: str, module: str, files: Path, tmp_path: Path) -> None:
    """A model whose class a script or a package defined has the same tensors."""
    old = (files / kind / "model.pt").read_bytes()

    def moved(pickled: bytes) -> bytes:
        for name in (b"mem_transformer", b"proj_adaptive_softmax"):
            pickled = pickled.replace(b"c" + name + b"\n", b"c" + module.format(name.decode()).encode() + b"\n")
        return pickled

    path = tmp_path / "model.pt"
    if kind == "legacy":
        path.write_bytes(moved(old))
    else:
        with zipfile.ZipFile(io.BytesIO(old)) as whole, zipfile.ZipFile(path, "w") as other:
            for entry in whole.infolist():
                data = whole.read(entry)
                other.writestr(entry.filename, moved(data) if entry.filename.endswith("data.pkl") else data)
    words = files / kind / "cache.pt"
    assert moved(old) != old or kind == "zip"
    convert(path, tmp_path / "a.safetensors", words)
    convert(files / kind / "model.pt", tmp_path / "b.safetensors", words)
    a, b = (txl.load(tmp_path / f"{name}.safetensors").model for name in "ab")
    assert a.config == b.config
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_folders(files: Path, tmp_path: Path) -> None:
    """The folder of a run must hold one kind of checkpoint."""
    with pytest.raises(TxlError, match=r"kinds, model\.pt, checkpoint_last\.pt: name the file"):
        convert(files / "zip", tmp_path / "a.safetensors")
    (tmp_path / "run").mkdir()
    shutil.copyfile(files / "zip" / "checkpoint_last.pt", tmp_path / "run" / "checkpoint_last.pt")
    assert convert(tmp_path / "run", tmp_path / "b.safetensors").form == "nvidia"
    (tmp_path / "run" / "checkpoint_last.pt").unlink()
    (files / "zip" / "model.pt").rename(tmp_path / "run" / "model.pt")
    with pytest.raises(TxlError, match="holds no vocabulary"):
        convert(tmp_path / "run", tmp_path / "c.safetensors")
    (tmp_path / "run" / "model.pt").rename(files / "zip" / "model.pt")


@pytest.mark.parametrize("kind", ["zip", "legacy"])
@pytest.mark.parametrize("form", FILES)
def test_truncated_and_altered_files(form: str, kind: str, files: Path, tmp_path: Path) -> None:
    """A truncated or altered file is an error or another model, never a crash."""
    content, harmed = (files / kind / FILES[form]).read_bytes(), tmp_path / FILES[form]
    generator = torch.Generator().manual_seed(0)
    words = files / kind / "cache.pt"
    for cut in range(0, len(content) - 1, max(len(content) // 20, 1)):
        harmed.write_bytes(content[:cut])
        with pytest.raises(TxlError):
            convert(harmed, tmp_path / "ours.safetensors", words)
    for _ in range(30):
        altered = bytearray(content)
        for at in torch.randint(min(len(content), 20_000), (3,), generator=generator).tolist():
            altered[at] ^= 1 << (at % 8)
        harmed.write_bytes(altered)
        try:
            convert(harmed, tmp_path / "ours.safetensors", words)
        except TxlError as error:
            assert str(harmed) in str(error)  # noqa: PT017


class Calls:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_hostile_pickles(new: bool, tmp_path: Path) -> None:
    """A pickled call in place of the model, or among its data, is not made."""
    mark, out = tmp_path / "mark", tmp_path / "ours.safetensors"
    hostile = Calls(Path.touch, mark)
    held = {"model_state": {}, "model_config": {}, "extra": ["MemTransformerLM", hostile]}
    for name, value in (("model.pt", [hostile, "MemTransformerLM"]), ("checkpoint_best.pt", held)):
        torch.save(value, tmp_path / name, _use_new_zipfile_serialization=new)
        with pytest.raises(TxlError, match=r"must hold a MemTransformerLM, got 'list'|KeyError: 'attn_type'"):
            convert(tmp_path / name, out)
    assert not mark.exists()


def test_files_that_claim_more_than_they_hold(files: Path, tmp_path: Path) -> None:
    """A compressed archive, and tensors that repeat one number."""
    out = tmp_path / "ours.safetensors"
    with zipfile.ZipFile(files / "zip" / "model.pt") as whole, zipfile.ZipFile(tmp_path / "model.pt", "w") as bomb:
        for entry in whole.infolist():
            bomb.writestr(entry.filename, whole.read(entry), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(TxlError, match=r"torch\.save compresses nothing"):
        convert(tmp_path / "model.pt", out)
    held = pickles.load(files / "zip" / "checkpoint_last.pt")
    rows, last = 2**31 - 36, "word_emb.emb_layers.3.weight"
    held["model_config"]["n_token"] = 35 + rows
    width = held["model_state"][last].size(1)
    held["model_state"] |= {
        last: torch.zeros(1, 1).expand(rows, width), "crit.out_layers_biases.3": torch.zeros(1).expand(rows)
    }  # fmt: skip
    torch.save({k: x for k, x in held.items() if k not in ("args", "vocab")}, tmp_path / "checkpoint_last.pt")
    with pytest.raises(TxlError, match="claims more than the file has"):
        convert(tmp_path / "checkpoint_last.pt", out)


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
LEGACY: dict[str, tuple[bytes, str]] = {
    "a function": (b"cos\nsystem\nX\x04\x00\x00\x00true\x85R.", "Inert"),
    "a class of torch": (b"ctorch.nn\nModule\n)R.", "Inert"),
    "a loader's attribute": (REBUILD + b"}X\x05\x00\x00\x00_callNsb.", "Inert"),
    "a loader's slot": (REBUILD + b"N}X\x05\x00\x00\x00_callNs\x86b.", "Inert"),
    "a loader of nothing": (REBUILD + b"(NK\x00))tR.", "a tensor of no known form"),
    "a loader of a number": (REBUILD + b"K\x01R.", "calls Inert"),
    "a call of data": (b"]K\x01\x85R.", "calls list"),
    "a huge storage": (STORAGE + b"\x8a\x08" + (2**60).to_bytes(8, "little") + b"Nt" + b"Q.", "claims more than"),
    "storages that are not there": (STORAGE + b"K\x04Nt" + b"Q.", "its storages are not those that it lists"),
    "a tensor outside": (REBUILD + b"(" + STORAGE + b"K\x04NtQK\x02K\x03\x85K\x01\x85tR.", r"\[3\] in a storage of 4"),
    "a tensor before": (REBUILD + b"(" + STORAGE + b"K\x04NtQJ\xff\xff\xff\xffK\x01\x85K\x01\x85tR.", "no known form"),
    "a tensor of one number": (REBUILD + b"(" + STORAGE + b"K\x04NtQK\x00J\xff\xff\xff\x7f\x85K\x00\x85tR.", "claims more"),
    "items for a tensor": (STORAGE + b"K\x04NtQN]s.", "adds items to Tensor"),
    "a key without bounds": (b"}" + b")" + b"\x85" * 100_000 + b"K\x01s.", "a key that is tuple"),
    "a short persistent id": (b"X\x06\x00\x00\x00module\x85Q.", "a persistent id of no known form"),
    "a textual persistent id": (b"Pmodule\n.", "a persistent id of no known form"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGACY)
def test_hostile_pickles_of_the_older_format(name: str, tmp_path: Path) -> None:
    """Nothing is called, and no attribute of torch changes."""
    content, message = LEGACY[name]
    head = io.BytesIO()
    torch.save(None, head, _use_new_zipfile_serialization=False)
    none = head.getvalue().rindex(b"\x80\x02N.")  # the pickle of the object itself
    path = tmp_path / "model.pt"
    path.write_bytes(head.getvalue()[:none] + b"\x80\x02" + content + pickle.dumps([], 2))
    if message == "Inert":
        assert isinstance(pickles.load(path), Inert)
    else:
        with pytest.raises(TxlError, match=f"not a whole file of tensors and data .*({message})"):
            pickles.load(path)
    assert not vars(torch._utils._rebuild_tensor_v2)


def test_unbounded_key_in_a_zip(tmp_path: Path) -> None:
    """Hashing it would end the process in torch's reader."""
    with zipfile.ZipFile(tmp_path / "vocab.bin", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}" + b")" + b"\x85" * 300_000 + b"K\x01s.")
        archive.writestr("a/version", "3")
    with pytest.raises(TxlError, match="a key that is tuple"):
        pickles.load(tmp_path / "vocab.bin")


def test_endless_modules(tmp_path: Path) -> None:
    """A module that occurs twice, holds itself, is nested too deeply, or has a name that is no
    string; long names are cut."""

    def module(children: dict[Any, Any], parameters: dict[Any, Any] | None = None) -> Inert:
        made = Inert("module")
        made.state = {"_modules": children, "_parameters": parameters or {}, "_buffers": {}}
        return made

    shared, itself, deep = module({}), module({}), module({})
    itself.state["_modules"]["a"] = itself
    for _ in range(100):
        deep = module({"a": deep})
    for bad in (module(dict.fromkeys("ab", shared)), itself, deep, module({}, {3: torch.zeros(1)})):
        with pytest.raises(ValueError, match=r"modules without end|format"):
            pytorch._collect(bad, "", {}, set())
    found: dict[str, torch.Tensor] = {}
    pytorch._collect(module({}, {"n" * 1000: torch.zeros(1)}), "", found, set())
    assert list(found) == ["n" * 100]


@pytest.mark.parametrize("first", [True, False])
def test_parameter_under_two_names(first: bool, files: Path, tmp_path: Path) -> None:
    """The original's name beside NVIDIA's, in either order."""
    held = pickles.load(files / "zip" / "checkpoint_last.pt")
    state, more = held["model_state"], {"crit.out_layers.0.bias": torch.zeros(10)}
    held = {"model_config": held["model_config"], "model_state": more | state if first else state | more}
    torch.save(held, tmp_path / "checkpoint_last.pt")
    with pytest.raises(TxlError, match="is there under two names"):
        convert(tmp_path / "checkpoint_last.pt", tmp_path / "ours.safetensors", files / "zip" / "cache.pt")
