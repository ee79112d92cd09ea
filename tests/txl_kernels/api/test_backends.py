"""The protocol every backend keeps, and the order of a call's fields that Python and C++ share."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import Case, as_fields, make_inputs
from internals import IMPORT, INSTALLED

from txl_kernels.backends import BACKENDS, KERNELS, cpu, cuda, native_modules, protocol
from txl_kernels.backends.source_hash import source_hash
from txl_kernels.call import BOUNDS, INPUTS, SETTINGS, TENSORS, Call, inputs_of, settings_of, tensors_of

CPU = torch.device("cpu")


def test_rocm_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm is refused" in (protocol.why_not_gpu.__wrapped__(torch.device("cuda")) or "")


@pytest.mark.parametrize("name", BACKENDS)
def test_says_what_it_takes(name: str) -> None:
    backend = BACKENDS[name]
    assert name == backend.NAME
    widths = backend.HEAD_WIDTHS
    if widths.maximum is not None:
        assert f"up to {widths.maximum}, not {widths.maximum + 8}" in str(
            backend.why_not_tensors(CPU, torch.float32, widths.maximum + 8)
        )
    if backend.DTYPES is not None:
        assert "not float64" in str(backend.why_not_tensors(CPU, torch.float64))
        assert torch.float64 not in backend.DTYPES


def test_groups_of_fields_are_all_fields() -> None:
    assert (*TENSORS, *SETTINGS) == Call._fields
    assert (*INPUTS, *BOUNDS, "seed") == TENSORS
    call = as_fields(make_inputs(Case("", dropout_p=0.1, intervals="random"), torch.float32))
    assert tuple(getattr(call, name) for name in INPUTS) == inputs_of(call)
    assert tuple(getattr(call, name) for name in SETTINGS) == settings_of(call)
    assert len(inputs_of(call)) + len(BOUNDS) + 1 == len(tensors_of(call))


def _module(**values: object) -> Callable[[str, Path], SimpleNamespace]:
    """What importing any module gives."""
    return lambda name, file: SimpleNamespace(**values)


def test_a_module_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the fields is written in C++ too; one that differs would read one tensor for
    another."""
    monkeypatch.setattr(native_modules, "PACKAGE", tmp_path)
    monkeypatch.setattr(native_modules, "SOURCES", tmp_path)
    (tmp_path / "_native.so").touch()
    for values in ({"FIELDS": ("k", "q", *Call._fields[2:])}, {}):
        IMPORT.replace(monkeypatch, _module(**values))
        loaded = native_modules.load("_native", "C++")
        assert loaded.module is None
        assert f"{tmp_path / '_native.so'} was built from another version of the source" in str(loaded.why_not_loaded)


def test_a_module_that_its_sources_left_behind_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install, then `git pull`: the module must not answer for sources it is not of."""
    for file in ("attention.h", "cpu/kernel.cpp", "cuda/kernel.cu"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("before")
    built = source_hash(tmp_path, "_native")
    monkeypatch.setattr(native_modules, "PACKAGE", tmp_path)
    monkeypatch.setattr(native_modules, "SOURCES", tmp_path)
    silent = {"TORCH_FUNCTIONS": (), "set_torch_functions": lambda addresses: None, "facts": lambda x: None}
    IMPORT.replace(monkeypatch, _module(FIELDS=Call._fields, SOURCE_HASH=built, **silent))
    INSTALLED.replace(monkeypatch, list)
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
    (tmp_path / "cpu" / ".#kernel.cpp").symlink_to("nobody@nowhere")  # an editor's lock
    assert native_modules.load("_native", "C++").module is not None
    (tmp_path / "attention.h").unlink()  # no source tree: an installed package
    assert native_modules.load("_native", "C++").module is not None


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone beside an installed package: `tree` without modules, `site` with this one's."""
    root = native_modules.PACKAGE.parent
    listed = subprocess.run(["git", "ls-files", "txl_kernels", "csrc"], cwd=root, capture_output=True, check=True)
    for name in listed.stdout.decode().split():
        target = tmp_path / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target)
    site = tmp_path / "site" / "txl_kernels"
    site.mkdir(parents=True)
    for native in (cpu.native, cuda.native):
        if native.file is not None:
            shutil.copy(native.file, site)
    metadata = tmp_path / "site" / "txl_kernels-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: txl-kernels\nVersion: 0\n")
    return tmp_path


def _diagnosis(clone: Path) -> str:
    """`python -m txl_kernels` in the clone, with `site` as the only place where the package is
    installed."""
    hide = "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f)]"
    only = "site = sys.argv.pop(); m.distributions = lambda **k: m.Distribution.discover(path=[site], **k)"
    run = "import runpy; runpy.run_module('txl_kernels', run_name='__main__')"
    code = f"import sys, importlib.metadata as m; {hide}; {only}; {run}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code, str(clone / "site")]
    done = subprocess.run(command, cwd=clone / "tree", env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_source_tree_takes_the_installed_modules_of_its_own_sources(clone: Path) -> None:
    """`pip install .`, then `python -m txl_kernels` or a benchmark in the same clone."""
    says = _diagnosis(clone)
    assert f"imported from {clone / 'tree' / 'txl_kernels'}" in says
    assert "  native     works for float32, bfloat16" in says
    module = clone / "site" / "txl_kernels" / Path(str(cpu.native.file)).name
    assert f"  {module}, installed: this source tree has none of its own" in says


def test_a_source_tree_refuses_installed_modules_of_other_sources(clone: Path) -> None:
    with (clone / "tree" / "csrc" / "attention.h").open("a") as file:
        file.write("// a later version\n")
    says = _diagnosis(clone)
    assert f"this is the source tree {clone / 'tree'}, where the C++ module is not built" in says
    assert "was built from other sources: `pip install .` in this tree brings it up to date" in says
    shutil.rmtree(clone / "site")
    assert "no installed package has it: `pip install .` in this tree builds it" in _diagnosis(clone)


def test_kernels_refuse_by_the_reason_they_give(monkeypatch: pytest.MonkeyPatch) -> None:
    call = as_fields(make_inputs(dataclasses.replace(Case(""), L=2), torch.float32))
    for name, kernels in KERNELS.items():
        monkeypatch.setattr(kernels, "why_not_tensors", lambda *args: None)
        monkeypatch.setattr(kernels, "why_not_call", lambda call, name=name: f"{name} will not")
        with pytest.raises(RuntimeError, match=f"{name} will not"):
            torch.ops.txl_kernels.rel_attention(*call, name)
