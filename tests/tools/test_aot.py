"""The ahead-of-time lint finds what it is there to find. `make aot` runs it on everything."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def aot() -> Any:
    import aot

    return aot


GOOD = {"config": [64, 64, 4, 2], "spill": 0, "shared": 90000, "serialised": [], "loop": 600}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"loop": 629}, None),
        ({"loop": 631}, "631 instructions in the inner loop, before 600"),
        ({"spill": 8}, "spills 8 bytes, before 0"),
        ({"shared": 240000}, "the limit is 227 KiB"),
        ({"serialised": ["C7510"]}, "wgmma serialised"),
        ({"config": [64, 64, 8, 2]}, "run with --update"),
    ],
)
def test_complaints(aot: Any, change: dict[str, Any], message: str | None) -> None:
    found = aot.complaints("forward sm_90 bf16 D64 tma", GOOD | change, GOOD)
    assert (not found) if message is None else (len(found) == 1 and message in found[0])


def test_what_is_not_in_the_table_is_a_complaint(aot: Any) -> None:
    assert "not in the table" in aot.complaints("forward sm_80 bf16 D64", GOOD, None)[0]


def test_what_is_refused_must_be(aot: Any) -> None:
    """With a Triton before 3.8 sm_100 is not compiled but refused, which the table says."""
    name, refused = "forward sm_100 bf16 D64 tma", {"refused": "a reason"}
    assert not aot.complaints(name, refused, refused)
    assert "the table has" in aot.complaints(name, refused, GOOD)[0]
    assert "the table says: refused" in aot.complaints(name, GOOD, refused)[0]
    assert "needs Triton 3.8 or newer, which torch 2.14 brings; 3.7 is" in aot.config.why_not_capability(
        (10, 3), (3, 7)
    )
    assert aot.config.why_not_capability((10, 0), (3, 8)) is None
    assert aot.config.why_not_capability((12, 0), (3, 6)) is None


def test_a_sample_has_every_kernel_and_architecture_and_comes_round(aot: Any) -> None:
    variants = aot.shipped()
    samples = [set(aot.sample(variants, 60, day)) for day in range(12)]
    pairs = {(v.kernel, v.capability) for v in variants}
    assert all(len(x) == 60 and {(v.kernel, v.capability) for v in x} == pairs for x in samples)
    assert set().union(*samples) == set(variants)


def test_a_spilling_tile_is_seen(aot: Any) -> None:
    """A tile known to be too large for the registers of sm_80."""
    variant = aot.Variant("backward_queries", 80, "bf16", 64)
    measured = aot.measure(aot.compile_variant(variant, aot.config.Config(64, 64, 4, 1)), 80)
    assert measured["spill"] > 0
    assert measured["products"] == 160  # 5 products of 64 x 64 x 64 by 4 warps, 32 instructions each
    assert measured["loop"] > 500


@pytest.mark.parametrize("far", [{"k_row", "dk_row"}, {"km_row", "dkm_row"}], ids=["segment", "memory"])
def test_rows_far_apart_compile(aot: Any, far: set[str]) -> None:
    """Of the memory or of the segment alone: no variable may hold now one stride, now the other."""
    variant = aot.Variant("backward_keys", 80, "bf16", 64)
    assert aot.compile_variant(variant, variant.config(), far).asm["cubin"]
