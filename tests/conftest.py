"""Shared fixtures: the backends under test and their devices, and outputs that show what was not
written."""

import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from txl_kernels.backends import BACKENDS, KERNELS, triton
from txl_kernels.backends.triton import config


def pytest_addoption(parser: pytest.Parser) -> None:
    # "cuda" takes short calls only: tests/txl_kernels/cuda. "triton": on a GPU or interpreted.
    runs = torch.cuda.is_available() or triton.interpreted()
    any_call = ",".join(name for name in BACKENDS if name != "cuda" and (runs or name != "triton"))
    parser.addoption("--backends", default=any_call, help="Backends the kernel tests run against.")


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `backend`, all of them, and `kernel_backend`, those behind the operators: all but
    the reference."""
    names = metafunc.config.getoption("--backends").split(",")
    for fixture in ("backend", "kernel_backend"):
        if fixture in metafunc.fixturenames:
            chosen = [x for x in names if fixture == "backend" or x in KERNELS]
            metafunc.parametrize(fixture, [pytest.param(x, marks=_marks(x)) for x in chosen])


def pytest_configure() -> None:
    if triton.interpreted():
        _without_idle_work_of_the_interpreter()


def _without_idle_work_of_the_interpreter() -> None:
    """Take work without effect from Triton's interpreter (3.6 to 3.9), more than half of its time:
    it replaces the functions of triton.language at each call of a function, although the launch has
    done so, and it computes whether integers overflow, which it reports only with `debug`."""
    from triton import language
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    replace = interpreter._patch_lang

    def once(function: Any) -> Any:
        used = [x for x in function.__globals__.values() if x is language or x is language.core]
        if not used or any(language.core.is_builtin(x.load) for x in used):
            return replace(function)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = once


def _marks(backend: str) -> list[pytest.MarkDecorator]:
    if backend != "triton":
        return []
    return [pytest.mark.triton] if triton.interpreted() else [pytest.mark.triton, pytest.mark.gpu]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False"))


@pytest.fixture(scope="session", autouse=True)
def no_options_for_another_pytest() -> None:
    """Pytest that a test runs gets no options of this one. Only processes that run tests drop them:
    pytest-xdist's workers read the variable that their parent had."""
    os.environ.pop("PYTEST_ADDOPTS", None)


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
    """torch.empty and similar functions return NaN, so that outputs that are not written are found.

    This needs deterministic algorithms, of which Triton's backward is not to be aware.
    """
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()

    def wanted() -> bool:
        return os.environ.get(config.ATOMICS, "1") != "0"

    with mock.patch.object(config, "dr_by_atomics", wanted):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def the_same_bits() -> Iterator[None]:
    """Every call gives the same bits, on a GPU, too."""
    torch.use_deterministic_algorithms(True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one process."""
    os.environ.pop("RANK", None)
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def quiet_torch_onnx() -> Iterator[None]:
    """torch.onnx logs that torchvision is missing."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def same_seed() -> None:
    torch.manual_seed(0)
