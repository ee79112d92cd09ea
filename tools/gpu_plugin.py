"""pytest plugin (-p gpu_plugin) for runs on a GPU: a CUDA error fails only the test that caused it,
failures are printed at once, and GPU_BUILD names the folder of a build of the CUDA C++ kernels."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config))
    if folder := os.environ.get("GPU_BUILD"):
        import gpu_variants

        gpu_variants.use(gpu_variants.load(Path(folder).resolve()))


class Failures:
    """Prints each failure at once, since a run may be killed before its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            writer = self.config.get_terminal_writer()
            writer.line(f"\nfailed: {report.nodeid}\n{report.longreprtext[-3000:]}")
            writer.flush()


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
