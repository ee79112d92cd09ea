"""Runs in folders that others use, on files that were damaged: refused in a line, or survived."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from training_helpers import contents, trainer, unlock

import txl
from txl.errors import TxlError
from txl.text import corpus as data
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training.run import read_log, read_record


@pytest.fixture
def finished(tmp_path: Path, corpus: Corpus) -> Path:
    trainer(tmp_path / "run", corpus, steps=6, save_every=3, eval_every=6).run()
    return tmp_path / "run"


HOLD = """
import sys, time
from pathlib import Path
from txl.training.run import lock
lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path, corpus: Corpus) -> None:
    (tmp_path / "run").mkdir()
    other = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(TxlError, match="another process is training there"):
        trainer(tmp_path / "run", corpus, steps=6)
    assert os.listdir(tmp_path / "run") == [".lock"], "nothing of the first is touched"
    other.kill()
    other.communicate()
    trainer(tmp_path / "run", corpus, steps=6).advance(1)  # the system released it


def test_a_folder_that_was_removed_and_made_again_is_locked(tmp_path: Path, corpus: Corpus) -> None:
    trainer(tmp_path / "run", corpus, steps=6)
    shutil.rmtree(tmp_path / "run")
    trainer(tmp_path / "run", corpus, steps=6)
    other = subprocess.run([sys.executable, "-c", HOLD, tmp_path / "run"], capture_output=True, text=True)
    assert "another process is training there" in other.stderr


def test_a_run_that_is_resumed_is_refused_to_others(finished: Path, corpus: Corpus) -> None:
    resumed = trainer(finished, corpus, resume=True, steps=8, save_every=3, eval_every=6)
    other = subprocess.run([sys.executable, "-c", HOLD, finished], capture_output=True, text=True)
    assert "another process is training there" in other.stderr
    resumed.run()


DAMAGE = {
    "blank lines": b"\n\n{good}\n\n", "NULs": b"\0\0\0\n{good}\n", "garbage": b"%PDF-1.4\n{good}\n",
    "not UTF-8": b"\xff\xfe\n{good}\n", "a number": b"5\n{good}\n", "empty object": b"{}\n{good}\n",
    "deep": b"[" * 100_000 + b"\n{good}\n", "cut short": b'{good}\n{"step": 5, "lo',
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_log_never_stops_a_run(finished: Path, corpus: Corpus, name: str) -> None:
    good = json.dumps({"step": 3, "loss": 1.0}).encode()
    (finished / "log.jsonl").write_bytes(DAMAGE[name].replace(b"{good}", good))
    trainer(finished, corpus, resume=True, steps=8, save_every=3, eval_every=6).run()
    entries = read_log(finished / "log.jsonl")
    assert len(entries) == (finished / "log.jsonl").read_bytes().count(b"\n")
    assert entries[0] == {"step": 3, "loss": 1.0}
    assert entries[-1]["step"] == 8


def test_a_missing_log(finished: Path, corpus: Corpus) -> None:
    (finished / "log.jsonl").unlink()
    trainer(finished, corpus, resume=True, steps=8, save_every=3, eval_every=6).run()


def test_a_flipped_bit_is_refused(finished: Path) -> None:
    """Anywhere in the file: header, tensors of the model, of the optimizer, of the memory."""
    whole = (finished / "last.safetensors").read_bytes()
    for n in range(0, len(whole), max(len(whole) // 120, 1)):
        damaged = bytearray(whole)
        damaged[n] ^= 1 << (n % 8)
        (finished / "flipped.safetensors").write_bytes(damaged)
        with pytest.raises(TxlError):
            checkpoints.load(finished / "flipped.safetensors")


def rewritten(path: Path, change: object) -> None:
    """The checkpoint with another header, its checksum right."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["txl"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    text = json.dumps(header)
    save_file(tensors, path, metadata={"txl": text, "sha256": checkpoints._digest(text, tensors)})


def absurd(header: dict, tensors: dict) -> None:
    header["config"]["d_model"] = 2_000_000_000


def deep(header: dict, tensors: dict) -> None:
    header["config"]["n_layer"] = 10**9


def wrong_type(header: dict, tensors: dict) -> None:
    header["config"]["n_head"] = "two"


def other_shape(header: dict, tensors: dict) -> None:
    tensors["model.softmax.bias"] = torch.zeros(3)


@pytest.mark.parametrize("change", [absurd, deep, wrong_type, other_shape])
def test_absurd_checkpoints_are_refused_before_anything_is_allocated(finished: Path, change: object) -> None:
    rewritten(finished / "best.safetensors", change)
    with pytest.raises(TxlError):
        checkpoints.restore(finished)


def no_step(header: dict, tensors: dict) -> None:
    del header["state"]["step"]


def step_of_text(header: dict, tensors: dict) -> None:
    header["state"]["step"] = "six"


def train_of_text(header: dict, tensors: dict) -> None:
    header["state"]["train"] = "fast"


def no_memory(header: dict, tensors: dict) -> None:
    del tensors["memory.0"]


def memory_of_another_layer(header: dict, tensors: dict) -> None:
    tensors[f"memory.{header['config']['n_layer']}"] = tensors["memory.0"].clone()


def memory_of_another_width(header: dict, tensors: dict) -> None:
    tensors["memory.0"] = tensors["memory.0"][..., :-1].contiguous()


def memory_of_whole_numbers(header: dict, tensors: dict) -> None:
    tensors["memory.0"] = tensors["memory.0"].long()


def no_rng(header: dict, tensors: dict) -> None:
    tensors["rng.0.cpu"] = torch.zeros(4)


def optimizer_of_no_parameter(header: dict, tensors: dict) -> None:
    del tensors["optimizer.0.0.exp_avg"]
    tensors["optimizer.0.x.exp_avg"] = torch.zeros(2)


def optimizer_of_another_shape(header: dict, tensors: dict) -> None:
    tensors["optimizer.0.0.exp_avg"] = torch.zeros(2)


def optimizer_not_whole(header: dict, tensors: dict) -> None:
    del tensors["optimizer.0.1.exp_avg_sq"]


CHANGES = [
    no_step, step_of_text, train_of_text, no_memory, memory_of_another_layer, memory_of_another_width,
    memory_of_whole_numbers, no_rng, optimizer_of_no_parameter, optimizer_of_another_shape,
    optimizer_not_whole,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_cannot_be_resumed_is_said_and_nothing_is_lost(finished: Path, corpus: Corpus, change: object) -> None:
    before = (finished / "log.jsonl").read_bytes()
    rewritten(finished / "last.safetensors", change)
    with pytest.raises(TxlError, match=r"the checkpoint is damaged|parameter \d+\.\w+ is|exp_avg has shape"):
        trainer(finished, corpus, resume=True, steps=8, save_every=3, eval_every=6)
    assert (finished / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["average.softmax.bias", "average_count"])
@pytest.mark.parametrize("forged", [None, torch.zeros(1), torch.zeros(2, 3)], ids=["missing", "one", "more"])
def test_an_average_of_another_shape_is_damage(
    tmp_path: Path, corpus: Corpus, name: str, forged: torch.Tensor | None
) -> None:
    """Also where it could be broadcast."""
    run = trainer(tmp_path, corpus, average="ema")
    run.advance(2)
    run.save()
    unlock(tmp_path)

    def forge(header: dict, tensors: dict) -> None:
        del tensors[name]
        if forged is not None:
            tensors[name] = forged

    rewritten(tmp_path / "last.safetensors", forge)
    with pytest.raises(TxlError, match=rf"last\.safetensors: .*{name.removeprefix('average.')}"):
        trainer(tmp_path, corpus, average="ema", resume=True)


def test_a_negative_count_of_an_average_is_damage(tmp_path: Path, corpus: Corpus) -> None:
    run = trainer(tmp_path, corpus, average="ema")
    run.advance(2)
    run.save()
    unlock(tmp_path)
    rewritten(tmp_path / "last.safetensors", lambda header, tensors: tensors["average_count"].fill_(-1))
    with pytest.raises(TxlError, match="average_count must be >= 0, got -1"):
        trainer(tmp_path, corpus, average="ema", resume=True)


FORGED: list[tuple[str, object]] = [
    ("config", None), ("config", []), ("config", "abc"), ("config.d_model", "16"), ("config.n_layer", None),
    ("config.cutoffs", {"a": 1}), ("config.cutoffs", 3), ("config.dropout", True), ("config.encoding", []),
    ("config.tie_projs", {}), ("config.initial_memory", None), ("config.unknown", 1), ("config.vocab_size", 3),
    ("state", None), ("state", []), ("state", "abc"), ("state.attn_len", "a"), ("state.attn_len", 0),
    ("state.attn_len", 10**30), ("state.attn_len", 1.5), ("state.segment", None), ("state.segment", [3]),
    ("state.step", -1), ("state.step", True), ("state.step", None), ("state.best_loss", "low"),
    ("state.best_loss", float("nan")), ("state.best_loss", 10**400), ("state.train", []), ("state.corpus", 3),
    ("state.ranks", 0), ("state.ranks", "2"), ("state.losses", "abc"),
    ("state.losses", [None]), ("state.averaging", 1), ("state.unvalidated", 1), ("vocabulary", None), ("vocabulary", []),
    ("vocabulary.unit", None), ("vocabulary.unit", "letters"), ("vocabulary.dropped", 10**15),
    ("vocabulary.dropped", [300]), ("vocabulary.dropped", None), ("format", None), ("format", 2),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), FORGED, ids=lambda value: repr(value)[:20])
def test_forged_headers_are_damage_and_the_field_is_named(finished: Path, field: str, value: object) -> None:
    def forge(header: dict, tensors: dict) -> None:
        *path, last = field.split(".")
        for name in path:
            header = header[name]
        header[last] = value

    rewritten(finished / "best.safetensors", forge)
    with pytest.raises(TxlError, match=r"best\.safetensors: (the checkpoint is damaged: |checkpoint format)") as raised:
        txl.load(finished)
    assert field.rsplit(".", 1)[-1] in str(raised.value)


@pytest.mark.parametrize("train", [{"steps": "6"}, {"lr": None}, {"batch": 4.0}, {"compile": 0}, {"patience": [1]}])
def test_forged_options_of_training(finished: Path, corpus: Corpus, train: dict) -> None:
    rewritten(finished / "last.safetensors", lambda header, tensors: header["state"]["train"].update(train))
    with pytest.raises(TxlError, match=f"the checkpoint is damaged: .*{next(iter(train))}"):
        trainer(finished, corpus, resume=True, steps=8, save_every=3, eval_every=6)


@pytest.mark.parametrize("name", ["run.json", "log.jsonl", "last.safetensors", ".lock"])
def test_pipes_in_a_run_are_refused_at_once(finished: Path, corpus: Corpus, name: str) -> None:
    if name == ".lock":
        unlock(finished)
    (finished / name).unlink()
    os.mkfifo(finished / name)
    if name == "run.json":
        with pytest.raises(TxlError, match=r"holds no run .*Not a regular file"):
            read_record(finished)
        return
    with pytest.raises((TxlError, OSError), match=r"Not a regular file: '.*log.jsonl'|no such checkpoint|\.lock"):
        trainer(finished, corpus, resume=True, steps=8, save_every=3, eval_every=6)


@pytest.mark.parametrize("name", ["log.jsonl", "run.json", ".lock"])
def test_planted_links_in_a_run_are_not_followed(tmp_path: Path, corpus: Corpus, name: str) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("kept")
    run.mkdir()
    (run / name).symlink_to(victim)
    if name == ".lock":
        with pytest.raises(OSError, match=rf"Is a symbolic link: '{run}/.lock'"):
            trainer(run, corpus, steps=2)
    else:
        trained = trainer(run, corpus, steps=2)
        (run / "log.jsonl").unlink()
        (run / "log.jsonl").symlink_to(victim)  # while it runs
        with pytest.raises(OSError, match=rf"Is a symbolic link: '{run}/log.jsonl'"):
            trained.run()
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("record", ["", "[]", "5", '{"model": 3, "train": {}, "corpus": "c"}', "[" * 100_000, "\0"])
def test_damaged_records(finished: Path, record: str) -> None:
    (finished / "run.json").write_text(record)
    with pytest.raises(TxlError, match="holds no run"):
        read_record(finished)


def test_an_altered_text_is_refused(tmp_path: Path, text: Path) -> None:
    own = data.prepare(text, tmp_path / "corpus")
    trainer(tmp_path / "run", own, steps=2).run()
    tokens = bytearray((tmp_path / "corpus" / "train.bin").read_bytes())
    tokens[100] = (tokens[100] + 1) % len(own.vocabulary)
    (tmp_path / "corpus" / "train.bin").write_bytes(tokens)
    altered = data.load(tmp_path / "corpus")
    with pytest.raises(TxlError, match=r"corpus/train.bin is not .*; remove the folder, then run `txl prepare` again$"):
        trainer(tmp_path / "run", altered, resume=True, steps=3)
    with pytest.raises(TxlError, match=r"corpus/train.bin is not what was prepared"):
        trainer(tmp_path / "another", altered, steps=3)
    altered.verify("valid", "test")
    (tmp_path / "corpus" / "train.bin").write_bytes(tokens[:-5])
    with pytest.raises(TxlError, match="the prepared corpus is damaged"):
        data.load(tmp_path / "corpus")


def test_what_a_killed_process_was_writing_is_removed(finished: Path, corpus: Corpus) -> None:
    for name in ("last.safetensors", "run.json", "loss.png"):
        (finished / f".{name}.0123456789abcdef.tmp").write_bytes(b"half of it")
    trainer(finished, corpus, resume=True, steps=8, save_every=3, eval_every=6)
    assert not list(finished.glob(".*.tmp"))
    assert contents(finished)
    assert os.path.exists(finished / "best.safetensors")
