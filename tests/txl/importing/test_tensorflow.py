"""TensorFlow's checkpoints, written by TensorFlow (tensorflow/write.py), read without it."""

import contextlib
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from command_helpers import in_process, one_line
from hugging_face_model import transfo_xl
from torch import Tensor

import txl
from txl.errors import TxlError
from txl.importing.bundle import Bundle
from txl.importing.checkpoint import convert
from txl.importing.crc32c import crc32c, masked
from txl.importing.foreign import Lengths
from txl.importing.leveldb import entries
from txl.importing.protobuf import parse, varint

HERE = Path(__file__).parent / "tensorflow"
MEM_LEN = 6
LENGTHS = Lengths(MEM_LEN, 5, 4, False)


def _script() -> Any:
    """tensorflow/write.py, which says what was written."""
    module = ModuleType("write")
    module.__file__ = str(HERE / "write.py")
    exec(compile((HERE / "write.py").read_text(), HERE / "write.py", "exec"), module.__dict__)
    return module


WRITE = _script()
KINDS = tuple(WRITE.CHECKPOINTS)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["<eos>", "<unk>", *(f"w{n}" for n in range(WRITE.V - 2))]))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_what_was_written(kind: str) -> None:
    bundle = Bundle(HERE / f"{kind}.ckpt-3")
    for name, shape in WRITE.CHECKPOINTS[kind].items():
        full = f"transformer/{name}"
        assert torch.equal(bundle.tensor(full), torch.from_numpy(WRITE.values(full, shape)))
    assert bundle.tensor("global_step").item() == 3
    assert bundle.tensor("beta1_power").item() == pytest.approx(0.9)


def test_the_logits_of_hugging_faces_map(tmp_path: Path, words: Path) -> None:
    """transformers' own map from TensorFlow's names to its modules, over three segments."""
    module = pytest.importorskip(
        "transformers.models.deprecated.transfo_xl.modeling_transfo_xl", reason="needs transformers==4.37.2"
    )
    options = {"vocab_size": WRITE.V, "n_layer": WRITE.N, "d_model": WRITE.D_MODEL, "n_head": WRITE.H, "d_head": WRITE.D,
               "d_inner": WRITE.D_INNER, "mem_len": MEM_LEN, "clamp_len": 4, "cutoffs": list(WRITE.CUTOFFS), "div_val": 2,
               "d_embed": WRITE.D_MODEL, "layer_norm_epsilon": 1e-12}  # fmt: skip
    model: Any = transfo_xl(**options)
    for name, target in module.build_tf_to_pytorch_map(model, model.config).items():
        value = torch.from_numpy(WRITE.values(name, WRITE.CHECKPOINTS["words"][name.removeprefix("transformer/")]))
        turned = value.t() if "kernel" in name or "proj" in name else value  # as its loader does
        for p in target if isinstance(target, list) else [target]:
            p.data.copy_(turned)
    out = tmp_path / "ours.safetensors"
    convert(HERE / "words.ckpt-3", out, words, lengths=LENGTHS)
    loaded = txl.load(out)
    assert (loaded.model.config.initial_memory, loaded.model.config.norm_eps, loaded.segment) == ("zeros", 1e-12, 5)
    mems = memory = None
    torch.manual_seed(0)
    with torch.no_grad():
        for length in (7, 5, 3):
            tokens = torch.randint(WRITE.V, (2, length))
            want = model(tokens, mems=mems)
            mems = want.mems
            logits, memory = loaded.model(tokens, memory)
            torch.testing.assert_close(logits.log_softmax(-1), want.prediction_scores, rtol=1e-4, atol=1e-4)


def _layer(name: str, kind: str) -> Tensor:
    return torch.from_numpy(WRITE.values(f"transformer/{name}", WRITE.CHECKPOINTS[kind][name]))


def test_without_bins(tmp_path: Path, words: Path) -> None:
    """Biases of their own in each layer; same_length sees mem_len + 1 keys."""
    model = convert(
        HERE / "characters.ckpt-3.index", tmp_path / "a.safetensors", words, lengths=Lengths(MEM_LEN, same_length=True)
    ).model
    assert (model.config.window, model.config.untie_r, len(model.config.bins)) == (MEM_LEN + 1, True, 1)
    assert torch.equal(model.layers[1].attention.content_bias, _layer("r_w_bias", "characters")[1])
    assert torch.equal(model.softmax.bias, _layer("adaptive_softmax/bias", "characters"))


def test_bins_of_one_table(tmp_path: Path, words: Path) -> None:
    """A bias a bin becomes one; the table is narrower than the model."""
    model = convert(HERE / "one-table.ckpt-3", tmp_path / "a.safetensors", words, lengths=LENGTHS).model
    c = model.config
    assert (c.div_val, c.cutoffs, c.d_embed, c.tie_projs) == (1, WRITE.CUTOFFS, 12, "tail")
    biases = [_layer(f"adaptive_softmax/cutoff_{i}/b", "one-table") for i in range(3)]
    assert torch.equal(model.softmax.bias, torch.cat(biases))
    assert torch.equal(model.softmax.projections["0"], _layer("adaptive_softmax/cutoff_0/proj", "one-table").t())
    assert torch.equal(model.softmax.projections["2"], _layer("adaptive_embed/proj_W", "one-table").t())


def test_no_projection_of_the_same_width(tmp_path: Path, words: Path) -> None:
    model = convert(HERE / "words-same-dim.ckpt-3", tmp_path / "a.safetensors", words, lengths=LENGTHS).model
    assert not model.config.proj_same_dim
    assert sorted(model.embedding.projections) == sorted(model.softmax.projections) == ["1", "2"]


def test_the_command(tmp_path: Path, words: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, source = tmp_path / "ours.safetensors", HERE / "words.ckpt-3"
    one_line(in_process(capfd, "import", source, out, "--vocabulary", words), "give --mem-len")
    one_line(in_process(capfd, "import", HERE, out), "holds 4 TensorFlow checkpoints; name one")
    one_line(in_process(capfd, "import", source, out, "--format", "torch"), "--format must be one of auto, pytorch")
    one_line(in_process(capfd, "import", source, out, "--format", "nvidia"), "not a checkpoint that is known")
    done = in_process(capfd, "import", source, out, "--vocabulary", words, "--mem-len", 6, "--segment", 5)
    assert done.returncode == 0, done.stderr
    assert "from tensorflow" in done.stdout
    assert "w" in in_process(capfd, "generate", out, "--prompt", "w1 w2", "--count", 4).stdout


# Published: RFC 3720, appendix B.4; and the usual check of a CRC.
CHECKSUMS = {
    b"": 0,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
}


def test_checksums() -> None:
    for data, checksum in CHECKSUMS.items():
        assert crc32c(data) == checksum
    # Long data, which are cut into stretches, against a checksum bit by bit.
    data = (
        torch.randint(256, ((1 << 15) + 77,), generator=torch.Generator().manual_seed(0))
        .to(torch.uint8)
        .numpy()
        .tobytes()
    )
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    assert crc32c(data) == register ^ 0xFFFFFFFF


def _copy(folder: Path) -> Path:
    for path in HERE.glob("words.ckpt-3*"):
        shutil.copy(path, folder)
    return folder / "words.ckpt-3"


def _repaired(block: bytes) -> bytes:
    """A block with its trailer: not compressed, and a right checksum."""
    return block + b"\0" + struct.pack("<I", masked(block + b"\0"))


def table(rows: list[tuple[bytes, bytes]]) -> bytes:
    """A LevelDB table of one block."""

    def number(value: int) -> bytes:
        out = b""
        while value >= 0x80:
            out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
        return out + bytes([value])

    def block(pairs: list[tuple[bytes, bytes]]) -> bytes:
        body = b"".join(number(0) + number(len(k)) + number(len(v)) + k + v for k, v in pairs)
        return body + struct.pack("<II", 0, 1)

    data = block(rows)
    empty = block([])
    index = block([(b"\xff", number(0) + number(len(data)))])
    at = len(data) + 5
    handles = number(at) + number(len(empty)) + number(at + len(empty) + 5) + number(len(index))
    footer = handles.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
    return _repaired(data) + _repaired(empty) + _repaired(index) + footer


def entry(shape: tuple[int, ...], offset: int = 0, size: int = 4, shard: int = 0, dtype: int = 1) -> bytes:
    def number(value: int) -> bytes:
        out = b""
        while value >= 0x80:
            out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
        return out + bytes([value])

    dims = b"".join(b"\x12" + number(len(b"\x08" + number(n))) + b"\x08" + number(n) for n in shape)
    return (b"\x08" + number(dtype) + b"\x12" + number(len(dims)) + dims + b"\x18" + number(shard) + b"\x20" + number(offset)
            + b"\x28" + number(size) + b"\x35" + struct.pack("<I", masked(bytes(4))))  # fmt: skip


HEADER = (b"", b"\x08\x01")
HARMED: dict[str, tuple[bytes, str]] = {
    "outside": (table([HEADER, (b"a", entry((1,), offset=2**40))]), "a is outside of words.ckpt-3.data"),
    "twice": (table([HEADER, (b"a", entry((1,), size=20_000)), (b"b", entry((1,), size=20_000))]), "b is outside of"),
    "another file": (table([HEADER, (b"a", entry((1,), shard=7))]), "a lies in data file 7 of 1"),
    "no header": (table([(b"a", entry((1,)))]), "has no header"),
    "many files": (table([(b"", b"\x08\xff\xff\xff\x7f")]), "data files"),
    "big-endian": (table([(b"", b"\x08\x01\x10\x01")]), "byte order 1"),
    "out of order": (table([HEADER, (b"b", entry((1,))), (b"a", entry((1,)))]), "keys are not in order"),
    "no message": (table([HEADER, (b"a", b"\x0f")]), "wire type 7"),
    "a field cut off": (table([HEADER, (b"a", b"\x12\x50")]), "a field is cut off"),
    "slices": (table([HEADER, (b"a", entry((1,)) + b"\x3a\x00")]), "kept in slices"),
    "no name": (table([HEADER, (b"\xff", entry((1,)))]), "codec"),
    "a name without end": (table([HEADER, (b"a" * 2000, entry((1,)))]), "a name without end"),
    "nothing": (b"", "no table"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMED)
def test_a_harmed_index(name: str, tmp_path: Path) -> None:
    prefix = _copy(tmp_path)
    content, message = HARMED[name]
    (tmp_path / "words.ckpt-3.index").write_bytes(content)
    with pytest.raises(TxlError, match=f"words.ckpt-3.index: .*{message}"):
        Bundle(prefix)


@pytest.mark.parametrize(
    ("written", "message"),
    [(entry((2,)), r"of shape \[2\] cannot have 4 bytes"), (entry((2**62, 4)), "cannot have 4 bytes"),
     (entry((1,), dtype=7), "is of type 7, which is not read"), (entry((1,)), "is damaged")],
    ids=["another size", "a huge size", "strings", "a checksum"],
)  # fmt: skip
def test_a_harmed_entry(written: bytes, message: str, tmp_path: Path) -> None:
    prefix = _copy(tmp_path)
    (tmp_path / "words.ckpt-3.index").write_bytes(table([HEADER, (b"a", written)]))
    with pytest.raises(TxlError, match=message):
        Bundle(prefix).tensor("a")


def test_truncated_and_altered(tmp_path: Path, words: Path) -> None:
    """Every byte of the index, and the data: always an error, as both have checksums; the padding
    of the footer apart."""
    prefix, out = _copy(tmp_path), tmp_path / "ours.safetensors"
    index, data = tmp_path / "words.ckpt-3.index", tmp_path / "words.ckpt-3.data-00000-of-00001"
    whole = index.read_bytes()
    for at in range(len(whole) - 48):
        harmed = bytearray(whole)
        harmed[at] ^= 1 << (at % 8)
        index.write_bytes(harmed)
        with pytest.raises(TxlError):
            Bundle(prefix)
        if at % 7 == 0:
            index.write_bytes(whole[:at])
            with pytest.raises(TxlError):
                Bundle(prefix)
    index.write_bytes(whole)
    values, at = data.read_bytes(), Bundle(prefix).entries["transformer/r_w_bias"].offset
    for harmed in (values[:-1], b"", values[:at] + bytes([values[at] ^ 1]) + values[at + 1 :]):
        data.write_bytes(harmed)
        with pytest.raises(TxlError, match=r"outside of|is damaged"):
            convert(prefix, out, words, lengths=LENGTHS)
    data.unlink()
    with pytest.raises(TxlError, match="not a whole index"):
        convert(prefix, out, words, lengths=LENGTHS)
    assert not out.exists()


def test_random_bytes() -> None:
    """Never more than an error."""
    generator = torch.Generator().manual_seed(0)
    readers: list[Callable[[bytes], object]] = [parse, lambda data: varint(data, 0), lambda data: list(entries(data))]
    good = (HERE / "words.ckpt-3.index").read_bytes()
    for n in range(3000):
        data = torch.randint(256, (n % 60,), generator=generator).to(torch.uint8).numpy().tobytes()
        for reader in readers:
            for content in (data, data + good[-48:], good[: -48 - n % 50] + data + good[-48:]):
                with contextlib.suppress(ValueError):
                    reader(content)
