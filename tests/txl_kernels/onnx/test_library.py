"""The library of the operator for ONNX Runtime, where that is not installed: its file, its symbols,
and its declarations beside the official header's."""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from builds import ROOT

from txl_kernels import onnx
from txl_kernels.backends import cpu, native_modules

API = ROOT / "csrc" / "cpu" / "onnx" / "onnxruntime_api.h"
HEADERS = ("onnxruntime_c_api.h", "onnxruntime/onnxruntime_c_api.h")  # Debian: libonnxruntime-dev, from trixie on

CHECKS = r"""
#include <type_traits>
using namespace txl::onnx;
#define SLOT(number, name, parameters) static_assert(offsetof(OrtApi, name) == number * sizeof(void*), #name);
#define TYPE(number, name, parameters) static_assert(std::is_convertible_v<decltype(OrtApi::name), decltype(Api::name)>, #name);
TXL_ORT_FUNCTIONS(SLOT) TXL_ORT_FUNCTIONS(TYPE)
TXL_ORT_ENUMS(SLOT)
TXL_ORT_RELEASES(SLOT) TXL_ORT_RELEASES(TYPE)
#define MEMBER(name) static_assert(offsetof(::OrtCustomOp, name) == offsetof(CustomOp, name), #name);
MEMBERS
static_assert(sizeof(ONNXTensorElementDataType) == sizeof(int) && sizeof(OrtErrorCode) == sizeof(int));
static_assert(FAIL == int(ORT_FAIL) && INVALID_ARGUMENT == int(ORT_INVALID_ARGUMENT));
static_assert(REQUIRED == int(INPUT_OUTPUT_REQUIRED) && OPTIONAL == int(INPUT_OUTPUT_OPTIONAL) && OrtMemTypeDefault == 0);
static_assert(UNDEFINED == int(ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED) && FLOAT == int(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT));
static_assert(INT32 == int(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32) && INT64 == int(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64));
static_assert(offsetof(OrtApiBase, GetApi) == offsetof(ApiBase, GetApi));
static_assert(offsetof(OrtApiBase, GetVersionString) == offsetof(ApiBase, GetVersionString));
"""  # noqa: E501


def compiled(text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["c++", "-std=c++17", "-fsyntax-only", "-x", "c++", *options, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True)


@pytest.fixture(scope="module")
def official_header() -> str:
    for name in HEADERS:
        if compiled(f"#include <{name}>\n").returncode == 0:
            return name
    pytest.skip("no header of ONNX Runtime is installed (Debian: libonnxruntime-dev, from trixie on)")


def test_declarations_are_those_of_the_official_header(official_header: str) -> None:
    text = API.read_text(encoding="utf-8")
    members = re.findall(r"\(\*(\w+)\)\((?:const CustomOp\*|void\* kernel)", text)
    assert len(members) == 21
    checks = CHECKS.replace("MEMBERS", " ".join(f"MEMBER({name})" for name in ("version", *members)))

    def check(declarations: str) -> subprocess.CompletedProcess[str]:
        return compiled(f"#include <{official_header}>\n{declarations}\n{checks}")

    done = check(text)
    assert done.returncode == 0, done.stderr
    for old, new, said in (
        ("X(59, SetDimensions", "X(58, SetDimensions", "SetDimensions"),
        (
            "KernelInfoGetAttribute_float, (const OrtKernelInfo* info, const char* name, float*",
            "KernelInfoGetAttribute_float, (const OrtKernelInfo* info, const char* name, double*",
            "KernelInfoGetAttribute_float",
        ),
        ("  int (*GetStartVersion)(const CustomOp*) = nullptr;\n", "", "GetEndVersion"),
        ("INT64 = 7", "INT64 = 8", "the comparison reduces to"),
    ):
        assert text.count(old) == 1, old
        done = check(text.replace(old, new))
        assert done.returncode != 0
        assert said in done.stderr


def test_library_exports_one_function() -> None:
    command = ["nm", "-D", "--defined-only", onnx.library()]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["RegisterCustomOps"]


def test_runtime_that_is_too_old() -> None:
    """It gives no API of version 17, but can make a status."""
    get_api, get_version = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32), ctypes.CFUNCTYPE(ctypes.c_void_p)
    create_status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    said, version = [], ctypes.create_string_buffer(b"1.16.3")

    def record(code: int, message: bytes) -> int:
        said.append((code, message.decode()))
        return 1

    kept: list[Any] = [create_status(record), get_version(lambda: ctypes.addressof(version))]
    table = (ctypes.c_void_p * 1)(ctypes.cast(kept[0], ctypes.c_void_p))
    kept.append(get_api(lambda number: ctypes.addressof(table) if number == 1 else None))
    base = (ctypes.c_void_p * 2)(*(ctypes.cast(f, ctypes.c_void_p) for f in (kept[2], kept[1])))
    register = ctypes.CDLL(onnx.library()).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 1
    assert said == [(1, "txl::RelAttention needs ONNX Runtime 1.17 or newer, got 1.16.3")]


def test_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(onnx.library()).is_file()
    with monkeypatch.context() as patch:
        patch.setattr(cpu.native, "file", tmp_path / "_native.so")
        missing = native_modules.library_of("_native", tmp_path / "_native.so").name.replace("cpu", "onnx")
        with pytest.raises(RuntimeError, match=rf"ONNX Runtime is missing, {tmp_path / missing}; install the package"):
            onnx.library()
        patch.setattr(cpu.native, "file", None)
        patch.setattr(cpu.native, "why_not_loaded", "no C++ compiler found")
        with pytest.raises(RuntimeError, match=r"needs the C\+\+ kernels: no C\+\+ compiler found"):
            onnx.library()
