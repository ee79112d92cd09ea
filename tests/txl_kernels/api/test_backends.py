"""The protocol every backend keeps, and the order of a call's fields that Python and C++ share."""

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracle import Case, as_fields, make_inputs

from txl_kernels.backends import BACKENDS, KERNELS, native_modules
from txl_kernels.backends.source_hash import source_hash
from txl_kernels.call import Call
from txl_kernels.call.fields import BOUNDS, INPUTS, SETTINGS, TENSORS, inputs_of, settings_of, tensors_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", BACKENDS)
def test_says_what_it_takes(name: str) -> None:
    backend = BACKENDS[name]
    assert name == backend.NAME
    widths = backend.HEAD_WIDTHS
    if widths.most is not None:
        assert f"up to {widths.most}, not {widths.most + 8}" in str(
            backend.cannot_run(CPU, torch.float32, widths.most + 8)
        )
    if backend.DTYPES is not None:
        assert "not float64" in str(backend.cannot_run(CPU, torch.float64))
        assert torch.float64 not in backend.DTYPES


def test_groups_of_fields_are_all_fields() -> None:
    assert (*TENSORS, *SETTINGS) == Call._fields
    assert (*INPUTS, *BOUNDS, "seed") == TENSORS
    call = as_fields(make_inputs(Case("", dropout_p=0.1, intervals="random"), torch.float32))
    assert tuple(getattr(call, name) for name in INPUTS) == inputs_of(call)
    assert tuple(getattr(call, name) for name in SETTINGS) == settings_of(call)
    assert len(inputs_of(call)) + len(BOUNDS) + 1 == len(tensors_of(call))


def test_a_module_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the fields is written in C++ too; one that differs would read one tensor for
    another."""
    swapped = ("k", "q", *Call._fields[2:])
    here = native_modules.PACKAGE
    for folder, fields, said in (
        (here, swapped, "was built from another version of the source"),
        (here, None, "was built from another version of the source"),
        (here.parent, Call._fields, "is of another copy of the package"),
    ):
        module = SimpleNamespace(__file__=str(folder / "_native.so"), **({"FIELDS": fields} if fields else {}))
        importer = SimpleNamespace(import_module=lambda name, module=module: module, metadata=importlib.metadata)
        with monkeypatch.context() as patch:
            patch.setattr(native_modules, "importlib", importer)
            loaded = native_modules.load("_native", "C++")
        assert loaded.module is None
        assert f"{folder / '_native.so'} {said}" in loaded.error


def test_a_module_that_its_sources_left_behind_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install, then `git pull`: the module must not answer for sources it is not of."""
    for file in ("problem.h", "cpu/kernel.cpp", "cuda/kernel.cu"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("before")
    built = source_hash(tmp_path, "_native")
    module = SimpleNamespace(
        __file__=str(native_modules.PACKAGE / "_native.so"), FIELDS=Call._fields, SOURCE_HASH=built
    )
    importer = SimpleNamespace(import_module=lambda name: module, metadata=importlib.metadata)
    monkeypatch.setattr(native_modules, "importlib", importer)
    monkeypatch.setattr(native_modules, "SOURCES", tmp_path)
    assert native_modules.load("_native", "C++").module is module
    (tmp_path / "cuda/kernel.cu").write_text("after")  # the other module's
    assert native_modules.load("_native", "C++").module is module
    for file in ("problem.h", "cpu/kernel.cpp"):
        (tmp_path / file).write_text("after")
        loaded = native_modules.load("_native", "C++")
        assert loaded.module is None
        assert "was built from another version of the source; install the package again" in loaded.error
        (tmp_path / file).write_text("before")
    (tmp_path / "cpu" / ".#kernel.cpp").symlink_to("nobody@nowhere")  # an editor's lock
    assert native_modules.load("_native", "C++").module is module
    (tmp_path / "problem.h").unlink()  # no source tree: an installed package
    assert native_modules.load("_native", "C++").module is module


COPY = """
import shutil, sys
from pathlib import Path
import txl_kernels
site = Path(sys.argv[1])
ignored = shutil.ignore_patterns("*.so", "*_missing.txt", "__pycache__")
shutil.copytree(txl_kernels.__path__[0], site / "tree" / "txl_kernels", ignore=ignored)
"""


def test_a_source_tree_that_hides_the_installed_package_says_so(tmp_path: Path) -> None:
    """`pip install .` and then `python -m txl_kernels` in the same clone."""
    subprocess.run([sys.executable, "-c", COPY, str(tmp_path)], check=True)
    site, tree = tmp_path / "site", tmp_path / "tree"
    (site / "txl_kernels").mkdir(parents=True)
    (site / "txl_kernels" / "_native.abi.so").touch()
    metadata = site / "txl_kernels-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: txl-kernels\nVersion: 0\n")
    code = f"import sys; sys.path.append({str(site)!r}); import runpy; runpy.run_module('txl_kernels')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    assert f"this is the source tree {tree}, where the C++ module is not built" in done.stdout
    assert f"the installed package, {site / 'txl_kernels'}, has it" in done.stdout
    assert "pip install -e ." in done.stdout


def test_kernels_refuse_by_the_reason_they_give(monkeypatch: pytest.MonkeyPatch) -> None:
    call = as_fields(make_inputs(dataclasses.replace(Case(""), L=2), torch.float32))
    for name, kernels in KERNELS.items():
        monkeypatch.setattr(kernels, "cannot_run", lambda *args: None)
        monkeypatch.setattr(kernels, "refuses", lambda call, name=name: f"{name} will not")
        with pytest.raises(RuntimeError, match=f"{name} will not"):
            torch.ops.txl_kernels.rel_attention(*call, name)
