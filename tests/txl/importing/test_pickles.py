"""Hostile pickles give an error or inert data and run nothing; damaged ones never crash or hang."""

import collections
import contextlib
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from txl.errors import TxlError
from txl.importing import vocabulary
from txl.importing.pickles import Inert, load, tensors
from txl.text.vocabulary import WordVocabulary

DATA = {"idx2sym": ["<eos>", "<unk>", "a"], "sym2idx": collections.OrderedDict(a=2), "counter": collections.Counter("aab"),
        "numbers": [1, -2, 2**70, 1.5, None, True, (1, 2, 3), {4}, b"bytes", bytearray(b"more")]}  # fmt: skip


@pytest.mark.parametrize("protocol", range(5))
def test_data(protocol: int, tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(pickle.dumps(DATA, protocol))
    found = load(tmp_path / "it")
    assert found["idx2sym"] == DATA["idx2sym"]
    assert found["sym2idx"] == DATA["sym2idx"]
    assert isinstance(found["counter"], Inert)
    assert found["numbers"][:7] == DATA["numbers"][:7]


class Thing:
    """An object with a state."""

    def __init__(self) -> None:
        self.words = ["a", "b"]


def test_objects_are_inert(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(pickle.dumps(Thing()))
    found = load(tmp_path / "it")
    assert isinstance(found, Inert)
    assert found.kind.endswith(".Thing")
    assert found.state == {"words": ["a", "b"]}


class Calls:
    """An object that is pickled as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def hostile(mark: Path) -> dict[str, bytes]:
    """Return pickles that would touch `mark`, or that claim more data than they hold."""
    command = f"touch {mark}"
    name = str(mark).encode()
    return {
        "reduce": pickle.dumps(Calls(os.system, command)),
        "nested": pickle.dumps([{"a": (Calls(os.system, command), [Calls(exec, f"open({str(mark)!r}, 'w')")])}]),
        "global": b"cos\nsystem\n(S'" + command.encode() + b"'\ntR.",
        "inst": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'" + command.encode() + b"'\no.",
        "newobj": b"\x80\x02cpathlib\nPath\n(X" + len(name).to_bytes(4, "little") + name + b"t\x81.",
        "build of a class": b"\x80\x02ccollections\nCounter\n(N}X\x06\x00\x00\x00updateK\x01stb.",
        "build of a known class": b"\x80\x02ccollections\nOrderedDict\n}X\x06\x00\x00\x00updateK\x01sb.",
        "build of a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__code__K\x01sb.",
        "build of a dictionary": b"\x80\x02}}X\x06\x00\x00\x00updateK\x01sb.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c"
        + bytes([len(command)])
        + command.encode()
        + b"\x85R.",
        "persistent id": b"Psomewhere\n.",
        "binary persistent id": b"K\x01Q.",
        "extension": b"\x80\x02\x82\x01.",
        "a bytearray of 4 EB": b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b".",
        "a string of 4 EB": b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"a.",
        "a memo at 2**32": b"\x80\x02K\x01r\xff\xff\xff\xff.",
        "an integer of 2 GB": b"\x80\x02\x8b" + (2**31 - 1).to_bytes(4, "little") + b"\x01.",
        "a frame of 4 EB": b"\x80\x04\x95" + (2**62).to_bytes(8, "little") + b"K\x01.",
        "marks without end": b"(" * 100_000 + b".",
        "nothing": b"",
        "text": b"not a pickle at all",
    }


SURVIVOR = """
import collections, resource, sys, torch
from pathlib import Path
from txl.errors import TxlError
from txl.importing.pickles import Inert, Unpickler, load

def known():
    things = (collections.Counter, collections.OrderedDict, torch.Tensor, torch._utils._rebuild_tensor_v2, Inert, Unpickler)
    return [dict(vars(x)) for x in things]


before = known()
resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
for file in map(Path, sys.argv[1:]):
    try:
        load(file)
    except TxlError:
        pass
    assert known() == before
    print(file.name, flush=True)
"""


def test_hostile_pickles_run_nothing(tmp_path: Path) -> None:
    """A process with 16 GiB of address space prints each name after loading the file."""
    mark, files = tmp_path / "mark", []
    for name, content in hostile(mark).items():
        files.append(tmp_path / name)
        files[-1].write_bytes(content)
    done = subprocess.run([sys.executable, "-c", SURVIVOR, *files], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [file.name for file in files], done.stderr
    assert not mark.exists()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4))
def test_damaged_pickles(tmp_path_factory: pytest.TempPathFactory, seed: int, protocol: int) -> None:
    damaged = bytearray(pickle.dumps(DATA, protocol))
    generator = random.Random(seed)
    for _ in range(generator.randint(1, 8)):
        damaged[generator.randrange(len(damaged))] = generator.randrange(256)
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(damaged[: generator.randint(0, len(damaged))])
    with contextlib.suppress(TxlError):
        load(path)


class Vocab:
    def __init__(self, words: list[str]) -> None:
        self.idx2sym, self.lower_case = words, False


class Corpus:
    def __init__(self, words: list[str]) -> None:
        self.vocab, self.train = Vocab(words), torch.arange(3)


class Other:
    pass


@pytest.mark.parametrize("module", ["__main__", "data_utils", "package.pytorch.data_utils"])
@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
def test_classes_are_known_by_name(kind: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class is known by its name, in any module: Vocab and Corpus, no other."""
    made = type(sys)(module)
    for part in range(module.count(".") + 1):
        monkeypatch.setitem(sys.modules, ".".join(module.split(".")[: part + 1]), made)
    for known in (Vocab, Corpus, Other):
        monkeypatch.setattr(known, "__module__", module)
        monkeypatch.setattr(made, known.__name__, known, raising=False)
    words, path = ["<eos>", "<unk>", "a"], tmp_path / "cache.pt"

    def save(value: object) -> None:
        if kind == "pickle":
            path.write_bytes(pickle.dumps(value))
        else:
            torch.save(value, path, _use_new_zipfile_serialization=kind == "zip")

    for value in (Vocab(words), Corpus(words)):
        save(value)
        found = vocabulary.read(path)
        assert isinstance(found, WordVocabulary)
        assert found.words == tuple(words)
    save([Other(), *words])
    with pytest.raises(TxlError, match="holds no vocabulary"):
        vocabulary.read(path)


def test_flipped_bits_change_no_tensor(tmp_path: Path) -> None:
    path, generator = tmp_path / "a.bin", random.Random(0)
    held = {f"layer.{n}.weight": torch.randn(6, 7) for n in range(4)}
    torch.save(held, path)
    whole, refused = path.read_bytes(), 0
    for _ in range(600):
        altered = bytearray(whole)
        for _ in range(generator.choice((1, 1, 3))):
            altered[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(altered)
        try:
            found = tensors(path)
        except TxlError:
            refused += 1
            continue
        assert list(found) == list(held)
        assert all(torch.equal(found[name], x) for name, x in held.items())
    assert 300 < refused < 600


class Sized:
    """A tensor with 64 axes of one size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __reduce__(self) -> Any:
        shape, storage = (self.size,) * 64, torch.storage.TypedStorage(wrap_storage=torch.zeros(4).untyped_storage(),
                                                                       dtype=torch.float32, _internal=True)  # fmt: skip
        return torch._utils._rebuild_tensor_v2, (storage, 0, shape, shape, False, {})


@pytest.mark.parametrize("size", [2**63, 2**10_000], ids=["2**63", "2**10000"])
def test_sizes_of_a_tensor_have_63_bits(size: int, tmp_path: Path) -> None:
    """The product of 64 long integers takes minutes."""
    torch.save({"x": Sized(size)}, tmp_path / "x.pt")
    with pytest.raises(TxlError, match="a tensor of no known form"):
        load(tmp_path / "x.pt")
