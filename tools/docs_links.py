"""mkdocs hook for the documentation site that shows links to files outside docs/ as paths."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[[^\]]+\]\((\.\./[^)#\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace such links: `[REPORT](../benchmarks/REPORT.md)` becomes `benchmarks/REPORT.md`, as
    code."""

    def shown(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[1]))
        return link[0] if path.startswith("docs/") else f"`{path}`"

    return LINK.sub(shown, markdown)
