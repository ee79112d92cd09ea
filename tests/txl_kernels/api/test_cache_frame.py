"""Caches that are moved, and steps at a fixed place of one."""

import pytest
import torch

from txl_kernels import KeyValueCache, RelAttention
from txl_kernels.cache import CacheFrame

MEM, SEGMENT = 6, 4  # a buffer of 16 rows


def layer() -> RelAttention:
    return RelAttention(16, 2, window=MEM + 1).eval()


def cache(made: RelAttention, held: int) -> KeyValueCache:
    """Of a batch of 2."""
    filled = made.new_cache(2, MEM, SEGMENT)
    for _ in range(held):
        filled.append(*torch.randn(2, 2, 2, 1, 8))
    return filled


@pytest.mark.parametrize("held", [0, 1, 4, 6, 9])
def test_moved_anywhere_it_holds_the_same(held: int) -> None:
    """Also to rows that overlap those it leaves."""
    moved = cache(layer(), held)
    want = [x.clone() for x in moved.memory]
    for place in (16, 14, 6, 7, 9, 16, 6):
        moved.move(place)
        assert moved.place == place
        assert len(moved) == min(held, MEM)
        for got, wanted in zip(moved.memory, want, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("place", [3, 17])
def test_where_it_does_not_fit(place: int) -> None:
    with pytest.raises(ValueError, match=f"place must be from 4, the positions held, to 16, the buffer's, got {place}"):
        cache(layer(), 4).move(place)


@pytest.mark.parametrize("held", range(MEM + 2))
@torch.no_grad()
def test_a_step_at_a_place_is_a_step(held: int) -> None:
    """Whatever lies in the rows that are not held."""
    made = layer()
    framed, plain = cache(made, held), made.new_cache(2, MEM, SEGMENT)
    for k, v in zip(*(x.split(1, 2) for x in framed.memory), strict=True):
        plain.append(k, v)
    framed.move(MEM)
    framed._buffer[:, :, :, : MEM - len(framed)] = torch.nan
    framed._buffer[:, :, :, MEM:] = torch.nan
    start = torch.full((2, 1), MEM - len(framed), dtype=torch.int32)
    for x in torch.randn(SEGMENT + 1, 2, 1, 16):
        start.fill_(MEM - len(framed))
        got = made(x, cache=CacheFrame(framed, start))
        torch.testing.assert_close(got, made(x, cache=plain))
        framed.advance(1)
        assert len(framed) == len(plain)


def test_a_frame_writes_and_does_not_count() -> None:
    filled = cache(layer(), MEM)
    k, v = torch.randn(2, 2, 2, 1, 8)
    CacheFrame(filled, None).append(k, v)
    assert filled.place == MEM
    filled.advance(1)
    assert torch.equal(filled.memory[0][:, :, -1:], k)
    assert torch.equal(filled.memory[1][:, :, -1:], v)


def test_bad_frames() -> None:
    made = layer()
    with pytest.raises(ValueError, match="the cache's place must be from 6 to 15, got 2"):
        CacheFrame(cache(made, 2), None)
    some = cache(made, 2)
    some.move(MEM)
    with pytest.raises(ValueError, match="start must be given while the cache holds 2 of 6 positions"):
        CacheFrame(some, None)
    for start in (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"start must be int32 \[B, 1\] = \[2, 1\], got torch"):
            CacheFrame(some, start)
    frame = CacheFrame(some, torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"k and v must be \[2, 2, 1, 8\], got \[2, 2, 3, 8\]"):
        frame.append(*torch.randn(2, 2, 2, 3, 8))
