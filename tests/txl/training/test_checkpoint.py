"""Checkpoints: written atomically, never unpickled, with errors that name the fault."""

import pickle
from pathlib import Path

import pytest
import torch
from model_helpers import small_config, small_model
from safetensors.torch import save_file

from txl import TransformerXL
from txl.errors import TxlError
from txl.text.vocabulary import ByteVocabulary
from txl.training import checkpoint as checkpoints

VOCABULARY = ByteVocabulary(bytes(range(31)))


def save(path: Path | str, **options: object) -> None:
    checkpoints.save(path, small_model(**options).float(), VOCABULARY, {"step": 3}, {"extra.x": torch.arange(4)})


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path)
    model, saved = checkpoints.restore(path)
    want = small_model().float()
    assert saved.config == want.config
    assert saved.vocabulary == VOCABULARY
    assert saved.state == {"step": 3}
    assert torch.equal(saved.part("extra")["x"], torch.arange(4))
    for (name, a), b in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not list(tmp_path.glob(".*"))


def test_folder_means_best_then_last(tmp_path: Path) -> None:
    save(tmp_path / "last.safetensors")
    assert checkpoints.load(tmp_path).path.name == "last.safetensors"
    save(tmp_path / "best.safetensors")
    assert checkpoints.load(tmp_path).path.name == "best.safetensors"


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("exploded"),))


def test_pickles_are_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.pt").write_bytes(pickle.dumps(Bomb()))
    torch.save({"x": torch.zeros(2)}, "b.pt")
    for name in ("a.pt", "b.pt"):
        with pytest.raises(TxlError, match=r"not a whole safetensors file .*pickled checkpoints are never loaded"):
            checkpoints.load(Path(name))
    assert not Path("exploded").exists()


def test_other_safetensors_files(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(TxlError, match="a safetensors file, but not a txl checkpoint"):
        checkpoints.load(tmp_path / "a.safetensors")
    with pytest.raises(TxlError, match=r"none.safetensors: no such checkpoint"):
        checkpoints.load(tmp_path / "none.safetensors")


def test_parameters_of_another_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path)
    saved = checkpoints.load(path)
    wider = TransformerXL(small_config(d_inner=40))
    with pytest.raises(
        TxlError, match=r"feed_forward.0.weight has shape \[32, 16\], the configuration needs \[40, 16\]"
    ):
        checkpoints.load_parameters(wider, saved)
    deeper = TransformerXL(small_config(n_layer=3))
    with pytest.raises(TxlError, match=r"parameter blocks.2.* is missing from the checkpoint"):
        checkpoints.load_parameters(deeper, saved)


def test_unwritable_paths(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TxlError, match="the checkpoint cannot be written: "):
        save(tmp_path / "file" / "a.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TxlError, match="written: Is a directory; the checkpoint written before is untouched"):
        save(tmp_path / "folder")
