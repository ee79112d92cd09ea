"""The commands as a user runs them: output, exit codes, errors in one line."""

import bz2
import gzip
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_helpers import SMALL, Run, in_process, one_line, succeeded

from txl import LanguageModel, load
from txl.commands.generate import _prompt
from txl.evaluation.evaluate import Score
from txl.evaluation.generate import Sampling
from txl.text.corpus import Corpus

ROOT = Path(__file__).parent.parent.parent.parent


def test_eval_prints_a_row_for_each_attention_length(txl: Run, run: Path, corpus: Corpus) -> None:
    trained = load(run).attn_len
    done = succeeded(txl("eval", run, "--data", corpus.folder, "--attn-len", f"1,{trained},8", "--split", "valid"))
    rows = [line.split("│") for line in done.stdout.splitlines() if f"{len(corpus.valid):,}" in line]
    bpc = {int(row[1]): row[3].strip() for row in rows}
    assert list(bpc) == [1, trained, 8]
    best = min(bpc, key=lambda n: float(bpc[n]))
    last = done.stdout.splitlines()[-1]
    assert f"init {bpc[trained]} bpc (training's length {trained}), best {bpc[best]} (length {best})" in last


def test_eval_and_prompts_of_compressed_files(txl: Run, run: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bz2.compress(text.read_bytes()))
    done = [txl("eval", run, "--data", path, "--limit", "500") for path in (text, tmp_path / "t")]
    assert done[0].stdout.split("│")[3] == done[1].stdout.split("│")[3], "bpc"
    (tmp_path / "p").write_bytes(gzip.compress(b"0001 follows"))
    done = txl("generate", run, "--prompt", f"@{tmp_path / 'p'}", "--count", "3")
    assert done.stdout.startswith("0001 follows"), done.stderr


@pytest.mark.slow
def test_names_with_markup_or_invalid_utf8(text: Path, tmp_path: Path) -> None:
    source = os.fsencode(tmp_path) + b"/[red]caf\xe9.txt"
    with open(source, "wb") as file:
        file.write(text.read_bytes())
    command = [sys.executable, "-m", "txl", "prepare", "c[/b]:smile:", "--data", source]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert r"[red]caf\udce9.txt (split 90/5/5 by bytes)" in done.stdout
    assert "written to c[/b]:smile:" in done.stdout


def test_a_run_may_be_named_as_for_training(txl: Run, run: Path) -> None:
    wanted = succeeded(txl("generate", run, "--count", 5, "--seed", 1)).stdout
    assert succeeded(txl("generate", "--run", run, "--count", 5, "--seed", 1)).stdout == wanted
    assert " bpc " in succeeded(txl("eval", "-r", run, "--limit", 50)).stdout


def test_prompt_that_begins_with_at() -> None:
    assert [_prompt(x) for x in ("@@", "@@a@", "a@@b")] == [b"@", b"@a@", b"a@@b"]


def test_first_row_of_eval_is_not_timed_with_first_calls(txl: Run, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step, of --batch streams, comes before."""
    calls, evaluate = [], LanguageModel.evaluate

    def recorded(self: LanguageModel, *arguments: Any, **options: Any) -> Score:
        calls.append(found := evaluate(self, *arguments, **options))
        return found

    monkeypatch.setattr(LanguageModel, "evaluate", recorded)
    shown = succeeded(txl("eval", run, "--attn-len", "8,16", "--segment", 4, "--batch", 2)).stdout
    assert [score.tokens for score in calls] == [8, 1008, 1008]
    assert shown.count("1,008") == 2


def test_generate_as_the_paper_did(txl: Run, run: Path, corpus: Corpus, tmp_path: Path) -> None:
    """Appendix E continues a text of the corpus; here also up to a stop string."""
    context = corpus.vocabulary.decode(corpus.test[:512].tolist())
    (tmp_path / "context.txt").write_bytes(context)
    options = "--top-k 40 --temperature 1 --attn-len 1601 --clamp-len 1000 --zeros --count 60 --seed 5".split()
    done = succeeded(txl("generate", run, "--prompt", f"@{tmp_path / 'context.txt'}", *options))
    continued = load(run, clamp_len=1000, zeros=True).generate(context, 60, Sampling(1.0, top_k=40), 1601, seed=5)
    assert done.stdout == context.decode() + continued + "\n"
    stop = continued[30:33]
    stopped = txl("generate", run, "--prompt", f"@{tmp_path / 'context.txt'}", *options, "--stop", stop)
    assert stopped.stdout == context.decode() + continued.partition(stop)[0] + "\n"


@pytest.mark.slow
def test_generate_into_a_closed_pipe(run: Path) -> None:
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"'{sys.executable}' -m txl generate '{run}' --count 3000 | head -c 20; exit ${{PIPESTATUS[0]}}",
        ],
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""


BAD = {
    "train missing.txt": "missing.txt: no such file or folder",
    "eval {run} --data {corpus} --attn-len 0": "attn_len must be >= 1, got 0",
    "eval {run} --data {corpus} --attn-len 4,x": "--attn-len takes whole numbers",
    "eval {run} --data {corpus} --split dev": "split must be one of train, valid, test, got 'dev'",
    "eval {run} --data missing.txt": "missing.txt: no such file or folder",
    "eval": "one checkpoint or run must be given, got none",
    "generate {run} --run other": "0 and other",
    "eval missing": "missing: no such checkpoint",
    "eval pickle.pt --data {corpus}": "pickled checkpoints are never loaded",
    "eval truncated.safetensors --data {corpus}": "it is truncated or of another format",
    "generate {run} --prompt Ωa": "bytes that the training data never did: 0xa9, 0xce",
    "generate {run} --prompt \udcff": "bytes that the training data never did: 0xff",
    "generate {run} --prompt @missing.txt": "missing.txt: cannot be read",
    "generate {run} --device cuda:77": "device 'cuda:77' cannot be used",
    "demo --minutes 0": "--minutes must be > 0",
    "train {run}/../nowhere": "no such file or folder",
}


@pytest.mark.parametrize("arguments", BAD)
def test_errors_are_one_line(
    txl: Run, arguments: str, run: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pickle.pt").write_bytes(b"\x80\x04\x95" + bytes(100))
    Path("truncated.safetensors").write_bytes((run / "last.safetensors").read_bytes()[:-100])
    if arguments.startswith("train"):
        done = txl("train", "--run", "new", *SMALL, "--data", arguments.split()[1], "--batch", 70)
    else:
        done = txl(*arguments.format(run=run, corpus=corpus.folder).split())
    one_line(done, BAD[arguments])


def test_resume_with_a_changed_option(txl: Run, run: Path, corpus: Corpus) -> None:
    before = (run / "last.safetensors").read_bytes()
    one_line(
        txl("train", "--run", run, "--resume", "--data", corpus.folder, "--d-model", "18"), "d_model is 18, was 16"
    )
    one_line(txl("train", "--run", run, "--resume", "--steps", "2"), "steps is 2, but 3 updates are done")
    one_line(txl("train", "--run", run, "--resume", "--lr", "1"), "(steps, eval_every")
    one_line(txl("train", "--run", run, "--data", corpus.folder, *SMALL), "already holds a run")
    one_line(txl("train", "--run", run, "--resume", "--recipe", "laptop"), "leave --recipe out")
    assert (run / "last.safetensors").read_bytes() == before


def test_refused_run_keeps_its_corpus(txl: Run, text: Path, tmp_path: Path) -> None:
    assert txl("train", "--run", tmp_path / "r", "--data", text, *SMALL).returncode == 0
    before = (tmp_path / "r" / "corpus" / "train.bin").read_bytes()
    (tmp_path / "b.txt").write_text("another text\n" * 100)
    one_line(txl("train", "--run", tmp_path / "r", "--data", tmp_path / "b.txt", *SMALL), "already holds a run")
    one_line(txl("train", "--run", tmp_path / "r", "--data", tmp_path / "b.txt", "--resume"), "leave --data out")
    assert (tmp_path / "r" / "corpus" / "train.bin").read_bytes() == before
    assert txl("train", "--run", tmp_path / "r", "--resume").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prepare", "c", "--data", ""), "--data is empty; give it a value, or leave it out"),
        (("prepare", "c", "--data="), "--data is empty"),
        (("prepare", ""), "an argument is empty"),
        (("train", "r", "--data", ""), "--data is empty"),
        (("import", "", "o.safetensors"), "an argument is empty"),
        (("import", "i", "o.safetensors", "--vocabulary", ""), "--vocabulary is empty"),
        (("eval", "r", "--data", "", "--limit", "3"), "--data is empty"),
    ],
)
def test_empty_values(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An empty path, as of an unset shell variable, would mean the current folder."""
    for n in range(60):
        (tmp_path / f"{n}.txt").write_text("some words of a text\n" * 9)
    monkeypatch.chdir(tmp_path)
    one_line(in_process(capfd, *arguments), message)
    assert len(list(tmp_path.iterdir())) == 60


@pytest.mark.parametrize(
    "prompt", [("--prompt", ""), ("--prompt=",), ("--prompt", "-x="), ("--prompt", "1", "--stop", "")]
)
def test_prompt_may_be_empty(prompt: tuple[str, ...], run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = in_process(capfd, "generate", run, *prompt, "--count", 3)
    assert "give it a value" not in done.stderr


def test_tensorboard_is_refused_before_training(
    txl: Run, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    done = txl("train", "--run", tmp_path / "r", "--data", corpus.folder, *SMALL, "--tensorboard")
    one_line(done, 'pip install "txl-kernels[tensorboard]"')
    assert not (tmp_path / "r" / "last.safetensors").exists()


def test_demo(txl: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txl.commands.demo.DISTURBED", 1e9)
    done = succeeded(txl("demo", "--run", tmp_path / "demo", "--data", text, "--minutes", "0.02"))
    for words in ("What memory is worth", "(training)", "A sample", "Done"):
        assert words in done.stdout
    *measured, last = done.stdout.splitlines()
    ratio = (
        r"Cached memory is ([\d,]+) times as fast as the paper's vanilla evaluation at attention length 1,536, measured"
    )
    found = re.search(ratio, done.stdout)
    assert found is not None, done.stdout
    assert int(found[1].replace(",", "")) > 100  # hundreds: each token computes a window of 1,536
    ends = next(n for n, line in enumerate(measured) if line.startswith("Done in"))
    assert len(measured) - ends <= 3  # nothing is measured after it
    command = shlex.split(last.removeprefix("Continue with: txl "))
    assert command == ["generate", str(tmp_path / "demo")]
    succeeded(txl(*command, "--count", "3"))
    assert "context fragmentation" in done.stdout
    assert "best.safetensors, loss.png, memory.png" in done.stdout
    for name in ("loss.png", "memory.png"):
        assert (tmp_path / "demo" / name).read_bytes().startswith(b"\x89PNG")
