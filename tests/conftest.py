"""Shared fixtures: the backends under test, and outputs that show what was not written."""

from collections.abc import Iterator

import pytest
import torch

from txl_kernels.backends import BACKENDS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", default=",".join(BACKENDS), help="Backends the kernel tests run against.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", metafunc.config.getoption("--backends").split(","))


@pytest.fixture
def nan_filled() -> Iterator[None]:
    """torch.empty and its kin give NaN, so that an output not written is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def same_seed() -> None:
    torch.manual_seed(0)
