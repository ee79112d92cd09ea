"""Prompts that a model's vocabulary has, whatever its text."""

from pathlib import Path

import pytest

from txl.commands.demo import prompt_of
from txl.text import corpus as data

TEXTS = {
    "lines": ("0001 follows the line;\n", "0001 follows the line;"),
    "long lines": ("it was the best of times, it was the worst of times\n", "it was the best of"),
    "no spaces": ("一二三四五六七八九十" * 4 + "\n", "一二三四五六七八九十一二三四五六七八九十一二三四"),
    "neither words nor lines": ("--\n", None),
    "an option and a file": ("--prompt of something\n@file of something\n", None),
}


@pytest.mark.parametrize("name", TEXTS)
def test_of_a_text(tmp_path: Path, name: str) -> None:
    line, wanted = TEXTS[name]
    (tmp_path / "t.txt").write_text(line * 300, encoding="utf-8")
    corpus = data.prepare(tmp_path / "t.txt", tmp_path / "c")
    prompt = prompt_of(corpus)
    assert prompt == wanted
    if prompt:
        corpus.vocabulary.encode(prompt.encode())


def test_of_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"caf\xe9 of the corner\n" * 300)
    assert prompt_of(data.prepare(tmp_path / "t.txt", tmp_path / "c")) is None


def test_of_words(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the cat sat on the mat\n" * 300)
    corpus = data.prepare(tmp_path / "t.txt", tmp_path / "c", data.PrepareOptions("words"))
    assert prompt_of(corpus) == "the cat sat on the mat"
