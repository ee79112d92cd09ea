"""Faults that the executor of PTX finds: a small program for each, and one without the fault."""

import pytest
import torch
from ptx.demand import demanded
from ptx.faults import Fault, NotModelled
from ptx.parse import parse
from ptx_programs import HEAD, run

X = torch.arange(256, dtype=torch.int32)
FIRST = "setp.eq.u32 %p0, %r0, 0;"
EXCHANGE = """
  st.shared.b32 [%r1], %r0;
  {between}
  xor.b32 %r2, %r1, {step};
  ld.shared.b32 %r3, [%r2];
  st.global.b32 [%d4], %r3;
"""
COPY = """
  cp.async.ca.shared.global [%r1], [%d3], 4;
  cp.async.commit_group;
  {wait}
  {barrier}
  xor.b32 %r2, %r1, {step};
  ld.shared.b32 %r3, [%r2];
  st.global.b32 [%d4], %r3;
"""
MBARRIER = """
  add.u32 %r5, %r99, 1024;
  setp.lt.u32 %p1, %r0, 32;
  @{first} mbarrier.init.shared::cta.b64 [%r5], {count};
  {made}
  st.shared.b32 [%r1], %r0;
  bar.warp.sync -1;
  and.b32 %r6, %r0, 31;
  setp.eq.u32 %p2, %r6, 0;
  @%p2 mbarrier.arrive.shared::cta.b64 _, [%r5];
  {{
  .reg .pred done;
  again:
  mbarrier.try_wait.parity.shared::cta.b64 done, [%r5], 0;
  @!done bra again;
  }}
  xor.b32 %r2, %r1, 128;
  ld.shared.b32 %r3, [%r2];
  st.global.b32 [%d4], %r3;
"""


def exchanged(step: int) -> list[int]:
    return [n ^ step // 4 for n in range(64)]


def out() -> torch.Tensor:
    return torch.full((64,), -1, dtype=torch.int32)


@pytest.mark.parametrize(("between", "step"), [("bar.sync 0;", 128), ("bar.sync 0;", 4), ("bar.warp.sync -1;", 4)])
def test_exchange_with_a_barrier(between: str, step: int) -> None:
    b = out()
    run(EXCHANGE.format(between=between, step=step), X, b)
    assert b.tolist() == exchanged(step)


@pytest.mark.parametrize(("between", "step"), [("", 128), ("", 4), ("bar.warp.sync -1;", 128), ("bar.sync 1, 64;", 0)])
def test_exchange_without_the_barrier_is_a_race(between: str, step: int) -> None:
    if step:
        with pytest.raises(Fault, match="race: thread"):
            run(EXCHANGE.format(between=between, step=step), X, out())
    else:  # each thread reads what it wrote
        run(EXCHANGE.format(between=between, step=step), X, out())


def test_race_of_a_write_after_a_read() -> None:
    body = "st.shared.b32 [%r1], %r0; bar.sync 0; xor.b32 %r2, %r1, 128; ld.shared.b32 %r3, [%r2]; {}"
    body += "st.shared.b32 [%r1], %r3;"
    run(body.format("bar.sync 0;"))
    with pytest.raises(Fault, match="race: thread 0 writes what warp 1 has read"):
        run(body.format(""))


def test_writes_of_different_values_to_one_address() -> None:
    with pytest.raises(Fault, match="two threads write different values"):
        run("st.shared.b32 [%r99], %r0;")
    run("mov.u32 %r3, 7; st.shared.b32 [%r99], %r3;")  # the same value


def test_barrier_that_no_thread_reaches() -> None:
    run("setp.gt.u32 %p0, %r0, 99; @%p0 bar.sync 0;")


def test_race_in_global_memory() -> None:
    with pytest.raises(Fault, match="different values to one global address"):
        run("st.global.b32 [%d1], %r0;", X, out())
    with pytest.raises(Fault, match="another thread of the launch wrote"):
        run("st.global.b32 [%d4], %r0; bar.sync 0; ld.global.b32 %r2, [%d1];", X, out())
    with pytest.raises(Fault, match="different values to one global address"):  # of two blocks
        run("mov.u32 %r3, %ctaid.x; st.global.b32 [%d4], %r3;", X, out(), blocks=2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r2, [%d3+1000];", "global memory: "),
        ("ld.global.b32 %r2, [%d3+2];", "not a multiple"),
        ("st.shared.b32 [%r1+4000], %r0;", "shared memory is 1024..5120"),
        ("ld.shared.b32 %r2, [%r1+2];", "not a multiple"),
        ("add.s32 %r2, %r3, 1;", "never written"),
        (FIRST + "@%p0 bar.sync 0;", "part of a warp"),
        ("setp.lt.u32 %p0, %r0, 32; @%p0 bar.sync 0;", "ended before"),
        ("setp.lt.u32 %p0, %r0, 32; @%p0 bar.sync 0; @!%p0 bar.sync 1;", "do not reach|ended before"),
        (FIRST + "@%p0 shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;", "by part of one"),
        ("again: bra again;", "no end"),
    ],
    ids=lambda x: x[-40:],
)
def test_other_faults(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptx.schedule.STEPS", 1000)
    with pytest.raises(Fault, match=message):
        run(body, X[:64], out())


def test_unwritten_shared_memory_is_nan() -> None:
    b = torch.zeros(64)
    run("ld.shared.f32 %f0, [%r1]; st.global.f32 [%d4], %f0;", X, b)
    assert b.isnan().all()


# A word whose lower half, %h1, is never written, and its upper half %h2 = tid.
HALF_A_WORD = "cvt.u16.u32 %h2, %r0; mov.b32 %r2, {{%h1, %h2}}; {} cvt.u32.u16 %r4, %h3; st.global.b32 [%d4], %r4;"


@pytest.mark.parametrize("garbage", [0x00, 0x5A, 0xFF])
@pytest.mark.parametrize(
    "taken",
    [
        "mov.b32 {_, %h3}, %r2;",
        "mov.b32 %r3, %r2; mov.b32 {_, %h3}, %r3;",
        "shr.u32 %r3, %r2, 16; cvt.u16.u32 %h3, %r3;",
        "cvt.u64.u32 %d5, %r2; shr.u64 %d6, %d5, 16; cvt.u16.u64 %h3, %d6;",
    ],
)
def test_unwritten_half_of_a_word_that_is_not_used(taken: str, garbage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM writes the first form for sm_80, and the last two for sm_120."""
    monkeypatch.setattr("ptx.block.POISON", garbage)
    b = out()
    run(HALF_A_WORD.format(taken), b=b)
    assert b.tolist() == list(range(64))


@pytest.mark.parametrize(
    "taken",
    [
        "mov.b32 {%h3, _}, %r2;",
        "mov.b32 {%h4, %h3}, %r2; st.global.b16 [%d3], %h4;",
        "cvt.u16.u32 %h3, %r2;",
        "shr.u32 %r3, %r2, 15; cvt.u16.u32 %h3, %r3;",
        "mov.b32 {_, %h3}, %r2; st.global.b32 [%d3], %r2;",
        "mov.b32 {_, %h3}, %r2; st.shared.b16 [%r1], %h1;",
        "mov.b32 {_, %h3}, %r2; and.b32 %r2, %r2, 0xFFFF0000;",  # harmless, but not followed
        "mov.b32 {_, %h3}, %r2; setp.eq.u32 %p1, %r2, 0; @%p1 ret;",
        "mov.b32 {_, %h3}, %r2; cvt.u64.u32 %d5, %r2; ld.global.b32 %r5, [%d5];",
        "mov.b32 {_, %h3}, %r2; shfl.sync.idx.b32 %r5, %r2, 0, 31, -1;",
        # the sign of a word whose upper half is not written
        "mov.b32 %r5, {%h2, %h1}; shr.s32 %r3, %r5, 16; mov.b32 {_, %h3}, %r3;",
        "mov.b32 %r5, {%h2, %h1}; cvt.s64.s32 %d5, %r5; shr.u64 %d6, %d5, 32; cvt.u16.u64 %h3, %d6;",
        "{ .reg .pred %q; mov.pred %p1, %q; } mov.b32 {_, %h3}, %r2;",
        # halves that change places around a loop
        "mov.u32 %r5, 0; again: mov.b32 {%h4, %h3}, %r2; mov.b32 %r2, {%h3, %h4}; add.u32 %r5, %r5, 1;"
        "setp.lt.u32 %p1, %r5, 2; @%p1 bra again;",
    ],
)
def test_unwritten_half_of_a_word_that_is_used(taken: str) -> None:
    with pytest.raises(Fault, match="is read and was never written"):
        run(HALF_A_WORD.format(taken), out(), out())


@pytest.mark.parametrize(
    ("taken", "used"),
    [
        ("mul.f32x2 %d6, %d5, %d5; mov.b64 {_, %f1}, %d6;", False),
        ("fma.rn.ftz.f32x2 %d6, %d4, %d4, %d5; mov.b64 {_, %f1}, %d6;", False),
        ("mul.f32x2 %d6, %d5, %d5; mov.b64 {%f1, _}, %d6;", True),
        ("fma.rn.f32x2 %d6, %d4, %d4, %d5; mov.b64 {%f1, _}, %d6;", True),
        ("mul.f32x2 %d6, %d5, %d5; shr.u64 %d7, %d6, 31; cvt.u32.u64 %r3, %d7; mov.b32 %f1, %r3;", True),
        ("mul.f32x2 %d6, %d5, %d5; st.global.b64 [%d4], %d6;", True),
        ("mul.f64 %d6, %d5, %d5; mov.b64 {_, %f1}, %d6;", True),
    ],
)
def test_unwritten_lane_of_a_pair(taken: str, used: bool) -> None:
    """A pair whose lower lane, %f0, is never written. LLVM multiplies such pairs for sm_100."""
    program = parse(HEAD + "mov.b64 %d5, {%f0, %f3};" + taken + "st.global.f32 [%d4], %f1; ret; }")
    (register,) = (r for r in program.registers if r.name == "%f0")
    assert bool(demanded(program)[register.slot]) == used


def test_unwritten_half_of_a_lane() -> None:
    """A bit of a product depends on all bits of its lane."""
    body = "mov.b32 %r2, {%h1, %h2}; mov.b64 %d5, {%r2, %r0}; mul.f32x2 %d6, %d5, %d5; mov.b64 {%r3, _}, %d6;"
    program = parse(HEAD + body + "mov.b32 {_, %h3}, %r3; st.global.b16 [%d4], %h3; ret; }")
    (register,) = (r for r in program.registers if r.name == "%h1")
    assert demanded(program)[register.slot]


@pytest.mark.parametrize("step", [0, 4, 128])
def test_copies_are_visible_after_wait_and_barrier(step: int) -> None:
    b = out()
    run(COPY.format(wait="cp.async.wait_group 0;", barrier="bar.sync 0;", step=step), X, b)
    assert b.tolist() == exchanged(step)


@pytest.mark.parametrize(
    ("wait", "barrier", "step", "message"),
    [
        ("", "bar.sync 0;", 0, "before it was waited for"),
        ("cp.async.wait_group 1;", "bar.sync 0;", 0, "before it was waited for"),
        ("cp.async.wait_group 0;", "", 128, "race: "),
        ("", "bar.sync 0; cp.async.wait_group 0;", 128, "race: "),
    ],
)
def test_copies_waited_for_too_late(wait: str, barrier: str, step: int, message: str) -> None:
    with pytest.raises(Fault, match=message):
        run(COPY.format(wait=wait, barrier=barrier, step=step), X, out())


def test_copies_without_a_wait() -> None:
    with pytest.raises(Fault, match="ends with asynchronous copies"):
        run("cp.async.ca.shared.global [%r1], [%d3], 4; cp.async.commit_group;", X)


def test_mbarrier_orders_writes_before_arrivals() -> None:
    b = out()
    run(FIRST + MBARRIER.format(first="%p0", count=2, made="bar.sync 0;"), X, b)
    assert b.tolist() == exchanged(128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 3}, "wait for ever"),
        ({"count": 1}, "race: |wait for ever"),
        ({"made": ""}, "race: |no mbarrier"),
    ],
    ids=str,
)
def test_wrong_mbarriers(changes: dict[str, object], message: str) -> None:
    settings = {"first": "%p0", "count": 2, "made": "bar.sync 0;"} | changes
    with pytest.raises(Fault, match=message):
        run(FIRST + MBARRIER.format(**settings), X, out())


def test_mbarrier_accessed_as_memory() -> None:
    with pytest.raises(Fault, match="accessed as memory"):
        run(
            FIRST
            + "add.u32 %r5, %r99, 64; @%p0 mbarrier.init.shared::cta.b64 [%r5], 1; bar.sync 0; ld.shared.b32 %r2, [%r5];"
        )


@pytest.mark.parametrize(
    "body",
    [
        "sin.approx.f32 %f0, 0f00000000;", "ld.local.b32 %r2, [%r1];", "mov.u32 %r2, %clock;", "st.async.b32 [%r1], %r0;",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d5}, {%d6}, {%d7}, {%d8};", "bra.uni nowhere;",
        "shfl.sync.bfly.b32 %r2, %r0, 1, 31, 15;", "add.sat.f32 %f0, 0f00000000, 0f00000000;",
    ],
    ids=lambda x: x.split()[0],
)  # fmt: skip
def test_instructions_that_are_not_modelled(body: str) -> None:
    with pytest.raises(NotModelled):
        run(body, X, out(), threads=32)
