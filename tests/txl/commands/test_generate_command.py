"""`txl generate`: as the paper's authors did, detokenised, up to a stop string; and what it
refuses."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_helpers import SMALL, Run, one_line
from rich.console import Console

from txl.commands import samples, side_by_side
from txl.commands.presets import Settings
from txl.commands.samples import Sample
from txl.evaluation.generate import Sampling
from txl.language_model import load
from txl.model.config import RecurrentConfig
from txl.model.recurrent import RecurrentNetwork
from txl.text import corpus as data
from txl.text.detokenise import detokenise
from txl.training import checkpoint as checkpoints

PAPER = {
    "sampling": {"temperature": 1.0, "top_k": 40, "top_p": 1.0},
    "attn_len": 1601,
    "clamp_len": 1000,
    "zeros": True,
}


@pytest.fixture(scope="module")
def tokenised(tmp_path_factory: pytest.TempPathFactory) -> data.Corpus:
    folder = tmp_path_factory.mktemp("tokenised")
    lines = [f'They said ( {n} ) : " It is a two @-@ part {n % 7} @,@ 000 , isn \'t it ? "\n' for n in range(900)]
    (folder / "text.txt").write_text("".join(lines))
    return data.prepare(folder / "text.txt", folder / "corpus", data.PrepareOptions("words"))


def trained(txl: Run, folder: Path, corpus: data.Corpus, *more: str) -> Path:
    done = txl("train", "--run", folder, "--data", corpus.folder, *SMALL, *more)
    assert done.returncode == 0, done.stderr
    return folder


def written(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_the_papers_way(txl: Run, run: Path, corpus: data.Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("what was there before")
    done = txl("generate", run, "--preset", "paper", "--count", "60", "--seed", "5", "--out", out)
    assert done.returncode == 0, done.stderr
    (sample,) = written(out)
    start = sample["start"]
    assert 0 <= start <= 1008 - 512 - 60
    text = corpus.vocabulary.decode(corpus.test.tolist()).decode()
    assert sample["context"] == text[start : start + 512]
    assert sample["reference"] == text[start + 512 : start + 572]
    saved = load(run)
    assert sample["generation"] == saved.generate(
        text[start : start + 512], 60, Sampling(1.0, top_k=40), attn_len=1601, clamp_len=1000, zeros=True, seed=5
    )
    told = {
        "preset": "paper",
        "context": 512,
        "corpus": str(corpus.folder),
        "detokenised": False,
        "count": 60,
        "stop": [],
    }
    assert sample["settings"] == told | PAPER
    assert (sample["context_tokens"], sample["generated_tokens"], sample["reference_tokens"]) == (512, 60, 60)
    assert (sample["seed"], sample["split"], sample["checkpoint"]) == (5, "test", str(saved.path))
    assert sample["tokens_per_s"] == pytest.approx(60 / sample["seconds"])
    assert done.stdout == (
        f"--- context: 512 tokens of test from {start} ---\n{sample['context']}\n\n"
        f"--- generation: 60 tokens, seed 5 ---\n{sample['generation']}\n\n"
        f"--- reference: 60 tokens ---\n{sample['reference']}\n\n"
    )
    assert done.stderr.startswith("60 tokens in ")
    assert done.stderr.endswith(" tokens/s\n")
    assert list(tmp_path.iterdir()) == [out], "nothing half written is left"


def test_a_split_too_short_for_the_whole_reference(txl: Run, run: Path, tmp_path: Path) -> None:
    done = txl("generate", run, "--preset", "paper", "--seed", "5", "--out", tmp_path / "a")
    (sample,) = written(tmp_path / "a")
    assert (sample["start"], sample["generated_tokens"], sample["reference_tokens"]) == (0, 500, 496)
    assert "the test split has 1,008 tokens: the reference is 496, not 500" in done.stderr


def test_samples_are_those_of_the_seeds_that_follow(txl: Run, run: Path, tmp_path: Path) -> None:
    options = ["--preset", "paper", "--context", "30", "--count", "20", "--split", "valid"]
    assert txl("generate", run, *options, "--seed", "8", "--samples", "3", "--out", tmp_path / "a").returncode == 0
    assert txl("generate", run, *options, "--seed", "10", "--out", tmp_path / "b").returncode == 0
    (a, b, c), (again,) = written(tmp_path / "a"), written(tmp_path / "b")
    same = ("seed", "split", "start", "context", "generation", "reference", "settings")
    assert [c[name] for name in same] == [again[name] for name in same]
    assert len({x["start"] for x in (a, b, c)}) == 3
    assert (a["seed"], b["seed"], c["split"]) == (8, 9, "valid")


def test_what_is_given_goes_before_the_preset(txl: Run, run: Path, tmp_path: Path) -> None:
    options = "--temperature 0 --top-k 3 --top-p 0.5 --attn-len 9 --clamp-len 7 --empty --context 12 --count 7".split()
    done = txl(
        "generate", run, "--preset", "paper", *options, "--stop", "no", "--stop", "such", "--out", tmp_path / "a"
    )
    assert done.returncode == 0, done.stderr
    (sample,) = written(tmp_path / "a")
    sampling = {"temperature": 0.0, "top_k": 3, "top_p": 0.5}
    given = {"sampling": sampling, "attn_len": 9, "clamp_len": 7, "zeros": False, "count": 7, "context": 12}
    assert given.items() <= sample["settings"].items()
    assert sample["settings"]["stop"] == ["no", "such"]
    likeliest = load(run).generate(sample["context"], 7, Sampling(0), attn_len=9, clamp_len=7, zeros=False)
    assert sample["generation"] == likeliest


def test_words_are_detokenised(txl: Run, tokenised: data.Corpus, tmp_path: Path) -> None:
    folder = trained(txl, tmp_path / "r", tokenised)
    options = ["generate", folder, "--preset", "paper", "--context", "40", "--count", "30", "--seed", "1", "--out"]
    for more in ("--detokenise", "--as-tokenised"):
        assert txl(*options, tmp_path / more, more).returncode == 0
    assert txl(*options, tmp_path / "plain").returncode == 0
    (text,), (tokens,), (plain,) = (written(tmp_path / x) for x in ("--detokenise", "--as-tokenised", "plain"))
    assert [text[part] for part in ("context", "generation", "reference")] == [
        plain[part] for part in ("context", "generation", "reference")
    ]
    assert text["settings"]["detokenised"] is True
    start = tokens["start"]
    followed = tokenised.test[start : start + 70].tolist()
    words = [tokenised.vocabulary.decode(part).decode() for part in (followed[:40], followed[40:])]
    assert [tokens["context"], tokens["reference"]] == words
    assert "two @-@ part" in tokens["context"]
    assert "two-part" in text["context"]
    before = tokenised.vocabulary.decode(tokenised.test[:start].tolist()).decode()
    known = tokenised.vocabulary.decode(tokenised.test[: start + 40].tolist()).decode()
    assert text["context"] == detokenise(words[0], before)
    assert text["reference"] == detokenise(words[1], known)
    assert text["generation"] == detokenise(tokens["generation"], known)
    assert not tokens["generation"].startswith(" ")


def test_a_quotation_goes_on_in_what_follows_the_context(tokenised: data.Corpus) -> None:
    class Fixed:
        """Closes a quotation."""

        vocabulary = tokenised.vocabulary

        def stream(self, *_: object, progress: Callable[[int], None], **__: object) -> Iterator[bytes]:
            for n, piece in ((4, b" it"), (8, b' "'), (12, b" said")):
                progress(n)
                yield piece

    split, settings = samples.Split(tokenised.folder, "test", tokenised.test), Settings(12, Sampling())
    found = [samples.draw(Fixed(), split, 30, settings, seed, True, lambda n: None) for seed in range(40)]

    def before(place: int) -> str:
        return tokenised.vocabulary.decode(tokenised.test[:place].tolist()).decode()

    for sample in found:
        start, middle = before(sample.start), before(sample.start + 30)
        assert sample.context == detokenise(middle[len(start) :].removeprefix(" "), start)
        assert sample.reference == detokenise(before(sample.start + 42)[len(middle) :].removeprefix(" "), middle)
        is_open = middle.count('"') % 2 == 1
        assert sample.generation == ('it" said' if is_open else 'it "said')
    assert {sample.generation for sample in found} == {'it" said', 'it "said'}
    assert any(sample.context.startswith('"') for sample in found), "one begins where a quotation ends"


def test_a_prompt_is_detokenised_with_what_follows(txl: Run, tokenised: data.Corpus, tmp_path: Path) -> None:
    prompt = 'They said ( 5 ) : "\nIt is a two @-@ part " It ( 6'
    options = ["generate", trained(txl, tmp_path / "r", tokenised), "--prompt", prompt, "--seed", "3", "--count", "40"]
    tokens = txl(*options).stdout
    assert tokens.startswith(prompt + " ")
    shown = txl(*options, "--detokenise").stdout
    assert shown.startswith('They said (5): "\nIt is a two-part "It (6 ')
    assert shown == detokenise(tokens)


def test_stop_strings(txl: Run, run: Path, tokenised: data.Corpus, tmp_path: Path) -> None:
    options = ["generate", run, "--prompt", "00", "--count", "80", "--seed", "3"]
    whole = txl(*options).stdout[2:-1]
    first, second = whole[50:53], whole[30:33]
    done = txl(*options, "--stop", first, "--stop", second)
    assert done.stdout == "00" + min((whole.partition(stop)[0] for stop in (first, second)), key=len) + "\n"
    preset = [
        *options[:2],
        "--preset",
        "paper",
        "--context",
        "20",
        "--count",
        "40",
        "--seed",
        "3",
        "--out",
        tmp_path / "a",
    ]
    txl(*preset)
    (sample,) = written(tmp_path / "a")
    stop = sample["generation"][10:12]
    txl(*preset, "--stop", stop)
    (stopped,) = written(tmp_path / "a")
    assert stopped["generation"] == sample["generation"].partition(stop)[0]
    drawn = len(stopped["generation"]) + 2
    assert (stopped["generated_tokens"], stopped["reference"]) == (drawn, sample["reference"][:drawn])


def test_clamped_distances_and_zeros_of_a_prompt(txl: Run, run: Path) -> None:
    saved = load(run)
    done = txl("generate", run, "--prompt", "0001", "--count", 60, "--seed", 3, "--clamp-len", 2, "--zeros")
    assert done.stdout == "0001" + saved.generate("0001", 60, clamp_len=2, zeros=True, seed=3) + "\n"


SYSTEMS = {
    "--mem-len 0": "do not apply (encoding 'relative', mem_len 0): a window of 16 tokens is read",
    "--encoding sinusoid --tie-r": "do not apply (encoding 'sinusoid', mem_len 16): a window of 16 tokens is read",
    "--encoding shaw --table-len 9 --tie-r": "clamp_len of the preset does not apply to encoding 'shaw'",
}


@pytest.mark.parametrize("options", SYSTEMS)
def test_models_that_cannot_have_the_papers_memory(txl: Run, corpus: data.Corpus, tmp_path: Path, options: str) -> None:
    folder = trained(txl, tmp_path / "r", corpus, *options.split())
    done = txl("generate", folder, "--preset", "paper", "--context", "30", "--count", "10", "--out", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    said, _ = done.stderr.splitlines()
    assert said.startswith("preset paper: ")
    assert SYSTEMS[options] in said
    (sample,) = written(tmp_path / "a")
    cached = "shaw" in options
    assert sample["settings"]["clamp_len"] is None
    assert sample["settings"]["attn_len"] == (1601 if cached else None)
    assert sample["settings"]["zeros"] == (True if cached else None)


def test_an_lstm_carries_its_state(txl: Run, corpus: data.Corpus, tmp_path: Path) -> None:
    config = RecurrentConfig(network="lstm", vocab_size=len(corpus.vocabulary), n_layer=1, d_model=16, d_inner=32)
    path = tmp_path / "a.safetensors"
    checkpoints.save(path, RecurrentNetwork(config), corpus.vocabulary, {"attn_len": 16, "segment": 16}, {})
    options = ["--preset", "paper", "--data", corpus.folder, "--context", "30", "--count", "10"]
    done = txl("generate", path, *options)
    assert done.returncode == 0, done.stderr
    assert "do not apply: the lstm carries its own state" in done.stderr.splitlines()[0]


@pytest.mark.parametrize(("width", "columns"), [(119, 1), (120, 3)])
def test_side_by_side_where_there_is_room(width: int, columns: int, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    sample = Sample(1, "test", 7, "one [b]:smile:", "two", "three", 3, 2, 1, 0.5)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    side_by_side.show(sample, console)
    shown = console.file.getvalue() or capfdbinary.readouterr().out.decode()
    lines = [line for line in shown.splitlines() if "one [b]:smile:" in line]
    assert [("two" in line, "three" in line) for line in lines] == [(columns == 3, columns == 3)]
    assert shown.index("context: 3 tokens of test from 7") < shown.index("generation: 2 tokens, seed 1")


BAD = {
    "{run} --preset gpt": "--preset must be one of paper, got 'gpt'",
    "{run} --preset paper --prompt a": "--prompt cannot be given with --preset",
    "{run} --preset paper --context 1009": "--context must be from 1 to the 1,008 tokens of the test split, got 1,009",
    "{run} --preset paper --context 0": "--context must be >= 1, got 0",
    "{run} --preset paper --count 0": "--count must be >= 1, got 0",
    "{run} --preset paper --samples 0": "--samples must be >= 1, got 0",
    "{run} --preset paper --split dev": "split must be one of train, valid, test, got 'dev'",
    "{run} --preset paper --data {words}": "its vocabulary is not the one",
    "{run} --preset paper --data nothing": "nothing: not a prepared corpus",
    "{run} --preset paper --out no/such/folder": "--out must name a file in a folder that exists, got no/such/folder",
    "{run} --preset paper --out folder": "--out must name a file in a folder that exists, got folder",
    "{run} --preset paper --detokenise": "--detokenise is for models of words; the tokens of",
    "{run} --detokenise": "--detokenise is for models of words; the tokens of",
    "{run} --preset paper --context 9 --clamp-len 0": "clamp_len must be an integer >= 1, got 0",
    "{run} --data {words}": "--data is for --preset (paper)",
    "{run} --samples 2": "--samples is for --preset (paper)",
    "alone.safetensors --preset paper": "--data must name a prepared corpus: the checkpoint is in no run's folder",
    "moved --preset paper": "is not there",
    "folder --preset paper": "folder/last.safetensors: no such checkpoint",
}


@pytest.mark.parametrize("arguments", BAD)
def test_mistakes(
    txl: Run, run: Path, tokenised: data.Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("moved").mkdir()
    for path in ("alone.safetensors", "moved/best.safetensors"):
        Path(path).symlink_to(run / "best.safetensors")
    record = json.loads((run / "run.json").read_text())
    Path("moved/run.json").write_text(json.dumps(record | {"corpus": "/no/longer"}))
    one_line(txl("generate", *arguments.format(run=run, words=tokenised.folder).split()), BAD[arguments])


def test_an_empty_stop_string(txl: Run, run: Path) -> None:
    one_line(txl("generate", run, "--stop", ""), "stop must hold strings of at least one character, got ''")
