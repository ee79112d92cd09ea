"""pytest plugin (-p gpu_plugin) for runs on a GPU: a CUDA error fails only the test that caused it,
failures are printed at once, and kernels compiled elsewhere are used."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ.get("TRITON_CACHE_DIR", "."))
    if (folder / "triton-key").exists() and os.environ.get("TRITON_INTERPRET", "0") != "1":
        from gpu_kernels import adopt

        adopt(folder)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Failures(session.config))


class Failures:
    """Prints each failure at once, since a run may be killed before its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.writer = config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.writer.line(f"\nfailed: {report.nodeid}\n{report.longreprtext[-3000:]}")
            self.writer.flush()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Stop the process after a CUDA error that destroys the context, since all later results would
    be invalid; pytest-xdist starts another worker."""
    result = yield
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        text = f"the CUDA context is lost: {error}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "teardown")
        item.ihook.pytest_runtest_logreport(report=report)
        if not hasattr(item.config, "workerinput"):
            pytest.exit(text, returncode=3)
        os._exit(1)
    return result
