"""The record of slow proofs: those that passed with the same code are skipped."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import proofs
import pytest

HERE = {"decode": "0123456789abcdef", "triton": "fedcba9876543210"}  # as on a machine without a family's compiler
DECODE, TRITON = "tests/txl_kernels/cuda/test_ptx.py::test_contract[x]", "tests/txl_kernels/triton/test_ptx.py::test_x"
ON_GPU = "tests/txl_kernels/cuda/test_ptx.py::test_x[device]"  # marked `gpu`: of no record
HOPPER, OTHER = "tests/txl_kernels/cuda/test_hopper_ptx.py::test_x", "tests/txl/test_ranks.py::test_y"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proofs, "present", lambda: dict(HERE))
    monkeypatch.setattr(proofs, "RECORD", tmp_path / "slow_proofs.json")
    return tmp_path / "slow_proofs.json"


def skipped() -> list[str]:
    """Return which of the tests a session would skip."""
    found: list[str] = []
    items = [
        SimpleNamespace(
            nodeid=x,
            add_marker=lambda mark, x=x: found.append(x),
            get_closest_marker=lambda mark, x=x: x if (mark, x) == ("gpu", ON_GPU) else None,
        )
        for x in (DECODE, ON_GPU, HOPPER, TRITON, OTHER)
    ]
    session: Any = proofs.Proofs()
    session.pytest_collection_modifyitems(items)
    return found


def finish(*outcomes: str, proof: str = DECODE, status: int = 0, keyword: str = "", **worker: Any) -> None:
    """End a session in which the proof had these outcomes."""
    session: Any = proofs.Proofs()
    for given in outcomes:
        outcome, _, reason = given.partition(": ")
        report = SimpleNamespace(
            nodeid=proof, when="call", passed=outcome == "passed", outcome=outcome, longrepr=reason
        )
        session.pytest_runtest_logreport(report)
    config = SimpleNamespace(args=["tests"], option=SimpleNamespace(keyword=keyword), **worker)
    session.pytest_sessionfinish(SimpleNamespace(config=config), status)


def test_proofs_are_skipped_until_something_changes(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert skipped() == []
    finish("passed", "skipped: none runs in sm_80", "skipped: needs a GPU: torch.cuda.is_available() is False")
    assert json.loads(record.read_text()) == {"decode": HERE["decode"]}
    assert skipped() == [DECODE]
    finish("passed", proof=TRITON)
    assert json.loads(record.read_text()) == HERE
    assert skipped() == [DECODE, TRITON]
    monkeypatch.setattr(proofs, "present", lambda: HERE | {"decode": "0" * 16})
    assert skipped() == [TRITON]
    monkeypatch.setattr(proofs, "present", dict)
    assert skipped() == []


def test_incomplete_sessions_are_not_recorded(record: Path) -> None:
    finish("passed", "failed", status=1)
    finish("passed", "skipped: needs nvcc")
    finish()
    finish("passed", status=2)
    finish("passed", workerinput={})
    finish("passed", keyword="one of them")
    finish("passed", proof=HOPPER)
    assert not record.exists()


PYTHON = """# one


def f(x: str) -> str:  # two
    'Return "é". \\
    Raises nothing.'
    # three
    return f"{x} # {{text}}"  # four
    'no docstring'


TEXT = '''

# no
'''
"""
CODE = """def f(x: str) -> str:
    return f"{x} # {{text}}"
    'no docstring'
TEXT = '''

# no
'''"""
CUDA = """#pragma once  // one
/* two
   and "three" */
const char* const x = "// text /* */ \\" //";  // four's
int y = 1'000 / 2 /* five */ + '"' /* six */;
// seven
float z;  // plant: a-name
"""


@pytest.mark.parametrize(("name", "text", "code"), [
    ("a.py", PYTHON, CODE),
    ("a.cuh", CUDA, '#pragma once\nconst char* const x = "// text /* */ \\" //";\nint y = 1\'000 / 2   + \'"\'  ;\n'
                    "float z;  // plant: a-name"),
    ("a.ptx", "// text\n", "// text\n"),
], ids=["Python", "CUDA", "neither"])  # fmt: skip
def test_comments_are_left_out(name: str, text: str, code: str) -> None:
    assert proofs.without_comments(name, text) == code
    assert proofs.without_comments(name, code) == code


KERNELS = {"decode": "csrc/cuda/decode/part.cuh", "hopper": "csrc/cuda/hopper/tile.cuh",
           "triton": "txl_kernels/backends/triton/kernels/tiles.py"}  # fmt: skip
IN_CPP = ("emulation", "drivers", "sanitizers", "wheel")  # with what calls compiled modules
CUDA_MACHINE_CODE, TRITON_MACHINE_CODE = "machine code of cuda", "machine code of triton"
USES = {
    KERNELS["decode"]: {"decode", CUDA_MACHINE_CODE, "emulation", "wheel"},
    KERNELS["hopper"]: {"hopper", CUDA_MACHINE_CODE, "emulation", "wheel"},
    KERNELS["triton"]: {"triton", TRITON_MACHINE_CODE, "interpreter"},
    "csrc/attention.h": {"decode", "hopper", CUDA_MACHINE_CODE, *IN_CPP},  # included
    "csrc/cpu/dispatch.cpp": {*IN_CPP} - {"emulation"},
    "txl_kernels/backends/cuda.py": {"decode", "hopper", *IN_CPP},
    "CMakeLists.txt": {CUDA_MACHINE_CODE, "sanitizers", "wheel"},
    ".ci/check_wheel": {"wheel"},
    "tools/machine_code.py": {"triton", CUDA_MACHINE_CODE, TRITON_MACHINE_CODE},
    ".ci/tritons": {TRITON_MACHINE_CODE},
    "tests/support/oracle.py": {*KERNELS, TRITON_MACHINE_CODE, "interpreter", "emulation", "sanitizers"},  # imported
    "tools/ptx/block.py": {*KERNELS, TRITON_MACHINE_CODE},
    "tools/ptx/instructions/copies.py": set(KERNELS),
    "tests/support/proofs.py": set(),
    "txl_kernels/functional.py": {*IN_CPP},
    "txl_kernels/backends/reference.py": {*IN_CPP},
    "txl_kernels/attention_layer.py": set(),
}


def test_families_have_the_sources_that_they_use() -> None:
    found = {name: {x.relative_to(proofs.ROOT).as_posix() for x in proofs.sources(family)}
             for name, family in proofs.FAMILIES.items()}  # fmt: skip
    for file, families in USES.items():
        assert {name for name, files in found.items() if file in files} == families, file


@pytest.mark.parametrize("file", KERNELS.values())
def test_changed_token_changes_the_hash_and_a_comment_does_not(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, copy = (proofs.ROOT / file).read_text(), tmp_path / Path(file).name
    monkeypatch.setattr(proofs, "ROOT", tmp_path)

    def hash_with(more: str, version: str = "1") -> str:
        copy.write_text(text + more)
        return proofs.hash_of_code([copy], version)

    comment, token = ("# x", "x = 1") if copy.suffix == ".py" else ("// x", "int x;")
    assert hash_with(f"\n{comment}\n") == hash_with("")
    assert len({hash_with(""), hash_with(f"\n{token}\n"), hash_with("", version="2")}) == 3


def test_families_have_every_file_of_their_proofs() -> None:
    """Each pattern finds files, and a test is of one family."""
    named = [x for family in proofs.FAMILIES.values() for x in family.tests]
    assert len(set(named)) == len(named)
    for family in proofs.FAMILIES.values():
        for pattern in (*family.tests, *family.sources):
            assert list(proofs.ROOT.glob(pattern)), pattern
    executing = [
        f"{folder}{x.name}"
        for folder in (proofs.CUDA, proofs.TRITON)
        for x in (proofs.ROOT / folder).glob("test_*.py")
        if "cuda_ptx" in (text := x.read_text()) or "pytestmark = RUNS_TRITONS_PTX\n" in text
    ]
    assert len(executing) >= 5
    assert set(executing) <= set(named)


@pytest.mark.parametrize(("file", "is_left_out"), [
    ("tests/txl_kernels/api/test_values.py", True),
    ("tests/txl_kernels/cuda/test_ptx.py", None),
    ("tests/txl_kernels/triton/test_ptx_planted.py", None),
    ("tests/conftest.py", None),
    ("tests", None),
])  # fmt: skip
@pytest.mark.usefixtures("record")
def test_files_without_a_slow_test_are_not_collected(file: str, is_left_out: bool | None) -> None:
    session: Any = proofs.Proofs()
    assert session.pytest_ignore_collect(proofs.ROOT / file) is is_left_out
