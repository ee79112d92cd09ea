"""pytest plugin (-p gpu_plugin) for runs on a GPU: a CUDA error fails only the test that caused it,
failures are printed at once, and kernels compiled elsewhere are used.

With GPU_COMPILE_ONLY=1 it needs no GPU: what tests launch on Triton is compiled for sm_90 into its
cache, and their results are ignored.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

COMPILE_ONLY = os.environ.get("GPU_COMPILE_ONLY", "0") == "1"


def pytest_configure(config: pytest.Config) -> None:
    if COMPILE_ONLY:
        from txl_kernels.backends import cpu

        torch.cuda.is_available = lambda: True
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.get_device_properties = lambda device=None: mock.Mock(multi_processor_count=132)
        torch.set_default_device = lambda device: None
        torch.nn.Module.cuda = torch.Tensor.cuda = lambda self, device=None: self  # type: ignore[assignment, method-assign]
        cpu.why_not_tensors = lambda *args: "only Triton is wanted"
        return
    if os.environ.get("TRITON_CACHE_DIR"):
        from gpu_kernels import adopt_carried

        adopt_carried()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if not COMPILE_ONLY:
        return (yield)
    from gpu_kernels import compiling

    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling())
        stack.enter_context(mock.patch.object(torch.testing, "assert_close"))
        if hasattr(item.module, "assert_equals_reference"):  # of a test of several cases, all are launched
            launch = functools.partial(item.module.run, backend="triton")
            stack.enter_context(mock.patch.object(item.module, "assert_equals_reference", launch))
        try:
            yield
        except Exception as error:
            print(f"{item.nodeid}: {type(error).__name__}: {error}"[:200])
    return None


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
