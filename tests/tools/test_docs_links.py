"""Links of the documentation's pages that leave docs/, which its site does not hold."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

SPEC = importlib.util.spec_from_file_location("docs_links", Path(__file__).parents[2] / "tools" / "docs_links.py")
assert SPEC is not None
assert SPEC.loader is not None
docs_links = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docs_links)


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("kernels-cpu.md", "[REPORT](../benchmarks/REPORT.md) has", "`benchmarks/REPORT.md` has"),
        ("how-to/train.md", "[code](../../txl/paths.py)", "`txl/paths.py`"),
        ("how-to/train.md", "[page](../paper.md)", "[page](../paper.md)"),
        ("index.md", "[page](paper.md#data) and [web](https://aclanthology.org/P19-1285/)", None),
    ],
)
def test_only_links_to_files_elsewhere_become_paths(page: str, text: str, shown: str | None) -> None:
    file = SimpleNamespace(src_uri=page)
    assert docs_links.on_page_markdown(text, SimpleNamespace(file=file)) == (text if shown is None else shown)
