"""The C library: a program in C99, compiled against its header, gets Python's results bit by bit,
and an error for each wrong argument."""

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import call_fields
import pytest
import torch
from builds import ROOT, once
from cases import CASES, COMPOSED, TERMS, TILES, Case, as_call, make_inputs
from torch import Tensor

from txl_kernels import rel_attention
from txl_kernels.backends import cpu, native_modules
from txl_kernels.call import (
    BOUNDS,
    INPUT,
    INPUTS,
    SETTINGS,
    Call,
    Input,
    memory_len_of,
    position_width_of,
    table_len_of,
)

LIBRARY = native_modules.library_of("_native", cpu.native.file)
HEADER = ROOT / "csrc" / "include" / "txl_attention.h"
SOURCE = Path(__file__).with_name("program.c")
SIZES = tuple(dict.fromkeys(letter for x in INPUT.values() for letter in x.axes.split()))
REALS = tuple(name for name in SETTINGS if Call.__annotations__[name] is float)
INTEGERS = tuple(name for name in SETTINGS if name not in (*REALS, "zero_outside"))
FLAGS = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O1"]
FLAGS += [
    f"-D{name}(X)={' '.join(f'X({field})' for field in fields)}"
    for name, fields in {
        "SIZES": SIZES, "INTEGERS": INTEGERS, "REALS": REALS, "TENSORS": INPUTS, "BOUNDS": BOUNDS,
    }.items()
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]
ALL = 2**63 - 1


class Recorded(NamedTuple):
    """A call of the backend and its results; dout is None for a call without backward."""

    call: Call
    out: Tensor
    lse: Tensor
    dout: Tensor | None = None
    dlse: Tensor | None = None
    gradients: tuple[Tensor | None, ...] = ()


def recorded(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Return the calls of the backend that one call of `rel_attention` and its backward make."""
    found: list[Recorded] = []
    forward, backward = cpu.forward, cpu.backward

    def record_forward(call: Call, *args: Any, **named: Any) -> Any:
        out, lse = forward(call, *args, **named)
        found.append(Recorded(call, out, lse))
        return out, lse

    def record_backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Any, *args: Any, **named: Any) -> Any:
        gradients = backward(call, out, lse, dout, dlse, *args, **named)
        found.append(Recorded(call, out, lse, dout, dlse, gradients))
        return gradients

    inputs = make_inputs(case, dtype)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "forward", record_forward)
        patch.setattr(cpu, "backward", record_backward)
        out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="native")
        if out.numel():
            (out.float().square().sum() + lse.where(lse.isfinite(), 0.0).sum()).backward()
    return [x for x in found if x.dout is not None or not out.numel()]


def compiler(source: Path, header: Path = HEADER, library: Path = LIBRARY) -> list[str]:
    return ["cc", *FLAGS, f"-I{header.parent}", str(source), str(library), f"-Wl,-rpath,{library.parent}"]


def compile_program(folder: Path) -> None:
    subprocess.run([*compiler(SOURCE), "-o", str(folder / "program")], check=True)


@pytest.fixture(scope="module")
def run() -> Callable[..., subprocess.CompletedProcess[bytes]]:
    folder = once("c_program", [SOURCE, HEADER], [FLAGS, str(LIBRARY)], "cc", compile_program)

    def run(given: bytes, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        command = [str(folder / "program"), *arguments]
        return subprocess.run(command, input=given, capture_output=True, env=os.environ | environment, timeout=120)

    return run


def memory_of(x: Tensor) -> Tensor:
    """Return the memory from a tensor's first element to its last."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.detach().as_strided((span,), (1,))


def nans_like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).fill_(torch.nan)


def packed(x: Tensor | None, changes: dict[Any, int]) -> bytes:
    """A tensor as the program reads it. changes: other strides than x's, by axis; or under "offset"
    a number of bytes before its memory."""
    strides = [0, 0, 0, 0]
    if x is None:
        return struct.pack("=6q", -1, 0, *strides)
    strides[: x.dim()] = x.stride()
    for axis in range(4):
        strides[axis] = changes.get(axis, strides[axis])
    raw = memory_of(x).contiguous().view(torch.uint8).numpy().tobytes()
    return struct.pack("=6q", len(raw), changes.get("offset", 0), *strides) + raw


def fields_of(x: Recorded) -> dict[str, Any]:
    """Return the fields of both structs, by name; those of txl_gradients with "d" before it."""
    call = x.call
    q, v = call.q, call.v
    sizes = dict(zip("BHLD", q.shape, strict=True)) | {"Hkv": call.k.size(1), "Dv": v.size(3)}
    sizes |= {"M": memory_len_of(call), "Dp": position_width_of(call), "T": table_len_of(call)}
    fields: dict[str, Any] = {"struct_size": -1, "type": cpu.LIMITS.dtypes.index(q.dtype)} | sizes
    fields["seed"] = 0 if call.seed is None else int(call.seed)
    fields |= {name: getattr(call, name) for name in (*SETTINGS, *INPUTS, *BOUNDS)}
    fields |= {name: ALL if fields[name] is None else fields[name] for name in INTEGERS}
    fields |= {"out": nans_like(x.out), "lse": nans_like(x.lse)}
    if x.dout is not None:
        fields |= {"dstruct_size": -1, "dout": x.dout, "dlse": x.dlse}
        fields |= {f"d{n}": nans_like(g) for n, g in zip(INPUTS, x.gradients, strict=True)}
    return fields


def as_bytes(fields: dict[str, Any], changes: dict[str, dict[Any, int]] | None = None) -> bytes:
    """The call as the program reads it. changes: of tensors, see `packed`."""
    integers = ("struct_size", "type", "seed", *SIZES, *INTEGERS)
    given = struct.pack(f"={len(integers)}q", *(fields[name] for name in integers))
    given += struct.pack(f"={len(REALS)}d", *(fields[name] for name in REALS))
    given += struct.pack("=q", fields["zero_outside"])
    changes = changes or {}
    given += b"".join(packed(fields[name], changes.get(name, {})) for name in (*INPUTS, *BOUNDS, "out", "lse"))
    given += struct.pack("=q", "dstruct_size" in fields)
    if "dstruct_size" in fields:
        given += struct.pack("=q", fields["dstruct_size"])
        given += b"".join(packed(fields[f"d{name}"], changes.get(f"d{name}", {})) for name in ("out", "lse", *INPUTS))
    return given


class Output:
    """The output of the program, read from its beginning."""

    def __init__(self, written: bytes) -> None:
        self.rest = written

    def take(self, count: int) -> bytes:
        taken, self.rest = self.rest[:count], self.rest[count:]
        assert len(taken) == count
        return taken

    def outcome(self) -> tuple[int, str]:
        """Return the code of a function, and its message."""
        code, length = struct.unpack("=2q", self.take(16))
        return code, self.take(length).decode()

    def tensor(self, like: Tensor) -> Tensor:
        memory = memory_of(like)
        raw = bytearray(self.take(memory.nbytes))
        flat = torch.frombuffer(raw, dtype=like.dtype) if raw else memory
        return flat.as_strided(like.shape, like.stride())


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ["", "baseline"])
def test_program_gets_the_results_of_python(
    run: Any, dtype: torch.dtype, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [*CASES, *TERMS, *COMPOSED, *TILES[:2], TILES[10]]
    cpu.module().force_isa(isa)
    try:
        calls = [(case, x) for case in cases for x in recorded(case, dtype, monkeypatch)]
        name = cpu.module().isa()
    finally:
        cpu.module().force_isa("")
    assert len(calls) >= len(cases)
    assert {n for _, x in calls for n in INPUTS if x.call._asdict()[n] is not None} == set(INPUTS)
    done = run(b"".join(as_bytes(fields_of(x)) for _, x in calls), TXL_KERNELS_ISA=isa)
    assert done.returncode == 0, done.stderr
    unknown, used = done.stderr.decode().splitlines()
    assert unknown.startswith("TXL_KERNELS_ISA=mmx is not known; this build has ")
    assert used == f"{name}, {len(os.sched_getaffinity(0))} threads"
    output = Output(done.stdout)
    for case, x in calls:
        assert output.outcome() == (0, ""), case
        wanted = {"out": x.out, "lse": x.lse}
        if x.dout is not None:
            got = [output.tensor(x.out), output.tensor(x.lse)]
            assert output.outcome() == (0, ""), case
            wanted |= {n: g for n, g in zip(INPUTS, x.gradients, strict=True) if g is not None}
            got += [output.tensor(g) for g in list(wanted.values())[2:]]
        else:
            got = [output.tensor(y) for y in wanted.values()]
        for (what, y), z in zip(wanted.items(), got, strict=True):
            assert torch.equal(y, z), f"{case}: {what}"
    assert not output.rest


@pytest.mark.parametrize("name", ["reversed", "failed"])
def test_forward_on_the_caller_s_threads(run: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are the same bits in any order of tasks, and if some or all are left undone."""
    cases = [*CASES[:5], *TERMS, *TILES[:2], TILES[10]]
    calls = [x for case in cases for x in recorded(case, torch.float32, monkeypatch)]
    done = run(b"".join(as_bytes(fields_of(x._replace(dout=None))) for x in calls), name)
    assert done.returncode == 0, done.stderr
    output = Output(done.stdout)
    for x in calls:
        assert output.outcome() == (0, "")
        assert torch.equal(output.tensor(x.out), x.out)
        assert torch.equal(output.tensor(x.lse), x.lse)
    assert not output.rest


def padded(x: Tensor | None) -> Tensor | None:
    """Return NaN in x's shape, with two more elements between the rows of its last axis."""
    return None if x is None else x.new_full((*x.shape[:-1], x.size(-1) + 2), torch.nan)[..., :-2]


def test_results_with_strides_of_their_own(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the elements of a tensor are written, not what lies between them."""
    x = call_of_every_term(monkeypatch)
    fields = fields_of(x) | {"out": padded(x.out)}
    fields |= {f"d{name}": padded(g) for name, g in zip(INPUTS, x.gradients, strict=True)}
    output = Output(run(as_bytes(fields)).stdout)
    wanted = [("out", x.out), ("lse", x.lse), *((f"d{n}", g) for n, g in zip(INPUTS, x.gradients, strict=True))]
    for name, want in wanted:
        if name in ("out", "dq"):
            assert output.outcome() == (0, "")
        got = output.tensor(fields[name])
        assert torch.equal(got, want), name
        assert int(memory_of(got).isnan().sum()) == memory_of(got).numel() - got.numel()
    assert not output.rest


CASE = Case("every term", B=2, H=4, Hkv=2, L=6, M=5, D=8, Dp=3, r_bias="H T", sink="B H L", intervals="random")
SIZE_OF = r"sizeof\({}\) = \d+, that of this library's header, or that of an older one"
# A changed field, or the strides of a tensor; the message.
WRONG: list[tuple[str, Any, str]] = [
    ("struct_size", 0, rf"struct_size must be {SIZE_OF.format('txl_call')}, got 0"),
    ("struct_size", 100, rf"struct_size must be {SIZE_OF.format('txl_call')}, got 100"),  # cuts a field
    ("struct_size", 2**40, rf"struct_size must be {SIZE_OF.format('txl_call')}, got {2**40}"),
    ("type", 2, r"type must be TXL_FLOAT32 \(0\) or TXL_BFLOAT16 \(1\), got 2"),
    ("B", -1, "B must be from 0 to 2147483647, got -1"),
    ("T", 2**31, "T must be from 0 to 2147483647, got 2147483648"),
    ("D", 0, "D must be at least 1, got 0"),
    ("Dv", 0, "Dv must be at least 1, got 0"),
    ("Dp", 0, "Dp must be at least 1, got 0"),
    ("Hkv", 3, "Hkv must be H = 4 or a divisor of it, got 3"),
    ("Hkv", 0, "Hkv must be H = 4 or a divisor of it, got 0"),
    ("q_pos", None, "Dp must be D = 8 without q_pos, got 3"),
    ("left", -1, "left must be at least 0, or TXL_ALL, got -1"),
    ("right", -1, "right must be at least 0, or TXL_ALL, got -1"),
    ("zero_row", -1, "zero_row must be from 0 to 2147483647, got -1"),
    ("scale", float("nan"), "scale must be finite as a float, got -?nan"),
    ("position_scale", 1e39, r"position_scale must be finite as a float, got 1e\+39"),
    ("dropout_p", 1.0, r"dropout_p must be in \[0, 1\), got 1"),
    ("softcap", 1e-31, "softcap must be 0 for none, or from 1e-30 to 1e30, got 1e-31"),
    ("zero_outside", 2, "zero_outside must be 0 or 1, got 2"),
    ("q", None, "q must be given, got NULL"),
    ("v_mem", None, "v_mem must be given, got NULL"),
    ("out", None, "out must be given, got NULL"),
    ("q", {3: 2}, r"q.stride\[3\] must be 1, its last axis contiguous, got 2"),
    ("k", {0: -1}, r"k.stride\[0\] must be at least 0, got -1"),
    ("v", {0: 2**62}, r"v.stride\[0\] must be such that the tensor fits in memory, got 4611686018427387904"),
    ("out", {0: 0}, "out.stride must be such that no elements share memory, got 0"),
    ("T", 3, r"T must be enough for the distances 1 to \d+ that queries see, .* got T 3 and zero_row 0"),
    ("start", torch.full((2, 6), -1, dtype=torch.int32), r"start must hold key indices in \[0, M .* 11\], got -1"),
    ("end", torch.full((2, 6), 12, dtype=torch.int32), r"end must hold key indices in \[0, M .* 11\], got 12"),
    ("dstruct_size", 0, rf"gradients.struct_size must be {SIZE_OF.format('txl_gradients')}, got 0"),
    ("dstruct_size", 100, rf"gradients.struct_size must be {SIZE_OF.format('txl_gradients')}, got 100"),
    ("lse", None, "lse must be given, got NULL"),
    ("dout", None, "gradients.out must be given, got NULL"),
    ("q", {"offset": 2}, r"q.data must be at a multiple of its element's size, got \d+"),
    ("lse", {"offset": 2}, r"lse must be at a multiple of 4 bytes, got \d+"),
    ("end", {"offset": 1}, r"end.data must be at a multiple of its element's size, got \d+"),
    ("dlse", {"offset": 2}, r"gradients.lse must be at a multiple of 4 bytes, got \d+"),
    ("dv", {"offset": 2}, r"gradients.v.data must be at a multiple of its element's size, got \d+"),
    ("dk", {2: 0}, "gradients.k.stride must be such that no elements share memory, got 0"),
    ("dsink", {2: 2}, r"gradients.sink.stride\[2\] must be 1, its last axis contiguous, got 2"),
]  # fmt: skip


def call_of_every_term(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    [x] = recorded(CASE, torch.float32, monkeypatch)
    return x


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(WRONG)])
def test_wrong_argument_is_refused(
    run: Any, name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = fields_of(call_of_every_term(monkeypatch))
    assert name in fields
    given = as_bytes(fields, {name: value}) if isinstance(value, dict) else as_bytes(fields | {name: value})
    done = run(given)
    assert done.returncode == 0, done.stderr
    output = Output(done.stdout)
    code, said = output.outcome()
    if code == 0:  # forward does not read it
        output.tensor(fields["out"])
        if fields["lse"] is not None and name != "lse":
            output.tensor(fields["lse"])
        code, said = output.outcome()
    else:
        assert output.outcome()[0] == 1  # backward refuses it, too
    assert code == 1
    with pytest.raises(ValueError, match=rf"^{message}$"):
        raise ValueError(said)
    assert not output.rest


def test_missing_and_superfluous_tensors(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = fields_of(call_of_every_term(monkeypatch))
    for changes, message in (
        ({"r": None, "r_bias": None, "dr": None, "dr_bias": None}, "r must be given, or r_bias, got NULL for both"),
        ({"content_bias": None}, "gradients.content_bias must be NULL where content_bias is NULL"),
    ):
        output = Output(run(as_bytes(fields | changes)).stdout)
        code, said = output.outcome()
        if not code:
            output.tensor(fields["out"]), output.tensor(fields["lse"])
            code, said = output.outcome()
        assert (code, said) == (1, message)


def newer_sources(
    folder: Path, fields: dict[str, Any], others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Write the sources of a library whose calls have more fields, before today's: those of version
    2 of its structs, and others that no kernel takes yet. Return their folder.

    fields, others: a type for each setting, or an `Input`.
    """
    tables = {name: x for name, x in (fields | others).items() if isinstance(x, Input)}
    settings = {name: x for name, x in (fields | others).items() if name not in tables}
    for name in fields:
        monkeypatch.setitem(call_fields.TAKEN_BY, name, ("native",))
        monkeypatch.setitem(call_fields.SINCE, name, 2)
    for name, x in tables.items():
        monkeypatch.setitem(INPUT, name, x)
    monkeypatch.setattr(call_fields, "INPUTS", (*tables, *INPUTS))
    monkeypatch.setattr(call_fields, "SETTINGS", (*settings, *SETTINGS))
    types = dict.fromkeys(tables, Tensor | None) | Call.__annotations__ | settings
    monkeypatch.setattr(call_fields, "Call", NamedTuple("Call", list(types.items())))
    shutil.copytree(ROOT / "csrc", folder, ignore=shutil.ignore_patterns("cuda", "python"))
    for file, text in call_fields.texts().items():
        (folder / file.relative_to(ROOT / "csrc")).write_text(text)
    return folder


# In place of the other sources of the library; kernels are those of the one that is installed.
REST = """
#include <stdexcept>
#include "cpu/dispatch.h"
#include "cpu/runtime.h"
namespace txl {
void force_isa(const std::string& name) { throw std::runtime_error(name); }
OnCallersThreads::OnCallersThreads(CallersThreads threads) : before_(threads) {}
OnCallersThreads::~OnCallersThreads() {}
}
"""


def test_program_of_an_older_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on a library whose header has one more field, as a program of that header does, which
    today's library refuses."""
    x = call_of_every_term(monkeypatch)
    csrc = newer_sources(tmp_path / "csrc", {"extra": int}, {"other": float}, monkeypatch)
    (tmp_path / "rest.cpp").write_text(REST)
    sources = [csrc / "cpu" / "c_api.cpp", csrc / "cpu" / "c_checks.cpp", tmp_path / "rest.cpp"]
    newer = tmp_path / "libnewer.so"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-I{csrc}", *map(str, sources), str(LIBRARY)]
    subprocess.run([*command, f"-Wl,-rpath,{LIBRARY.parent}", "-o", str(newer)], check=True)
    newer_header = csrc / "include" / HEADER.name
    program, fields, said = tmp_path / "program", fields_of(x), ""
    for header, library in ((HEADER, newer), (newer_header, newer), (newer_header, LIBRARY)):
        subprocess.run([*compiler(SOURCE, header, library), "-o", str(program)], check=True)
        done = subprocess.run([str(program)], input=as_bytes(fields), capture_output=True, check=True)
        output = Output(done.stdout)
        code, said = output.outcome()
        if library == newer:
            got = [output.tensor(x.out), output.tensor(x.lse)]
            assert (code, output.outcome()) == (0, (0, ""))
            got += [output.tensor(g) for g in x.gradients if g is not None]
            wanted = [x.out, x.lse, *(g for g in x.gradients if g is not None)]
            assert all(torch.equal(y, z) for y, z in zip(got, wanted, strict=True))
            assert not output.rest
    assert code == 1
    assert re.fullmatch(rf"struct_size must be {SIZE_OF.format('txl_call')}, got \d+", said)


READ = """
#include <cstring>
#include "cpu/c_checks.h"
#include "errors.h"
extern "C" __attribute__((visibility("default"))) const char* read(int n, const void* given, void* to) {
  const int code = txl::guard([&] {
    if (n == 0) { const auto x = txl::read_call(static_cast<const txl_call*>(given)); std::memcpy(to, &x, sizeof x); }
    else { const auto x = txl::read_gradients(static_cast<const txl_gradients*>(given)); std::memcpy(to, &x, sizeof x); }
  });
  return code ? txl::g_error : nullptr;
}
extern "C" __attribute__((visibility("default"))) size_t size(int n) {
  return n ? sizeof(txl_gradients) : sizeof(txl_call);
}
"""


def test_fields_that_an_older_header_lacks_are_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new size, a flag and a tensor lie behind the older struct's, and are not read there."""
    fields, others = {"flag": bool, "table": Input("H New")}, {"other": Input("H Other")}
    csrc = newer_sources(tmp_path / "csrc", fields, others, monkeypatch)
    (tmp_path / "read.cpp").write_text(READ)
    command = ["c++", "-std=c++17", "-shared", "-fPIC", f"-I{csrc}", str(tmp_path / "read.cpp")]
    subprocess.run([*command, str(csrc / "cpu" / "c_checks.cpp"), "-o", str(tmp_path / "read.so")], check=True)
    library = ctypes.CDLL(str(tmp_path / "read.so"))
    library.read.restype, library.size.restype = ctypes.c_char_p, ctypes.c_size_t
    tensor = 8 + 4 * 8
    for n, new in ((0, 8 + 8 + tensor), (1, tensor)):
        size = library.size(n)
        accepted = set()
        for given in range(2 * size):
            memory = ctypes.create_string_buffer(b"\xff" * 2 * size, 2 * size)
            memory[:8] = given.to_bytes(8, "little")
            to = ctypes.create_string_buffer(size)
            if (message := library.read(n, memory, to)) is None:
                accepted.add(given)
                assert to.raw == memory.raw[:given] + bytes(size - given)
            else:
                name = ("struct_size", "gradients.struct_size")[n]
                assert re.match(rf"{name} must be sizeof\(\w+\) = {size}, .*, got {given}", message.decode())
        assert accepted == {size - new, size}


def test_example_of_the_documentation(tmp_path: Path) -> None:
    _, text = (ROOT / "docs" / "how-to" / "c.md").read_text().split("```c\n", 1)
    source = tmp_path / "program.c"
    source.write_text(text.split("```")[0])
    subprocess.run([*compiler(source), "-o", str(tmp_path / "program")], check=True)
    said = subprocess.run([str(tmp_path / "program")], capture_output=True, text=True, check=True).stdout

    def counted(rows: int, step: float) -> Tensor:
        return torch.arange(4 * rows).view(1, 1, rows, 4) * step

    q, memory = counted(3, 0.1).requires_grad_(), counted(2, -0.1)
    x = q.detach()
    out = rel_attention(q, x, x, counted(5, 0.05)[0], None, None, (memory, memory), scale=0.5, backend="native")
    out.sum().backward()
    assert said.startswith(
        f"out {out[0, 0, -1, -1]:.6f}, gradient {q.grad[0, 0, -1, -1]:.6f}, by {cpu.module().isa()} on "
    )


def test_unknown_instruction_set(run: Any) -> None:
    done = run(b"", TXL_KERNELS_ISA="mmx")
    assert done.returncode == 7
    assert b"none, " in done.stderr


def test_library_exports_its_functions_alone() -> None:
    listed = subprocess.run(["nm", "-D", "--defined-only", str(LIBRARY)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    declared = {
        line.split("(")[0].split()[-1].lstrip("*")
        for line in HEADER.read_text().splitlines()
        if line.startswith("TXL_API")
    }
    assert len(declared) == 8
    assert names == declared | {"txl_cpu_library"}


def test_two_copies_in_a_process_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module calls the library beside it, and is not taken for the other."""
    first = cpu.module()
    for file in (cpu.native.file, LIBRARY):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(native_modules, "PACKAGE", tmp_path)
    monkeypatch.setitem(sys.modules, "txl_kernels._native", None)  # restored at the end
    second = native_modules.load("_native", "C++").module
    second.force_isa("baseline")
    assert second.isa() == "baseline"
    assert first.isa() != "baseline"
    assert (first.threading(), second.threading()) == ("torch-openmp", "threads")


def test_library_that_is_missing_or_of_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_modules, "PACKAGE", tmp_path)
    monkeypatch.setattr(native_modules, "SOURCES", tmp_path)  # no source tree
    module, library = tmp_path / cpu.native.file.name, tmp_path / LIBRARY.name
    module.write_bytes(cpu.native.file.read_bytes())
    why = native_modules.load("_native", "C++").why_not_loaded
    assert f"the C++ module could not be loaded: {library}: cannot open shared object file" in why
    library.write_bytes(LIBRARY.read_bytes().replace(cpu.native.module.SOURCE_HASH.encode(), b"0123456789abcdef"))
    why = native_modules.load("_native", "C++").why_not_loaded
    assert why == f"the C++ module could not be loaded: {library} was built from other sources than {module.name}"
