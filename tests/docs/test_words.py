"""Pages, docstrings, comments and names use the field's words. CONTRIBUTING, "Words", says
which."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROSE = [  # in Markdown, docstrings and comments, except in backticks
    r"numbers? (a|per|by|for each) (distance|head)",
    r"(table|row)s? of numbers",
    r"packed texts?|texts packed|texts in one row|(for each|every) text|text of the batch|text b",
    r"copy engine",
    r"few queries|long calls?",
    r"turn(ed|s)? round",
    r"hindrances?",
    r"(nobody|somebody|whoever|who) (sees?|watch(es)?|wants?|knows?|needs?|reads?)",
    r"forms beyond",
    r"memory at most|time to get memory|(s|seconds?|minutes?|hours?) of sound",
    r"\A(Of|As|And|But|Or|What|Whether|Whatever)",  # of a docstring; predicates may begin with Whether
]
NAMES = [  # in names and strings, whose words are separated by underscores, too
    r"few[ _]queries",
    r"numbers[ _](alone|beside)",
    r"nobody|somebody|hindrance",
    r"told|plants|FORMS|MOST|LEAP|InUse|Facts|TXL_PAIRS|of_first_lane|power_of_2",
    r"written_down|own_way|unhidden|worth_keeping|for_all_alike|numbers_of",
]
SEARCHED = (  # words that readers search for, beside this package's own
    "head dim", "sequence length", "KV cache", "FlashAttention", "is_causal", "attention mask", "sliding window", "varlen",
    "grouped-query", "GQA", "fp16", "forward + backward", "peak memory", "page faults", "latency", "throughput", "tokens/s",
    "roofline", "lower bound", "peak FLOP/s", "audio",
)  # fmt: skip
IN_PROSE = re.compile(rf"\b(?:{'|'.join(PROSE)})\b", re.IGNORECASE)
IN_NAMES = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(NAMES)})(?![A-Za-z0-9])")
FOLDERS = ("docs", "txl", "txl_kernels", "tests", "benchmarks", "tools", "csrc")
PUBLISHED = ("benchmarks/report/records.py", "tests/benchmarks/report/test_records.py")  # names in old records
SUFFIXES = (".md", ".py", ".cpp", ".cu", ".cuh", ".h")


def python(text: str) -> tuple[list[str], str]:
    """Return the docstrings and comments of a Python file, and the rest."""
    lines, prose = text.split("\n"), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (found := ast.get_docstring(node)):
            predicate = isinstance(node, ast.FunctionDef) and node.returns and "bool" in ast.unparse(node.returns)
            prose.append(found.removeprefix("Whether ") if predicate else found)
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno
            lines[first:last] = [""] * (last - first)
    comments = [re.search(r"(^|\s)# .*", line) for line in lines]
    code = [line if found is None else line[: found.start()] for line, found in zip(lines, comments, strict=True)]
    return prose + [x[0] for x in comments if x], "\n".join(code)


def cplusplus(text: str) -> tuple[list[str], str]:
    """Return the comments of a C++ file, and the rest."""
    comment = r"//[^\n]*|/\*.*?\*/"
    prose = re.sub(r"\n\s*//", "", "\n".join(re.findall(comment, text, re.DOTALL)))
    return [prose], re.sub(comment, "", text, flags=re.DOTALL)


def violations(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        prose, names = [re.sub(r"```.*?```|^## Words.*?(?=^#|\Z)", "", text, flags=re.DOTALL | re.MULTILINE)], ""
    else:
        prose, names = python(text) if path.suffix == ".py" else cplusplus(text)
    for piece in prose:
        yield from (m[0] for m in IN_PROSE.finditer(re.sub(r"`[^`]*`", "", piece)))
    yield from (m[0] for m in IN_NAMES.finditer(names))


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_words(folder: str) -> None:
    """The empty folder stands for the pages beside this project's folders."""
    for path in sorted((ROOT / folder).rglob("*") if folder else ROOT.glob("[A-Z]*.md")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in SUFFIXES and path != Path(__file__) and name not in ("CHANGELOG.md", *PUBLISHED):
            assert list(violations(path)) == [], f"{name}: CONTRIBUTING, Words, has the field's word"


@pytest.mark.parametrize("word", SEARCHED)
def test_words_that_readers_search_for(word: str) -> None:
    """README or a page has the word; the log and the report of benchmarks do not count."""
    pages = [ROOT / "README.md", *(x for x in (ROOT / "docs").rglob("*.md") if x.name != "log.md")]
    assert any(word.lower() in page.read_text(encoding="utf-8").lower() for page in pages)
