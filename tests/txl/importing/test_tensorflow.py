"""The paper's TensorFlow checkpoints, converted by examples/tensorflow_checkpoint.py."""

import importlib.machinery
import runpy
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_helpers import in_process, one_line, succeeded
from hugging_face_model import transfo_xl
from safetensors.numpy import save_file
from torch import Tensor

import txl
from txl.errors import TxlError
from txl.importing.checkpoint import convert
from txl.importing.names import Lengths

SCRIPT = Path(__file__).parents[3] / "examples" / "tensorflow_checkpoint.py"
MEM_LEN = 6
LENGTHS = Lengths(MEM_LEN, 5, 4, False)
# Names and shapes of the paper's TensorFlow code; values are drawn anew from each name.
V, N, D_MODEL, H, D, D_INNER = 30, 2, 16, 2, 8, 20
CUTOFFS, DIV_VAL = (8, 16), 2


def values(name: str, shape: tuple[int, ...]) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """Return the values of a variable."""
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return (0.3 * drawn).astype(np.float32)


def _layers(untied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"r_{kind}_bias": (N, H, D) if untied else (H, D) for kind in ("w", "r")}
    for n in range(N):
        shapes |= {
            f"layer_{n}/rel_attn/qkv/kernel": (D_MODEL, 3 * H * D),
            f"layer_{n}/rel_attn/r/kernel": (D_MODEL, H * D),
            f"layer_{n}/rel_attn/o/kernel": (H * D, D_MODEL),
            f"layer_{n}/ff/layer_1/kernel": (D_MODEL, D_INNER),
            f"layer_{n}/ff/layer_1/bias": (D_INNER,),
            f"layer_{n}/ff/layer_2/kernel": (D_INNER, D_MODEL),
            f"layer_{n}/ff/layer_2/bias": (D_MODEL,),
        }
        for part in ("rel_attn", "ff"):
            shapes |= {f"layer_{n}/{part}/LayerNorm/{x}": (D_MODEL,) for x in ("beta", "gamma")}
    return shapes


def words(same_dim: bool) -> dict[str, tuple[int, ...]]:
    """Return shapes of bins with div_val 2: all projections but the first are tied, or all if
    the first bin has none."""
    shapes, ends = _layers(False), (0, *CUTOFFS, V)
    for i in range(3):
        rows, width = ends[i + 1] - ends[i], D_MODEL // DIV_VAL**i
        shapes[f"adaptive_embed/cutoff_{i}/lookup_table"] = (rows, width)
        shapes[f"adaptive_softmax/cutoff_{i}/b"] = (rows,)
        if i or same_dim:
            shapes[f"adaptive_embed/cutoff_{i}/proj_W"] = (width, D_MODEL)
    if same_dim:
        shapes["adaptive_softmax/cutoff_0/proj"] = (D_MODEL, D_MODEL)
    shapes["adaptive_softmax/cutoff_0/cluster_W"] = (2, D_MODEL)
    shapes["adaptive_softmax/cutoff_0/cluster_b"] = (2,)
    return shapes


def one_table() -> dict[str, tuple[int, ...]]:
    """Return shapes of bins of one table narrower than the model."""
    shapes = _layers(False) | {
        "adaptive_embed/lookup_table": (V, 12),
        "adaptive_embed/proj_W": (12, D_MODEL),
        "adaptive_softmax/cutoff_0/proj": (12, D_MODEL),
        "adaptive_softmax/cutoff_0/cluster_W": (2, 12),
        "adaptive_softmax/cutoff_0/cluster_b": (2,),
    }
    ends = (0, *CUTOFFS, V)
    return shapes | {f"adaptive_softmax/cutoff_{i}/b": (ends[i + 1] - ends[i],) for i in range(3)}


def characters() -> dict[str, tuple[int, ...]]:
    """Return shapes without bins, as for enwik8, with biases in each layer."""
    return _layers(True) | {"adaptive_embed/lookup_table": (V, D_MODEL), "adaptive_softmax/bias": (V,)}


CHECKPOINTS = {
    "words": words(True),
    "words-same-dim": words(False),
    "one-table": one_table(),
    "characters": characters(),
}


def held(kind: str) -> "dict[str, np.ndarray[Any, Any]]":
    """Return the variables of a checkpoint after training, with Adam's slots and the step count."""
    found = {f"transformer/{name}": values(f"transformer/{name}", shape) for name, shape in CHECKPOINTS[kind].items()}
    slots = {f"{name}/{slot}": np.zeros_like(x) for name, x in found.items() for slot in ("Adam", "Adam_1")}
    counts = {"beta1_power": np.float32(0.9), "beta2_power": np.float32(0.99), "global_step": np.int64(3)}
    return found | slots | counts


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs the script with a fake TensorFlow; it returns the script's file."""

    def write(kind: str) -> Path:
        def load_checkpoint(prefix: str) -> Any:
            assert prefix == "model.ckpt-3"
            shapes = {name: list(x.shape) for name, x in held(kind).items()}
            return SimpleNamespace(get_variable_to_shape_map=lambda: shapes, get_tensor=held(kind).__getitem__)

        path = tmp_path / f"{kind}.safetensors"
        spec = importlib.machinery.ModuleSpec("tensorflow", None)  # torch looks whether there is one
        fake = SimpleNamespace(train=SimpleNamespace(load_checkpoint=load_checkpoint), __spec__=spec)
        monkeypatch.setitem(sys.modules, "tensorflow", fake)
        monkeypatch.setattr(sys, "argv", ["it", "model.ckpt-3", str(path)])
        runpy.run_path(str(SCRIPT))
        return path

    return write


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["<eos>", "<unk>", *(f"w{n}" for n in range(V - 2))]))
    return path


def test_logits(written: Any, tmp_path: Path, words: Path) -> None:
    """Logits over three segments, by transformers' own map from TensorFlow's names."""
    module = pytest.importorskip(
        "transformers.models.deprecated.transfo_xl.modeling_transfo_xl", reason="needs transformers==4.37.2"
    )
    options = {"vocab_size": V, "n_layer": N, "d_model": D_MODEL, "n_head": H, "d_head": D,
               "d_inner": D_INNER, "mem_len": MEM_LEN, "clamp_len": 4, "cutoffs": list(CUTOFFS), "div_val": 2,
               "d_embed": D_MODEL, "layer_norm_epsilon": 1e-12}  # fmt: skip
    model: Any = transfo_xl(**options)
    for name, target in module.build_tf_to_pytorch_map(model, model.config).items():
        value = torch.from_numpy(values(name, CHECKPOINTS["words"][name.removeprefix("transformer/")]))
        turned = value.t() if "kernel" in name or "proj" in name else value  # as its loader does
        for p in target if isinstance(target, list) else [target]:
            p.data.copy_(turned)
    out = tmp_path / "ours.safetensors"
    convert(written("words"), out, words, lengths=LENGTHS)
    loaded = txl.load(out)
    assert (loaded.model.config.initial_memory, loaded.model.config.norm_eps, loaded.segment) == ("zeros", 1e-12, 5)
    mems = memory = None
    torch.manual_seed(0)
    with torch.no_grad():
        for length in (7, 5, 3):
            tokens = torch.randint(V, (2, length))
            want = model(tokens, mems=mems)
            mems = want.mems
            logits, memory = loaded.model(tokens, memory)
            torch.testing.assert_close(logits.log_softmax(-1), want.prediction_scores, rtol=1e-4, atol=1e-4)


def _layer(name: str, kind: str) -> Tensor:
    return torch.from_numpy(values(f"transformer/{name}", CHECKPOINTS[kind][name]))


def test_without_bins(written: Any, tmp_path: Path, words: Path) -> None:
    """Each layer has biases; same_length sees mem_len + 1 keys."""
    model = convert(
        written("characters"), tmp_path / "a.safetensors", words, lengths=Lengths(MEM_LEN, same_length=True)
    ).model
    assert (model.config.window, model.config.untie_r, len(model.config.embed_widths)) == (MEM_LEN + 1, True, 1)
    assert torch.equal(model.layers[1].attention.content_bias, _layer("r_w_bias", "characters")[1])
    assert torch.equal(model.softmax.bias, _layer("adaptive_softmax/bias", "characters"))


def test_bins_of_one_table(written: Any, tmp_path: Path, words: Path) -> None:
    """The bins' biases become one vector; the table is narrower than the model."""
    model = convert(written("one-table"), tmp_path / "a.safetensors", words, lengths=LENGTHS).model
    c = model.config
    assert (c.div_val, c.cutoffs, c.d_embed, c.tie_projs) == (1, CUTOFFS, 12, "tail")
    biases = [_layer(f"adaptive_softmax/cutoff_{i}/b", "one-table") for i in range(3)]
    assert torch.equal(model.softmax.bias, torch.cat(biases))
    assert torch.equal(model.softmax.projections["0"], _layer("adaptive_softmax/cutoff_0/proj", "one-table").t())
    assert torch.equal(model.softmax.projections["2"], _layer("adaptive_embed/proj_W", "one-table").t())


def test_no_projection_of_the_same_width(written: Any, tmp_path: Path, words: Path) -> None:
    model = convert(written("words-same-dim"), tmp_path / "a.safetensors", words, lengths=LENGTHS).model
    assert not model.config.proj_same_dim
    assert sorted(model.embedding.projections) == sorted(model.softmax.projections) == ["1", "2"]


def test_import_command(written: Any, tmp_path: Path, words: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, source = tmp_path / "ours.safetensors", written("words")
    one_line(in_process(capfd, "import", source, out, "--vocabulary", words), "give --mem-len")
    done = succeeded(in_process(capfd, "import", source, out, "--vocabulary", words, "--mem-len", 6, "--segment", 5))
    assert "from tensorflow" in done.stdout
    assert "w" in in_process(capfd, "generate", out, "--prompt", "w1 w2", "--count", 4).stdout


def test_tensorflows_own_files_name_the_script(tmp_path: Path) -> None:
    """Prefix, file and folder of a TensorFlow checkpoint: the error names the script."""
    for name in ("model.ckpt-3.index", "model.ckpt-3.data-00000-of-00001", "checkpoint"):
        (tmp_path / name).write_bytes(b"anything")
    for source in ("model.ckpt-3", "model.ckpt-3.index", "model.ckpt-3.data-00000-of-00001", ""):
        with pytest.raises(TxlError, match=rf"^{tmp_path / source}: .* python examples/{SCRIPT.name} PREFIX OUT"):
            convert(tmp_path / source, tmp_path / "ours.safetensors", lengths=LENGTHS)


def test_damaged_files(written: Any, tmp_path: Path, words: Path) -> None:
    """Truncated files, other models, missing tensors, other shapes."""
    out, whole = tmp_path / "ours.safetensors", held("words")
    name, content = "transformer/layer_0/ff/layer_2/kernel", written("words").read_bytes()
    for harmed, message in (
        ({"transformer/r_w_bias": whole["transformer/r_w_bias"]}, "not a checkpoint as its code writes it .KeyError"),
        (whole | {"other": np.zeros(2)}, "unknown tensors: other"),
        (whole | {"transformer/other": np.zeros(2)}, "unknown tensors: other"),
        ({key: x for key, x in whole.items() if key != name}, "missing tensors: layers.0.pos_ff.CoreNet.3.weight"),
        (whole | {name: np.zeros((3, 3), np.float32)}, r"has shape \[3, 3\], the configuration needs \[16, 20\]"),
        (whole | {name: np.zeros(9, np.float32)}, "must be a matrix, got shape"),
    ):
        save_file({key: np.asarray(x) for key, x in harmed.items()}, tmp_path / "a.safetensors")
        with pytest.raises(TxlError, match=message):
            convert(tmp_path / "a.safetensors", out, words, lengths=LENGTHS)
    for cut in range(0, len(content), len(content) // 40):
        (tmp_path / "a.safetensors").write_bytes(content[:cut])
        with pytest.raises(TxlError, match=r"a\.safetensors: cannot be read"):
            convert(tmp_path / "a.safetensors", out, words, lengths=LENGTHS)
    assert not out.exists()
