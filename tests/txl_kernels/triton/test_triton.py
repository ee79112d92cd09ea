"""The Triton backend: tiles, parts of keys, descriptors, both reductions of dr, bounds."""

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import BIAS_ALONE, Case, as_call, as_fields, detached, leaves, make_inputs
from oracle import gradients, ignores_what_no_query_sees, matches_the_reference

from txl_kernels import available_backends, bounds_from_cu_seqlens, rel_attention
from txl_kernels.backends import triton
from txl_kernels.backends.protocol import architecture
from txl_kernels.backends.triton import config

NEEDS_TRITON = pytest.mark.skipif(triton.why_not_loaded() is not None, reason="Triton is not installed")
ON_TRITON = pytest.mark.triton
if not triton.interpreted():
    ON_TRITON = pytest.mark.gpu
CASES = {
    "causal": Case(B=1, L=70, M=45, D=16),
    "bidirectional": Case(B=1, H=1, L=50, M=21, D=16, causal=False),
    "window": Case(B=1, H=1, L=40, M=70, D=16, window=33),
    "bounds": Case(L=40, M=41, H=1, D=16, intervals="episodes"),
    "dropout": Case(B=1, H=1, L=37, M=30, D=16, dropout_p=0.4),
    "decode": Case(B=1, H=1, L=3, M=150, D=16),
}


@pytest.fixture(autouse=True)
def without_cached_plans() -> Iterator[None]:
    """Tests replace functions that plans call."""
    if triton.why_not_loaded() is not None:
        yield
        return
    from txl_kernels.backends.triton import plan

    plan.clear_layouts()
    yield
    plan.clear_layouts()


def equals_reference(case: Case) -> None:
    matches_the_reference(case, torch.float32, "triton", minimum=1.0)


def use_tiles(monkeypatch: pytest.MonkeyPatch, forward: tuple[int, int], backward: tuple[int, int]) -> None:
    def choose(kernel: str, *rest: Any) -> config.Config:
        return config.Config(*(forward if kernel in ("forward", "decode") else backward), 4, 1)

    monkeypatch.setattr(config, "choose", choose)


def use_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load through tensor descriptors: the default on sm_90, here also in the interpreter."""
    if triton.interpreted():
        monkeypatch.setattr(config, "has_descriptors", lambda capability: True)


def use_separate_accumulators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum the two parts of dq apart: the default on Blackwell."""
    from txl_kernels.backends.triton.plan import Plan

    monkeypatch.setattr(Plan, "apart", True)


VARIANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "narrow tiles": lambda monkeypatch: use_tiles(monkeypatch, (16, 64), (32, 32)),
    "wide tiles": lambda monkeypatch: use_tiles(monkeypatch, (64, 64), (32, 32)),
    "descriptors": use_descriptors,
    "separate accumulators": use_separate_accumulators,
}


@ON_TRITON
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CASES)
def test_variants(name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variant == "separate accumulators" and name not in ("causal", "bidirectional", "bounds"):
        pytest.skip("one accumulator or two: the masks differ in these cases alone")
    VARIANTS[variant](monkeypatch)
    equals_reference(CASES[name])


@ON_TRITON
@pytest.mark.parametrize("shared", [False, True], ids=["table of each head", "one table for all heads"])
def test_shapes_of_descriptors(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from txl_kernels.backends.triton import launch

    use_descriptors(monkeypatch)
    shapes, real = [], launch.TensorDescriptor
    monkeypatch.setattr(launch, "TensorDescriptor", lambda *args: shapes.append(tuple(args[1])) or real(*args))
    equals_reference(Case(B=1, H=2, L=40, M=21, D=16, Dp=8, r="1 T Dp" if shared else "H T Dp", position_scale=0.5))
    heads = 1 if shared else 2
    assert (heads, 61, 8) in shapes or not config.has_descriptors(architecture(torch.device("cuda")))


TERMS = [
    Case("values", Dv=40, L=40, M=41, B=1, H=1, D=16, intervals="episodes"),
    Case("bias alone", **BIAS_ALONE, window=(20, 9), causal=False, B=1, H=1, L=50, M=30, D=16),
    Case("bias beside r", r_bias="H T", dropout_p=0.3, extra_rows=5, scale=-0.4, H=1, L=37, M=30, D=16),
    Case("softcap", softcap=1.5, causal=False, B=1, H=1, L=40, M=30, D=16, intervals="random"),
    Case("decode", **BIAS_ALONE, softcap=2.0, Dv=7, B=1, H=1, L=3, M=90, D=16),
    Case("position queries", Dp=8, r_bias="H T", position_scale=0.7, causal=False, scale=-0.3, B=1, H=1, L=37, M=30, D=16),
    Case("position scale of a bias alone", **BIAS_ALONE, position_scale=-0.7, scale=0.0, dropout_p=0.2, B=1, H=1, L=37,
         M=30, D=16),
    Case("distances outside", T=20, zero_row=5, outside="zero", causal=False, H=1, L=37, M=30, D=16, intervals="random"),
    Case("grouped heads", B=1, H=4, Hkv=2, r_bias="H T", dropout_p=0.3, L=40, M=30, D=16),
    Case("Inkling", Dp=8, H=4, Hkv=2, T=21, zero_row=0, outside="zero", sink="B H L", L=70, M=60, B=1, D=16,
         position_scale=1.0),
]  # fmt: skip


@ON_TRITON
@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("case", TERMS, ids=str)
def test_terms_without_atomics(case: Case, descriptors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.ATOMICS, "0")
    assert not config.dr_by_atomics()
    if descriptors:
        use_descriptors(monkeypatch)
    equals_reference(case)


@ON_TRITON
@pytest.mark.parametrize("atomics", ["0", "1"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_what_no_query_sees_may_hold_anything_that_descriptors_load(
    dropout_p: float, atomics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in keys and values between, before and after those seen, in rows of r, in queries."""
    monkeypatch.setenv(config.ATOMICS, atomics)
    use_descriptors(monkeypatch)
    start = torch.arange(40, dtype=torch.int32)[None] // 4 * 6
    bounds = {"start": start, "end": start + 3}  # three keys of each six, nothing past the diagonal
    case = Case(B=1, H=1, L=40, M=30, D=16, dropout_p=dropout_p)
    ignores_what_no_query_sees(case, torch.float32, "triton", bounds, exactly=False)


@ON_TRITON
@pytest.mark.parametrize("wanted", [1, 4, 1000])
def test_any_number_of_parts(wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from txl_kernels.backends.triton import passes

    parts = []
    real = passes.parts_of_keys
    monkeypatch.setattr(passes, "multiprocessors", lambda device: wanted)
    monkeypatch.setattr(passes, "parts_of_keys", lambda *args: parts.append(real(*args)) or parts[-1])
    for case in (CASES["decode"], CASES["bounds"], CASES["decode"].but(dropout_p=0.3)):
        equals_reference(case)
    assert (max(parts) == 1) == (wanted == 1)


@ON_TRITON
@pytest.mark.parametrize("wanted", [1, 1000])
@pytest.mark.parametrize("width", [16, 41])
@pytest.mark.usefixtures("the_same_bits")
def test_final_sums_of_backward(width: int, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of more parts than one tile holds, in one program or several, with unused rows of dr
    around the used ones."""
    from txl_kernels.backends.triton import passes

    monkeypatch.setattr(passes, "FINISH_CELLS", 2 * (16 if width == 16 else 64))
    monkeypatch.setattr(passes, "multiprocessors", lambda device: wanted)
    equals_reference(Case(B=3, L=3, M=6, D=width, r_bias="H T", zero_row=5, extra_rows=9))


@ON_TRITON
@pytest.mark.usefixtures("the_same_bits")
def test_deterministic_algorithms_take_no_atomics() -> None:
    assert not config.dr_by_atomics()
    equals_reference(CASES["bounds"])


@ON_TRITON
@pytest.mark.parametrize(
    "change",
    [
        {"start": [[0, -1, 0, 0, 0, 0]]},
        {"end": [[11, 12, 11, 11, 11, 11]]},
        {"end": [[11, 2**31 - 1, 11, 11, 11, 11]]},
        {"start": [[5, 0, 6, 7, 8, 9]], "r": 6},
    ],
    ids=["start negative", "end past the keys", "end far past the keys", "no row in r"],
)
def test_bounds_out_of_range_give_nan_to_their_query_alone(change: dict[str, Any]) -> None:
    """The host does not wait to read them, so a wrong result must not look like a right one."""
    call = as_call(make_inputs(Case(D=16), torch.float32))
    call |= {name: torch.tensor(x, dtype=torch.int32) for name, x in change.items() if name != "r"}
    call["r"] = call["r"].detach()[:, : change.get("r")]
    out, lse = rel_attention(**call, return_lse=True, backend="triton")
    assert out[:, :, 1].isnan().all()
    assert lse[:, :, 1].isnan().all()
    assert out[:, :, [0, 2, 3, 4, 5]].isfinite().all()


@ON_TRITON
@pytest.mark.parametrize(
    ("width", "layout"), [(36, "bhld"), (40, "bhld"), (41, "bhld"), (7, "bhld"), (7, "fused")], ids=str
)
def test_strides_that_are_no_multiples_of_16(width: int, layout: str) -> None:
    equals_reference(Case(B=1, L=20, M=15, D=width, layout=layout))


@NEEDS_TRITON
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_blackwell_is_refused_before_triton_3_8(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    monkeypatch.setattr(triton, "why_not_gpu", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for version, why in (
        ("3.7.1", "needs torch 2.14 or newer, which brings Triton 3.8; Triton 3.7 is installed"),
        ("3.8.0", ""),
    ):
        monkeypatch.setattr(triton, "version", lambda found=version: found)
        assert why in (triton.why_not_tensors(device, torch.bfloat16) or "")
        assert (triton.why_not_tensors(device, torch.bfloat16) is None) == (not why)


@NEEDS_TRITON
def test_unit_of_strides() -> None:
    from txl_kernels.backends.triton.launch import Form
    from txl_kernels.backends.triton.plan import stride_unit

    def unit(*steps: int, dtype: torch.dtype = torch.bfloat16) -> int:
        return stride_unit(Form((2, 3, 4, 5), (*steps, 1), dtype), Form((3, 4, 5), (160, 80, 1), dtype))

    assert unit(320, 64, 16) == 1  # Triton finds it itself
    assert unit(960, 40, 120) == 8
    assert unit(960, 40, 120, dtype=torch.float32) == 4
    assert unit(108, 36, 36) == 4
    assert unit(123, 41, 41) == 1


@NEEDS_TRITON
def test_narrow_tiles_on_hopper_before_triton_3_8(monkeypatch: pytest.MonkeyPatch) -> None:
    from txl_kernels.backends.triton import plan

    for capability, version, columns in (((9, 0), (3, 7), 64), ((9, 0), (3, 8), 16), ((8, 0), (3, 6), 16)):
        monkeypatch.setattr(plan, "TRITON_VERSION", version)
        assert [plan.padded(width, capability) for width in (8, 32, 64, 80)] == [columns, max(32, columns), 64, 128]


@ON_TRITON
@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_values_between_intervals_may_hold_anything(block_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps anywhere in a tile of keys: forward finds them in the intervals of its queries."""
    monkeypatch.setattr(config, "choose", lambda *rest: config.Config(16, block_n, 4, 1))
    start = (torch.arange(70, dtype=torch.int32) // 3 * 5)[None]
    with torch.no_grad():
        case = Case(B=1, H=1, L=70, M=60, D=16)
        ignores_what_no_query_sees(case, torch.float32, "triton", {"start": start, "end": start + 2})


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that grows by one with each product of tiles."""
    if not triton.interpreted():
        pytest.skip("counts products in the interpreter")
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[Any] = []
    real = InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda *args: (found.append(None), real(*args))[1])
    return found


@ON_TRITON
@pytest.mark.parametrize("tables", [{}, BIAS_ALONE], ids=["r", "r_bias"])
@pytest.mark.parametrize("reach", ["window", "packed"])
def test_no_tile_without_a_visible_pair_is_visited(reach: str, tables: dict[str, Any], products: list[Any]) -> None:
    """The number of products in each pass, for a window to both sides and for packed sequences."""
    length, tile = 256, 32
    window = (40, 20) if reach == "window" else None
    case = Case(B=1, H=1, L=length, M=0, D=16, causal=False, window=window, **tables)
    inputs = make_inputs(case, torch.float32)
    apart = torch.arange(length)[:, None] - torch.arange(length)
    seen = (apart <= 40) & (apart >= -20)
    if reach == "packed":
        ends = torch.tensor([0, 30, 40, 130, 130, 180, 245])
        inputs["start"], inputs["end"] = bounds_from_cu_seqlens(ends, length)
        sequence = torch.searchsorted(ends, torch.arange(length), right=True)
        seen = (sequence[:, None] == sequence) & (sequence < len(ends))
    blocks = length // tile
    tiles = int(seen.view(blocks, tile, blocks, tile).any(3).any(1).sum())
    assert tiles < blocks**2 / 2
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="triton")
    # Each part of the keys also forms the block of distances above its first tile.
    of_tile, of_program = (2, 0) if tables else (3, 8)
    assert of_tile * tiles <= len(products) <= of_tile * tiles + of_program * blocks
    products.clear()
    gradients(out, lse, inputs)
    # A tile needs 3 products for queries and 3 more with r, 4 and 1 for keys; a block of r needs 3.
    of_tile, of_program = (3 + 4, 0) if tables else (6 + 5, 3)
    assert len(products) == of_tile * tiles + of_program * blocks


@ON_TRITON
def test_tiles_outside_the_table_form_no_product_of_positions(products: list[Any]) -> None:
    length, tile, extent = 256, 32, 64
    case = Case(B=1, H=1, L=length, M=0, D=16, Dp=16, T=extent, zero_row=0, outside="zero")
    inputs = make_inputs(case, torch.float32)
    blocks = length // tile
    # First distances of the tiles that blocks of queries walk; a tile has those up to 31 away.
    starts = [tile * (block - other) for block in range(blocks) for other in range(block + 1)]
    whole = [d for d in starts if d - tile < extent]  # of two blocks of distances, either has rows
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="triton")
    first = extent // tile  # blocks of queries whose first tile begins inside the table
    assert len(products) == 2 * len(starts) + len(whole) + first
    products.clear()
    gradients(out, lse, inputs)
    upper = [d for d in starts if d < extent]  # dq and dr are formed by blocks of distances
    assert len(products) == 7 * len(starts) + 2 * len(whole) + 2 * len(upper) + first


@ON_TRITON
def test_rows_gigabytes_apart() -> None:
    """Offsets inside a tile that do not fit in 32 bits."""
    from txl_kernels.backends.triton import launch, plan

    case = Case(B=1, H=1, L=5, M=0, D=8)
    inputs = make_inputs(case, torch.float32)
    far = torch.empty(5, 2**25)[:, :8].view(1, 1, 5, 8)
    far.copy_(inputs["k"].detach())
    want = rel_attention(**as_call(inputs), backend="triton")
    spread = as_call(inputs) | {"k": far, "memory": None}
    assert spread["k"].stride(2) * 128 > 2**31
    assert plan.wide(launch.Form(far.shape, far.stride(), far.dtype))
    torch.testing.assert_close(rel_attention(**spread, backend="triton"), want)


@ON_TRITON
def test_widths_beyond_256_are_refused() -> None:
    inputs = as_call(make_inputs(Case(D=257), torch.float32))
    with pytest.raises(RuntimeError, match="backend='triton' cannot run: triton takes head widths up to 256, not 257"):
        rel_attention(**inputs, backend="triton")
    inputs = as_call(make_inputs(Case(Dp=257), torch.float32))
    with pytest.raises(RuntimeError, match=r"triton does not take q_pos wider \(Dp\) than 256, got 257"):
        rel_attention(**inputs, backend="triton")


@ON_TRITON
def test_scales_too_far_apart_are_refused() -> None:
    inputs = as_call(make_inputs(Case(Dp=4, scale=1e-20, position_scale=1e12), torch.float32))
    with pytest.raises(RuntimeError, match=r"triton does not take position_scale beyond 1e\+30 times scale"):
        rel_attention(**inputs, backend="triton")


@pytest.mark.skipif(triton.interpreted(), reason="under the interpreter it does run on the cpu")
def test_cpu_tensors_are_refused() -> None:
    inputs = as_call(make_inputs(Case(), torch.float32))
    with pytest.raises(RuntimeError, match="backend='triton' cannot run: triton runs on CUDA devices, not on cpu"):
        rel_attention(**inputs, backend="triton")
    assert "triton" not in available_backends("cpu")


@pytest.fixture
def uncached() -> Iterator[None]:
    """`why_not_loaded` is computed for this test alone."""
    triton.why_not_loaded.cache_clear()
    yield
    triton.why_not_loaded.cache_clear()


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(
    ("module", "why"),
    [
        (SimpleNamespace(__version__="3.6.0"), None),
        (SimpleNamespace(__version__="4.0.0+git5a1"), None),
        (SimpleNamespace(__version__="3.4.0"), "3.6 or newer is needed, 3.4.0 is installed; torch 2.10 is the oldest"),
        (SimpleNamespace(), "a module without a version is installed"),  # a folder of that name
        (None, 'is not installed: pip install "txl-kernels[gpu]", with torch 2.10 or newer'),
    ],
    ids=str,
)
def test_supported_versions_of_triton(module: Any, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module decides, under any name of its distribution."""
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    monkeypatch.setitem(sys.modules, "triton", module)
    reason = triton.why_not_loaded()
    assert reason is None if why is None else why in str(reason)


@pytest.mark.usefixtures("uncached")
def test_triton_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libtriton.so: undefined symbol")

    monkeypatch.setattr(triton.importlib, "import_module", broken)
    assert triton.why_not_loaded() == "triton cannot be imported: ImportError: libtriton.so: undefined symbol"


def test_backward_traced_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph holds both operators. Autograd refuses CUDA tensors in a torch built for the cpu,
    so backward is traced directly."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    monkeypatch.setattr(triton, "why_not_tensors", lambda *args: None)

    inputs = detached(make_inputs(Case(), torch.bfloat16))
    names = list(leaves(make_inputs(Case())))

    def both(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = inputs | dict(zip(names, tensors, strict=True))
        out, lse = rel_attention(**as_call(given), return_lse=True, backend="triton")
        return out, lse, *torch.ops.txl_kernels.rel_attention_backward(out, None, out, lse, *as_fields(given), "triton")

    shapes = [tuple(inputs[name].shape) for name in names]
    with FakeTensorMode():
        tensors = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        graph = make_fx(both)(*tensors)
        out, lse, *found = graph(*tensors)
    assert (out.shape, out.device.type, out.dtype) == (shapes[0], "cuda", torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 2, 6), torch.float32)
    assert "txl_kernels.rel_attention.default" in graph.code
    assert "txl_kernels.rel_attention_backward.default" in graph.code
    assert [tuple(x.shape) for x in found] == [*shapes, *[(0,)] * (len(found) - len(shapes))]  # terms that are absent
    assert {x.device.type for x in found} == {"cuda"}
