"""A headless Chromium for the tests of pages, which must do without a network.

`TESTS_REQUIRE_TOOLS=1` (CI) makes a missing one a failure.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def _missing(what: str) -> None:
    if os.environ.get("TESTS_REQUIRE_TOOLS") == "1":
        pytest.fail(f"{what} is missing, and TESTS_REQUIRE_TOOLS is 1")
    pytest.skip(f"needs {what}")


@contextmanager
def opened(path: Path, width: int = 1200, dark: bool = False) -> Iterator[Any]:
    """The page of a file in a browser; fails if it complains or asks for anything but itself."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        _missing("Chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright")
    said, asked = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", offline=True
        )
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.resolve().as_uri())
        yield page
        browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [path.resolve().as_uri()]
