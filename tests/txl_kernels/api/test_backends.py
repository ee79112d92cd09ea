"""The protocol of backends, and the order of a call's fields that Python and C++ share."""

import functools
import importlib.machinery
import importlib.metadata
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import Case, as_fields, make_inputs
from processes import run_python

from txl_kernels.backends import BACKENDS, KERNELS, available_backends, cpu, native_modules, route
from txl_kernels.backends.source_hash import source_hash
from txl_kernels.call import Call

CPU = torch.device("cpu")
# What a module without torch's C functions has.
NO_FUNCTIONS = {"TORCH_FUNCTIONS": (), "set_torch_functions": lambda addresses: None, "tensor_metadata": lambda x: None}


@pytest.mark.parametrize("name", BACKENDS)
def test_reasons_of_refusals(name: str) -> None:
    backend = BACKENDS[name]
    assert name == backend.NAME
    limits = backend.LIMITS
    if limits.width is not None:
        assert f"up to {limits.width}, not {limits.width + 8}" in str(
            backend.why_not_tensors(CPU, torch.float32, limits.width + 8)
        )
    if limits.dtypes:
        assert "not float64" in str(backend.why_not_tensors(CPU, torch.float64))
        assert torch.float64 not in limits.dtypes


def _module(**values: object) -> Callable[[str, Path], SimpleNamespace]:
    """A function that imports any module as one with these values."""
    return lambda name, file: SimpleNamespace(**values)


def test_module_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ repeats the order of the fields; another order would exchange tensors."""
    monkeypatch.setattr(native_modules, "PACKAGE", tmp_path)
    monkeypatch.setattr(native_modules, "SOURCES", tmp_path)
    (tmp_path / "_native.so").touch()
    for values in ({"FIELDS": ("k", "q", *Call._fields[2:])}, {}):
        monkeypatch.setattr(native_modules, "_import", _module(**values))
        loaded = native_modules.load("_native", "C++")
        assert loaded.module is None
        assert f"{tmp_path / '_native.so'} was built from another version of the source" in str(loaded.why_not_loaded)


def test_module_older_than_its_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install, then `git pull`."""
    for file in ("attention.h", "cpu/kernel.cpp", "cuda/kernel.cu"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("before")
    built = source_hash(tmp_path, "_native")
    monkeypatch.setattr(native_modules, "PACKAGE", tmp_path)
    monkeypatch.setattr(native_modules, "SOURCES", tmp_path)
    monkeypatch.setattr(native_modules, "_import", _module(FIELDS=Call._fields, SOURCE_HASH=built, **NO_FUNCTIONS))
    monkeypatch.setattr(native_modules, "_installed", list)
    (tmp_path / "_native.so").touch()
    assert native_modules.load("_native", "C++").file == tmp_path / "_native.so"
    (tmp_path / "cuda/kernel.cu").write_text("after")  # the other module's
    assert native_modules.load("_native", "C++").module is not None
    for file in ("attention.h", "cpu/kernel.cpp"):
        (tmp_path / file).write_text("after")
        loaded = native_modules.load("_native", "C++")
        assert loaded.module is None
        assert "was built from another version of the source; install the package again" in loaded.why_not_loaded
        (tmp_path / file).write_text("before")
    (tmp_path / "cpu" / ".#kernel.cpp").symlink_to("user@host")  # an editor's lock
    assert native_modules.load("_native", "C++").module is not None
    (tmp_path / "attention.h").unlink()  # no source tree: an installed package
    assert native_modules.load("_native", "C++").module is not None


def test_source_tree_uses_installed_modules_of_the_same_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install .`, then `python -m txl_kernels` or a benchmark in the same clone."""
    site, metadata, csrc = (
        tmp_path / name for name in ("site/txl_kernels", "site/txl_kernels-0.dist-info", "tree/csrc")
    )
    for folder in (site, metadata, csrc):
        folder.mkdir(parents=True)
    (site / "_native.so").touch()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: txl-kernels\nVersion: 0\n")
    (csrc / "attention.h").write_text("before")
    monkeypatch.setattr(native_modules, "PACKAGE", tmp_path / "tree" / "txl_kernels")
    monkeypatch.setattr(native_modules, "SOURCES", csrc)
    found = functools.partial(importlib.metadata.Distribution.discover, path=[str(site.parent)])
    monkeypatch.setattr(importlib.metadata, "distributions", found)
    built = source_hash(csrc, "_native")
    monkeypatch.setattr(native_modules, "_import", _module(FIELDS=Call._fields, SOURCE_HASH=built, **NO_FUNCTIONS))
    assert native_modules.load("_native", "C++").file == site / "_native.so"
    (csrc / "attention.h").write_text("after")
    reason = str(native_modules.load("_native", "C++").why_not_loaded)
    assert f"this is the source tree {tmp_path / 'tree'}, where the C++ module is not built" in reason
    assert "was built from other sources: `pip install .` in this tree brings it up to date" in reason
    shutil.rmtree(site.parent)
    reason = str(native_modules.load("_native", "C++").why_not_loaded)
    assert "no installed package has it: `pip install .` in this tree builds it" in reason


def test_editable_install_in_a_folder_whose_name_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = SimpleNamespace(
        read_text={"direct_url.json": '{"url": "file:///caf%E9%2C%20another", "dir_info": {"editable": true}}'}.get
    )
    monkeypatch.setattr(native_modules, "in_source_tree", lambda: True)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [installed])
    assert list(native_modules._installed()) == [Path(os.fsdecode(b"/caf\xe9, another/txl_kernels"))]


@pytest.mark.parametrize("is_free_threaded", [False, True])
def test_wheel_without_a_module_for_this_python(
    is_free_threaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_modules, "PACKAGE", tmp_path)
    monkeypatch.setattr(native_modules, "SOURCES", tmp_path)
    monkeypatch.setattr(importlib.machinery, "EXTENSION_SUFFIXES", [".of-this-python.so"])
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": int(is_free_threaded)}.get)
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "linux-x86_64")
    own = ".".join(map(str, sys.version_info[:2]))
    for version in ("399", "38", "314t", own.replace(".", "")):
        (tmp_path / f"_native.cpython-{version}-x86_64-linux-gnu.so").touch()
    others = ", ".join(dict.fromkeys(["3.8", own, "3.14 free-threaded", "3.99"]))
    assert native_modules.load("_native", "C++").why_not_loaded == (
        f"{tmp_path} has a C++ module for CPython {others}; it has none for CPython {own}"
        f"{' free-threaded' if is_free_threaded else ''} on linux-x86_64: `pip install .` in a source tree builds it"
    )


@pytest.mark.slow
def test_package_works_in_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    """An old disk's or archive's name; what the package prints can be encoded."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    copy = shutil.copytree(native_modules.PACKAGE, folder / "txl_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    if cpu.native.file is not None:
        for file in (cpu.native.file, native_modules.library_of("_native", cpu.native.file)):
            shutil.copy(file, copy)
    done = run_python(
        "import txl_kernels, txl_kernels.__main__ as main; print(txl_kernels.available_backends()); main.main([])",
        cwd=tmp_path, PYTHONPATH=str(folder), PYTHONIOENCODING="utf-8:strict",
    )  # fmt: skip
    assert done.splitlines()[0] == str(available_backends())
    assert "caf\\udce9" in done


def test_operator_raises_the_reason_of_why_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call = as_fields(make_inputs(Case(L=2), torch.float32))
    for name, kernels in KERNELS.items():
        monkeypatch.setattr(kernels, "why_not_tensors", lambda *args: None)
        monkeypatch.setattr(route, "why_not_call", lambda name, call: f"{name} will not")
        with pytest.raises(RuntimeError, match=f"{name} will not"):
            torch.ops.txl_kernels.rel_attention(*call, name)
