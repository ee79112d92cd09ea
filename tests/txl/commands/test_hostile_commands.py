"""Commands with extreme options, closed outputs and odd files: results, or one-line errors."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from command_helpers import SMALL, Run, called, one_line, succeeded
from training_helpers import unlock

from txl.commands.cli import app
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints

TXL = [sys.executable, "-m", "txl"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --run {tmp}/r --data {corpus} --d-model 100000000", "there is not enough memory for these sizes"),
        ("prepare {tmp}/a\nb/c --data {tmp}/a\nb", "a\\nb"),
        ("train --run {tmp}/r --data {corpus} --minutes inf", "--minutes must be > 0 and finite"),
        ("generate {run} --device meta", "device must be cpu, cuda or auto, got 'meta'"),
        ("generate {run} --device mps:9", "device"),
        ("demo --minutes inf --run {tmp}/r", "--minutes must be > 0 and finite, got inf"),
    ],
)
def test_options_out_of_range(txl: Run, run: Path, corpus: Corpus, tmp_path: Path, command: str, words: str) -> None:
    done = txl(*command.format(run=run, corpus=corpus.folder, tmp=tmp_path).split(" "))
    one_line(done, words)


@pytest.mark.parametrize(
    "command",
    [
        "eval {run} --attn-len 1000000000",
        "eval {run} --segment 1000000000 --attn-len 64",
        "eval {run} --segment 1000000000 --attn-len 64 --zeros",
        "eval {run} --batch 1000000000",
        "generate {run} --attn-len 1000000000 --count 4",
        "generate {run} --temperature 1e-46 --count 4",
        "generate {run} --temperature 1e-310 --count 4",
        "generate {run} --top-p 1e-300 --count 4",
        "train --run {tmp}/r --data {corpus} {small} --mem-len 1000000000",
        "train --run {tmp}/r --data {corpus} {small} --warmup 100000000000000000000",
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_large_numbers_are_accepted(txl: Run, run: Path, corpus: Corpus, tmp_path: Path, command: str) -> None:
    succeeded(txl(*command.format(run=run, corpus=corpus.folder, tmp=tmp_path, small=" ".join(SMALL)).split()))


BASES = {
    "train": "--run {tmp}/r --data {corpus} {small}", "eval": "{run}", "generate": "{run} --count 4",
    "prepare": "{tmp}/c --data {text}",
}  # fmt: skip


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", BASES)
def test_every_option_refuses_invalid_numbers(
    txl: Run, run: Path, corpus: Corpus, text: Path, tmp_path: Path, command: str
) -> None:
    """Every option that is a number: one line, or a usage error, or done."""
    options = [x for x in typer.main.get_command(app).get_command(None, command).params if x.opts[0].startswith("--")]
    numbers = [
        x.opts[0] for x in options if {"int", "float"} & set(re.findall(r"\w+", str(x.type_descriptor.annotation)))
    ]
    assert len(numbers) >= 2, numbers
    paths = {"run": run, "corpus": corpus.folder, "text": text, "tmp": tmp_path, "small": " ".join(SMALL)}
    for option in numbers:
        for value in ("-1", "nan", "9" * 40, "0.5"):
            if (option, value) == ("--count", "9" * 40):  # of tokens to generate: as asked
                continue
            done = txl(command, *BASES[command].format(**paths).split(), option, value)
            assert done.returncode in (0, 1, 2), (option, value, done)
            if done.returncode == 1:
                one_line(done, "")
            assert "Traceback" not in done.stderr
            assert done.returncode != 0 or value not in ("-1", "nan"), (option, value)
            for made in ("r", "c"):
                shutil.rmtree(tmp_path / made, ignore_errors=True)


NOT_FINITE = {
    "generate {model}": "the model's predictions are not finite",
    "generate {model} --temperature 0": "the model's predictions are not finite",
    "eval {model} --data {corpus}": "the loss of the text is nan: the model's parameters are damaged",
    "eval {model} --data {corpus} --method segments": "the loss of the text is nan",
    "eval {model} --data {corpus} --method sliding --limit 20": "the loss of the text is nan",
    "eval {model} --data {corpus} --counting released": "the loss of the text is nan",
    "recl {model} --data {corpus} --step 8 --contexts 4 --out {tmp}": "the losses of damaged are not all finite",
    "attention {model} --data {corpus} --window 16 --limit 200 --out {tmp}": "the attention is not finite",
    "attention {model} --data {corpus} --window 16 --limit 200 --out {tmp} --heads 1": "the attention is not finite",
}


@pytest.mark.parametrize("command", NOT_FINITE)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_results_are_refused(
    txl: Run, run: Path, corpus: Corpus, tmp_path: Path, command: str, value: float
) -> None:
    """Nothing is written."""
    model, saved = checkpoints.restore(run)
    with torch.no_grad():
        model.softmax.bias.fill_(value)
        model.layers[0].attention.qkv.weight[0] = value
    path = tmp_path / "damaged.safetensors"
    checkpoints.save(path, model, saved.vocabulary, saved.state, {})
    one_line(txl(*command.format(model=path, corpus=corpus.folder, tmp=tmp_path).split()), NOT_FINITE[command])
    assert {each.name for each in tmp_path.iterdir()} <= {path.name, ".lock"}


@pytest.mark.parametrize("command", ["eval {run} --data {tmp}/t.txt", "generate {run} --count 4"])
def test_zeros_beyond_the_text_are_refused(txl: Run, run: Path, text: Path, tmp_path: Path, command: str) -> None:
    """They would fill the memory."""
    (tmp_path / "t.txt").write_bytes(text.read_bytes()[:300])
    done = txl(*command.format(run=run, tmp=tmp_path).split(), "--zeros", "--attn-len", 10**8)
    one_line(done, "attn_len must be at most 65,536 for a text of ")


@pytest.mark.slow
def test_training_continues_when_its_output_is_closed(corpus: Corpus, tmp_path: Path) -> None:
    """`txl train | head -1`"""
    options = [*SMALL, "--steps", "40", "--eval-every", "2", "--save-every", "100"]
    command = [*TXL, "train", "--run", tmp_path / "r", "--data", corpus.folder, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        child.stdout.close()
        errors = child.stderr.read()
    assert child.returncode == 0
    assert errors.strip() == "the reader of the output is gone; the command goes on without it"
    assert checkpoints.load(tmp_path / "r" / "last.safetensors").state["step"] == 40


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_outputs(run: Path, closed: str) -> None:
    command = f"'{sys.executable}' -m txl generate '{run}' --count 3 {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_output_to_a_full_disk(run: Path) -> None:
    command = f"'{sys.executable}' -m txl generate '{run}' --count 3 > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")


def test_single_process_commands_refuse_torchrun(txl: Run, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    one_line(txl("eval", run), "txl eval runs in one process; torchrun is for txl train")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "there is not enough memory for these sizes (MemoryError)"),
        (OverflowError("too large"), "a number is beyond what can be computed with (too large)"),
        (
            RuntimeError("CUDA out of memory. Tried\nmuch"),
            "there is not enough memory for these sizes (CUDA out of memory.",
        ),
    ],
)
def test_errors_of_memory_and_range(
    txl: Run, run: Path, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("txl.language_model.generate", fails)
    one_line(txl("generate", run), words)


def test_unexpected_error_raises(txl: Run, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txl.language_model.generate", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        txl("generate", run)


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a corpus of its own."""
    folder = tmp_path_factory.mktemp("whole") / "r"
    assert called("train", "--run", folder, "--data", text, *SMALL) == 0
    unlock(folder)
    return folder


HELD = """
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from txl.training.run import lock
for line in sys.stdin:
    lock(Path(line.removesuffix("\\n")))
    print("held", flush=True)
"""


@pytest.fixture(scope="module")
def hold() -> Iterator[Callable[[Path], None]]:
    """A function that has another process lock a run until the module's tests are done."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HELD], **pipes) as holder:

        def locked(run: Path) -> None:
            print(run, file=holder.stdin, flush=True)
            assert holder.stdout.readline() == "held\n"

        yield locked
        holder.stdin.close()


@pytest.mark.parametrize(
    "command", ["train --run {run} --data {text}", "train --run {run} --resume", "demo --run {run} --data {text}"]
)
def test_locked_run_is_not_changed(
    txl: Run, whole: Path, tmp_path: Path, hold: Callable[[Path], None], command: str
) -> None:
    held = shutil.copytree(whole, tmp_path / "r")
    if "resume" not in command:  # as before its first checkpoint
        for name in ("last.safetensors", "best.safetensors"):
            (held / name).unlink()
    other = tmp_path / "other.txt"
    other.write_text("another text " * 100)
    before = {path: path.read_bytes() for path in sorted(held.rglob("*")) if path.is_file()}
    hold(held)
    done = txl(*command.format(run=held, text=other).split())
    one_line(done, "It exists already" if "prepare" in command else f"{held}: another process is training there")
    assert {path: path.read_bytes() for path in sorted(held.rglob("*")) if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("command", ["export", "import"])
def test_killed_export_and_import_leave_no_result(txl: Run, run: Path, tmp_path: Path, command: str) -> None:
    """The next one removes the temporary files."""
    source, out = tmp_path / "source", tmp_path / "out"
    assert txl("export", run, source).returncode == 0
    assert sorted(os.listdir(source)) == ["config.json", "model.safetensors", "vocab.txt"]
    out.mkdir()
    given, made = (run, out / "model") if command == "export" else (source, out / "a.safetensors")
    program = f"""
import os, signal, sys
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
sys.argv = ["txl", {command!r}, {str(given)!r}, {str(made)!r}]
from txl.commands import cli
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(os.listdir(out)) == 1
    assert not made.exists()
    assert txl(command, given, made).returncode == 0
    assert os.listdir(out) == [made.name]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["txl_kernels", "txl generate {run} --count 3"])
def test_unknown_instruction_set(run: Path, command: str) -> None:
    pytest.importorskip("txl_kernels._native")
    done = subprocess.run(
        [sys.executable, "-m", *command.format(run=run).split()], capture_output=True, text=True, check=False,
        env=os.environ | {"TXL_KERNELS_ISA": "zzz"},
    )  # fmt: skip
    one_line(done, "TXL_KERNELS_ISA=zzz is not known; this build has ")
