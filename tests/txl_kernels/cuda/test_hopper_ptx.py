"""What nvcc makes of the Hopper kernels, run by tools/ptx: values, gradients, races, bounds, loads and
products that are not waited for; and whether faults planted in their source are noticed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from against_reference import matches_the_reference
from cuda_cases import HOPPER, forward, use
from cuda_emulation import CSRC
from cuda_ptx import PtxModule, compile_ptx
from oracle import Case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
DTYPES = (torch.float16, torch.bfloat16)  # the other way round than in test_hopper.py
NARROW = Case("narrow", B=1, H=1, L=150, M=250, D=64, window=180)
WIDE = Case("wide", B=1, H=1, L=70, M=150, D=128, window=80)
LONG = Case("long", B=1, H=1, L=330, M=64, D=64)
MASKED = Case("masked", B=1, H=1, L=64, M=40, D=64)  # rows of the first tile that do not exist


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> PtxModule:
    return PtxModule(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return compile_ptx(tmp_path_factory.mktemp("nvcc"), "sm_90a")


@pytest.fixture
def kernels(module: PtxModule, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[PtxModule]:
    module.use(compiled)
    module.first = ()
    use(monkeypatch, module, multiprocessors=1)
    yield module
    faults, module.faults = module.faults, []
    assert not faults, faults


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize(("case", "dtype"), [(case, DTYPES[n % 2]) for n, case in enumerate(HOPPER)], ids=str)
def test_contract(case: Case, dtype: torch.dtype) -> None:
    matches_the_reference(case, dtype, "cuda")


@pytest.mark.parametrize("first", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("case", [NARROW, WIDE], ids=str)
def test_warpgroups_in_any_order(case: Case, first: tuple[int, ...], kernels: PtxModule) -> None:
    kernels.first = tuple(g for g in first if case.D == 64 or g < 2)
    matches_the_reference(case, torch.bfloat16, "cuda")


@pytest.mark.usefixtures("kernels")
def test_split_keys(module: PtxModule, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("", L=70, M=900, D=64, B=1, H=1)
    whole = forward(case, torch.bfloat16)
    use(monkeypatch, module, multiprocessors=132)
    for got, want in zip(forward(case, torch.bfloat16), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


# (what, file, what it says, what it is made to say, case, what is noticed; "" for wrong values)
FORWARD = [
    (
        "a wait for scores",
        "forward",
        "await_products<1>();\n      results(values);",
        "results(values);",
        NARROW,
        "before it was waited",
    ),
    (
        "a wait for the values",
        "forward",
        "ask_values(values, weights);\n    await_products<0>();",
        "ask_values(values, weights);",
        NARROW,
        "waited",
    ),
    ("a wait for a tile", "loads", "    await(ready_ + walk_.stage, walk_.parity);\n", "", NARROW, ""),
    ("a wait for an empty stage", "loads", "    await(empty_ + walk_.stage, walk_.parity);\n", "", NARROW, ""),
    ("a wrong parity", "loads", "walk_.parity = 1;", "walk_.parity = 0;", NARROW, "wait for ever"),
    (
        "a wrong number of bytes",
        "loads",
        "arrive_expecting(full, S::BYTES);",
        "arrive_expecting(full, S::BYTES + 16);",
        NARROW,
        "wait for ever",
    ),
    ("too few arrivals", "query_block", "v.make(S::GROUPS * WARPS_A_GROUP)", "v.make(1)", NARROW, ""),
    ("a swizzle off by one", "tile", "(at >> 7 & 7)", "(at >> 8 & 7)", WIDE, "values"),
    ("a fence before products", "forward", "      fence_units();\n", "", WIDE, "fence.proxy.async"),
    ("a fence after clearing", "loads", "    fence_units();\n", "", MASKED, "fence.proxy.async"),
    ("a meeting before a product", "forward", "      meet_group(group_);\n", "", WIDE, "fence.proxy.async"),
    (
        "a meeting in the shift",
        "forward",
        "skew_.put(block, t);\n    meet_warp();",
        "skew_.put(block, t);",
        NARROW,
        "race",
    ),
    ("a meeting before giving back", "loads", "give_back() {\n    meet_warp();", "give_back() {", NARROW, "race"),
    ("a stage too few", "tile", "if (++stage == STAGES)", "if (++stage == STAGES + 1)", NARROW, ""),
    (
        "a tile too few of r",
        "query_block",
        "for (int j = -S::GROUPS; j <= 0; ++j) load_r(j);",
        "for (int j = 1 - S::GROUPS; j <= 0; ++j) load_r(j);",
        NARROW,
        "",
    ),
    (
        "a column too far",
        "skew",
        "const int key = row - 2 * pair - e;",
        "const int key = row - 2 * pair - e + 1;",
        NARROW,
        "",
    ),
]
BACKWARD = [
    ("a meeting before distances", "backward_queries", "    meet_group(group_);  // all have read what this overwrites\n", "", NARROW, "race"),
    ("a fence after distances", "backward_queries", "    unskew_.put(pairs, t & 1);\n    fence_units();", "    unskew_.put(pairs, t & 1);", NARROW, "fence.proxy.async"),
    ("a wait for distances", "backward_queries", "await_products<3>();", "await_products<4>();", NARROW, "waited"),
    ("r given back too early", "backward_queries", "    r_.skip();\n  }\n  // Products", "    r_.give_back();\n  }\n  // Products", NARROW, ""),
    ("the wrong block of distances", "backward_queries", "return static_cast<uint32_t>(t & 1);", "return static_cast<uint32_t>(~t & 1);", NARROW, "values"),
    ("r's rows off by one", "backward_queries", "block.distance(-1 - group_) + warp_", "block.distance(-1 - group_) + 1 + warp_", NARROW, "values"),
    ("a meeting of keys and queries", "backward_keys", "    meet_group(group_);\n    turn_.get", "    turn_.get", NARROW, "race"),
    ("a wait for what queries left", "backward_keys", "    stats_.take();\n", "", NARROW, "race"),
    ("a wait for both blocks", "backward_keys", "    await_products<1>();\n", "    await_products<2>();\n", NARROW, "waited"),
    ("queries given back too early", "backward_keys", "    await_products<0>();\n    results(dv);\n    results(dk);\n    stats_.skip();\n    q_.give_back();", "    stats_.skip();\n    q_.give_back();\n    await_products<0>();\n    results(dv);\n    results(dk);", LONG, ""),
    ("one buffer of the turn", "turn", "(step & 1) * BYTES", "(step & 0) * BYTES", NARROW, "race"),
    ("a column too far of the turn", "turn", "const int key = row - 2 * pair - e;", "const int key = row - 2 * pair - e + 1;", NARROW, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("direction", "plant"),
    [("forward", plant) for plant in FORWARD] + [("backward", plant) for plant in BACKWARD],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_a_planted_fault_is_noticed(
    direction: str, plant: tuple[str, str, str, str, Case, str], module: PtxModule, compiled: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _, name, old, new, case, seen = plant
    shutil.copytree(CSRC.parent, tmp_path / "csrc")
    source = tmp_path / "csrc" / CSRC.name / "hopper" / f"{name}.cuh"
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))
    planted = compile_ptx(tmp_path, "sm_90a", source.parents[1], (f"hopper/{direction}_bf16.cu",))
    module.use(compiled + planted)  # the later of a name
    module.first = ()
    use(monkeypatch, module, multiprocessors=1)
    try:
        matches_the_reference(case, torch.bfloat16, "cuda")
        wrong = ""
    except AssertionError as error:
        wrong = str(error)
    faults, module.faults = module.faults, []
    if seen == "values":
        assert wrong
        return
    assert faults or (wrong and not seen), "not noticed"
    assert any(seen in str(fault) for fault in faults) or not seen, faults[0]
