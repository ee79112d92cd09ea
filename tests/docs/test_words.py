"""Prose uses the field's words: CONTRIBUTING, "Words", has a table of what each one replaces."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = [  # in Markdown, docstrings and comments; what is in backticks is a name, not prose
    r"numbers? (a|per|by|for each) (distance|head)",
    r"(table|row)s? of numbers",
    r"packed texts?|texts packed|texts in one row|(for each|every) text|text of the batch",
    r"copy engine",
    r"few queries|long calls?",
    r"turn(ed|s)? round",
    r"hindrances?",
    r"(nobody|somebody|whoever|who) (sees?|watch(es)?|wants?|knows?|needs?|reads?)",
    r"forms beyond",
    r"\A(Of|And|What|Whether)",  # of a docstring; predicates may begin with Whether
]
PAGES = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / f"{name}.md" for name in ("README", "DESIGN", "CONTRIBUTING", "AGENTS")),
]
CODE = ("txl", "txl_kernels", "benchmarks", "tools", "tests/benchmarks", "tests/tools")
FILES = [*PAGES, *(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))]


def prose(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [re.sub(r"```.*?```|^## Words.*?(?=^#|\Z)", "", text, flags=re.DOTALL | re.MULTILINE)]
    found = [x.string for x in tokenize.generate_tokens(io.StringIO(text).readline) if x.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            said = ast.get_docstring(node) or ""
            predicate = isinstance(node, ast.FunctionDef) and node.returns and "bool" in ast.unparse(node.returns)
            found.append(said.removeprefix("Whether ") if predicate else said)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_words(path: Path) -> None:
    text = [re.sub(r"`[^`]*`", "", piece) for piece in prose(path)]
    said = [found[0] for piece in text for word in FORBIDDEN for found in re.finditer(rf"\b({word})\b", piece, re.I)]
    assert said == [], "CONTRIBUTING, Words, has the field's word"
