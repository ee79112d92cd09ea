"""Shared fixtures: the backends under test and their devices, and outputs that show what was not written."""

from collections.abc import Iterator

import pytest
import torch

from txl_kernels import triton
from txl_kernels.backends import BACKENDS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", default=",".join(BACKENDS), help="Backends the kernel tests run against.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`backend`: all of them. `kernel_backend`: those behind the operators, that is all but the reference."""
    names = metafunc.config.getoption("--backends").split(",")
    for fixture in ("backend", "kernel_backend"):
        if fixture in metafunc.fixturenames:
            chosen = [x for x in names if fixture == "backend" or hasattr(BACKENDS[x], "forward")]
            metafunc.parametrize(fixture, [pytest.param(x, marks=_marks(x)) for x in chosen])


def _marks(backend: str) -> list[pytest.MarkDecorator]:
    if backend != "triton":
        return []
    return [pytest.mark.triton] if triton.interpreted() else [pytest.mark.triton, pytest.mark.gpu]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False"))


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `gpu` make their tensors on the GPU."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


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
