"""Instructions of PTX against torch, Python's integers and the manual's definitions."""

import math

import pytest
import torch
from ptx_programs import run, unary

FLOATS = torch.tensor([0.0, -0.0, 1.0, -1.5, 3.14159, 1e-40, 1e38, -1e38, math.inf, -math.inf, math.nan, 65519.0] * 8)[
    :32
]
HALVES = torch.cat([torch.randn(20, generator=torch.Generator().manual_seed(0)), FLOATS[:12]])
WORDS = torch.randint(-(2**31), 2**31 - 1, (32,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))


def name(x: object) -> str:
    """Return the test id of a parameter: its instructions."""
    return x if isinstance(x, str) else ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_to_half_precision(dtype: torch.dtype) -> None:
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    many = torch.randn(4096, generator=torch.Generator().manual_seed(2)) * torch.logspace(-8, 8, 4096)
    for given in (HALVES, *many.view(-1, 64)):
        got = unary(f"cvt.rn.{name}.f32", "f f32 h b16", given, dtype)
        torch.testing.assert_close(got, given.to(dtype), rtol=0, atol=0, equal_nan=True)
        back = unary(f"cvt.f32.{name}", "h b16 f f32", got, torch.float32)
        torch.testing.assert_close(back, got.float(), rtol=0, atol=0, equal_nan=True)


def test_conversion_to_packed_halves() -> None:
    b = torch.empty(64, dtype=torch.bfloat16)
    run("ld.global.f32 %f0, [%d3]; neg.f32 %f1, %f0; cvt.rn.bf16x2.f32 %r2, %f1, %f0; st.global.b32 [%d4], %r2;",
        HALVES, b, threads=32)  # fmt: skip
    want = torch.stack([HALVES, -HALVES], 1).flatten().bfloat16()  # the first operand is the upper half
    torch.testing.assert_close(b, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_and_products_of_packed_halves(dtype: torch.dtype) -> None:
    name = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    a = torch.cat([HALVES, HALVES.flip(0)]).to(dtype)
    load = "ld.global.b32 %r0, [%d3]; not.b32 %r1, %r0; and.b32 %r1, %r1, 0x3FFF3FFF;"  # finite halves
    b = torch.empty(64, dtype=dtype)
    run(f"{load} st.global.b32 [%d4], %r1;", a, b, threads=32)
    for op, want in (
        (f"add.rn.{name} %r2, %r0, %r1", a + b), (f"fma.rn.{name} %r2, %r0, %r1, %r1", a.double() * b + b),
    ):  # fmt: skip
        got = torch.empty(64, dtype=dtype)
        run(f"{load} {op}; st.global.b32 [%d4], %r2;", a, got, threads=32)
        torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("ex2.approx.ftz.f32", torch.exp2), ("lg2.approx.f32", torch.log2), ("sqrt.rn.f32", torch.sqrt),
        ("abs.f32", torch.abs), ("neg.f32", torch.neg), ("rcp.rn.f32", torch.reciprocal),
    ],
    ids=name,
)  # fmt: skip
def test_functions(op: str, want: object) -> None:
    got = unary(op, "f f32 f f32", FLOATS, torch.float32)
    torch.testing.assert_close(got, want(FLOATS), rtol=1e-6, atol=0, equal_nan=True)  # type: ignore[operator]


def test_conversion_to_integers_saturates() -> None:
    got = unary("cvt.rzi.s32.f32", "f f32 r b32", FLOATS, torch.int32)
    for x, y in zip(FLOATS.tolist(), got.tolist(), strict=True):
        assert y == (0 if math.isnan(x) else int(min(max(x, -(2.0**31)), 2.0**31 - 1)))


def words(body: str, a: torch.Tensor = WORDS) -> list[int]:
    b = torch.empty(32, dtype=torch.int32)
    run("ld.global.b32 %r2, [%d3];" + body + "st.global.b32 [%d4], %r9;", a, b, threads=32)
    return b.tolist()


def signed(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("mul.lo.s32 %r9, %r2, 77777;", lambda x: signed(x * 77777)),
        ("mul.hi.s32 %r9, %r2, 77777;", lambda x: x * 77777 >> 32),
        ("mul.hi.u32 %r9, %r2, 3000000000;", lambda x: signed(x % 2**32 * 3000000000 >> 32)),
        ("mul.wide.s32 %d5, %r2, -5; shr.s64 %d5, %d5, 3; cvt.u32.u64 %r9, %d5;", lambda x: signed(x * -5 >> 3)),
        ("mad.lo.s32 %r9, %r2, 9, -4;", lambda x: signed(x * 9 - 4)),
        ("div.s32 %r9, %r2, -7;", lambda x: math.trunc(x / -7)),
        ("rem.s32 %r9, %r2, 1000;", lambda x: int(math.fmod(x, 1000))),
        ("shr.s32 %r9, %r2, 40;", lambda x: x >> 31),
        ("shr.u32 %r9, %r2, 40;", lambda x: 0),
        ("shl.b32 %r9, %r2, 32;", lambda x: 0),
        ("bfe.u32 %r9, %r2, 5, 7;", lambda x: x >> 5 & 127),
        ("bfe.s32 %r9, %r2, 5, 7;", lambda x: ((x >> 5 & 127) + 64) % 128 - 64),
        ("prmt.b32 %r9, %r2, 0, 0x0123;", lambda x: signed(int.from_bytes((x % 2**32).to_bytes(4, "little"), "big"))),
        ("not.b32 %r9, %r2;", lambda x: ~x),
        ("max.s32 %r9, %r2, 5;", lambda x: max(x, 5)),
        ("max.u32 %r9, %r2, 5;", lambda x: signed(max(x % 2**32, 5))),
        ("setp.lo.u32 %p1, %r2, 0x80000000; selp.b32 %r9, 1, 0, %p1;", lambda x: int(x >= 0)),
        ("mov.b32 {%h1, %h2}, %r2; mov.b32 %r9, {%h2, %h1};", lambda x: signed((x % 2**32 >> 16) | (x << 16))),
        ("cvt.s64.s32 %d5, %r2; shr.u64 %d5, %d5, 32; cvt.u32.u64 %r9, %d5;", lambda x: -1 if x < 0 else 0),
    ],
    ids=name,
)
def test_integers(body: str, want: object) -> None:
    assert words(body) == [want(x) for x in WORDS.tolist()]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("body", "source"),
    [
        ("shfl.sync.bfly.b32 %r9, %r2, 5, 31, -1;", lambda n: n ^ 5),
        ("shfl.sync.idx.b32 %r9, %r2, 3, 31, -1;", lambda n: 3),
        ("shfl.sync.down.b32 %r9, %r2, 4, 31, -1;", lambda n: n + 4 if n + 4 < 32 else n),
        ("shfl.sync.up.b32 %r9, %r2, 4, 0, -1;", lambda n: n - 4 if n >= 4 else n),
        ("shfl.sync.idx.b32 %r9, %r2, 1, 0x1C1F, -1;", lambda n: n & 28 | 1),  # segments of four
    ],
    ids=name,
)
def test_shuffles(body: str, source: object) -> None:
    assert words(body) == [WORDS.tolist()[source(n)] for n in range(32)]  # type: ignore[operator]


def test_reductions() -> None:
    assert words("redux.sync.min.s32 %r9, %r2, -1;") == [int(WORDS.min())] * 32
    assert words("redux.sync.max.u32 %r9, %r2, -1;") == [signed(max(x % 2**32 for x in WORDS.tolist()))] * 32


def test_divergent_branches() -> None:
    body = """
  mov.u32 %r9, 0;
  and.b32 %r3, %r0, 7;
loop:
  setp.ge.u32 %p1, %r9, %r3;
  @%p1 bra done;
  add.s32 %r9, %r9, 1;
  bra loop;
done:
  mad.lo.s32 %r9, %r9, 10, 1;
"""
    assert words(body) == [10 * (n % 8) + 1 for n in range(32)]


def test_atomic_additions() -> None:
    b = torch.tensor([1.0, 2.0])
    run("cvt.rn.f32.u32 %f0, %r0; red.global.gpu.relaxed.add.f32 [%d1+4], %f0;", torch.zeros(1), b)
    assert b.tolist() == [1.0, 2.0 + sum(range(64))]


def test_mma_of_a_warp() -> None:
    """m16n8k16 with matrices loaded by ldmatrix from rows in shared memory, against torch."""
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randint(-4, 5, shape, generator=g).bfloat16() for shape in ((16, 16), (16, 8)))
    given = torch.cat([a.flatten(), b.flatten()]).view(torch.int32).clone()  # 128 words, then 64
    out = torch.empty(32, 4)
    run(
        """
  ld.global.b32 %r2, [%d3]; st.shared.b32 [%r1], %r2;
  ld.global.b32 %r2, [%d3+128]; st.shared.b32 [%r1+128], %r2;
  ld.global.b32 %r2, [%d3+256]; st.shared.b32 [%r1+256], %r2;
  ld.global.b32 %r2, [%d3+384]; st.shared.b32 [%r1+384], %r2;
  ld.global.b32 %r2, [%d3+512]; st.shared.b32 [%r1+512], %r2;
  ld.global.b32 %r2, [%d3+640]; st.shared.b32 [%r1+640], %r2;
  bar.warp.sync -1;
  and.b32 %r3, %r0, 15; shl.b32 %r3, %r3, 5; shr.u32 %r4, %r0, 4; shl.b32 %r4, %r4, 4; add.s32 %r3, %r3, %r4;
  add.s32 %r3, %r3, %r99;
  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r3];
  and.b32 %r5, %r0, 15; shl.b32 %r5, %r5, 4; add.s32 %r5, %r5, %r99; add.s32 %r5, %r5, 512;
  ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14, %r15}, [%r5];
  mov.f32 %f0, 0f3F800000;
  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {%f4, %f5, %f6, %f7}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f0, %f0, %f0, %f0};
  mul.wide.u32 %d5, %r0, 16; add.s64 %d5, %d1, %d5;
  st.global.v4.f32 [%d5], {%f4, %f5, %f6, %f7};
""", given, out, threads=32,
    )  # fmt: skip
    want = a.float() @ b.float() + 1
    got = torch.empty(16, 8)
    for lane in range(32):
        for n in range(4):
            got[lane // 4 + 8 * (n // 2), 2 * (lane % 4) + n % 2] = out[lane, n]
    assert torch.equal(got, want)


def test_counts() -> None:
    counts = run("st.shared.b32 [%r1], %r0; bar.sync 0;", torch.zeros(64)).by_class()
    assert counts["barriers"] == 2  # one for each warp
    assert counts["wavefronts"] == counts["minimum wavefronts"] == 2
    # Every eighth bank: four words in each of four banks, so 8 wavefronts for each warp.
    strided = run("shl.b32 %r2, %r0, 5; add.u32 %r2, %r2, %r99; st.shared.b32 [%r2], %r0;", torch.zeros(64)).by_class()
    assert (strided["wavefronts"], strided["minimum wavefronts"]) == (2 * 8, 2)
    loads = run("ld.global.b32 %r2, [%d3];", torch.zeros(64)).by_class()
    assert loads["sectors"] == 2 * 4  # 128 bytes for each warp
