"""For the documentation site: links to files outside docs/ are shown as their paths."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[[^\]]+\]\((\.\./[^)#\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs' hook: `[REPORT](../benchmarks/REPORT.md)` becomes `benchmarks/REPORT.md`, as code."""

    def shown(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[1]))
        return link[0] if path.startswith("docs/") else f"`{path}`"

    return LINK.sub(shown, markdown)
