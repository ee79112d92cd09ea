"""What the three calls launch: correctness, times, tiles and the official record's shapes."""

from collections.abc import Iterator
from dataclasses import replace

from gpu_kit import yardstick
from gpu_kit.work import Tile, Work

WIDTHS = (64, 128)
LENGTHS = (2048, 512, 1024, 8192)  # L = M, most informative first
KERNELS = ("forward", "backward_queries", "backward_keys", "backward_table")
SWEEP_LENGTH = 1024
TABLE = "the table's"  # the name of its tile in a sweep
SAME_BITS = "ours, the same bits"  # the name of calls without atomics


def tiny(work: Work) -> dict[str, int]:
    """Sizes of a work in the interpreter."""
    return {"B": 1, "H": 1, "L": min(work.L, 20), "M": min(work.M, 12), "D": 16}


def smallest() -> list[Work]:
    """Every kernel once in each way that it is compiled for, in sizes no tile divides."""
    small = Work("", B=2, H=3, L=200, M=300, D=64)
    found = []
    for width in WIDTHS:
        base = replace(small, D=width)
        found += [
            replace(base, name=f"D{width} descriptors", atomics=False),
            replace(base, name=f"D{width} atomics", atomics=True),
            replace(base, name=f"D{width} bounds", bounded=True, atomics=False),
            replace(base, name=f"D{width} bounds, atomics", bounded=True, atomics=True),
            replace(base, name=f"D{width} pointers", pointers=True, atomics=True),
            replace(base, name=f"D{width} dropout", dropout_p=0.2, atomics=True),
            replace(base, name=f"D{width} bounds, dropout", bounded=True, dropout_p=0.2, atomics=True),
            replace(base, name=f"D{width} decode", L=1, M=700, backward=False),
            replace(base, name=f"D{width} decode, bounds", L=5, M=700, backward=False, bounded=True),
            replace(base, name=f"D{width} decode, CUDA C++", L=1, M=700, backward=False, backend="cuda"),
            replace(
                base, name=f"D{width} 16 queries, CUDA C++", L=16, M=700, backward=False, backend="cuda", bounded=True
            ),
            replace(base, name=f"D{width} CUDA C++", backend="cuda", atomics=True),
            replace(
                base,
                name=f"D{width} bounds, dropout, CUDA C++",
                backend="cuda",
                bounded=True,
                dropout_p=0.2,
                atomics=True,
            ),
        ]
    return [
        *found,
        replace(small, name="D64 both directions", causal=False, atomics=True),
        replace(small, name="D64 window", window=100, atomics=True),
        replace(small, name="D64 float16", dtype="float16", atomics=True),
        replace(small, name="D64 float32", dtype="float32", atomics=True),
        replace(small, name="D41", D=41, atomics=True),
    ]


def timed() -> Iterator[Work]:
    """bfloat16, B 8, H 16: dr by atomics, and not, and CUDA C++; by pointers and with bounds at one
    length."""
    for length in LENGTHS:
        for width in WIDTHS:
            base = Work("ours", B=8, H=16, L=length, M=length, D=width)
            yield replace(base, atomics=True)
            yield replace(base, name=SAME_BITS, atomics=False)
            yield replace(base, name="ours, CUDA C++", backend="cuda", atomics=True)
            if length == LENGTHS[0]:
                yield replace(base, name="ours, pointers", pointers=True, atomics=True)
                yield replace(base, name="ours, bounds", bounded=True, atomics=True)


def decoding() -> list[Work]:
    """One query of 1, 8 and 64 texts, by both backends."""
    base = Work("decode", B=1, H=8, L=1, M=3800, D=64, backward=False)
    return [replace(base, name=f"decode, {name}", backend=name, B=b) for b in (1, 8, 64) for name in ("triton", "cuda")]


def same_bits() -> list[Work]:
    """By descriptors, by pointers with bounds and dropout, and decoding."""
    base = Work("descriptors", B=4, H=4, L=512, M=512, D=64, atomics=False)
    found = [replace(base, name=f"D{d} {base.name}", D=d) for d in WIDTHS]
    found += [replace(base, name=f"D{d} bounds", D=d, bounded=True) for d in WIDTHS]
    found += [replace(base, name=f"D{d} pointers", D=d, pointers=True) for d in WIDTHS]
    found.append(replace(base, name="D64 bounds, dropout", bounded=True, dropout_p=0.1))
    return [*found, replace(base, name="D64 decode", B=1, L=1, M=3800, backward=False)]


# kernel -> head width -> tiles to hold against the table's
_SQUARE_64: list[Tile] = [(64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 8, 1), (64, 64, 8, 2)]
_SQUARE_32: list[Tile] = [(32, 32, 4, 1), (32, 32, 4, 2)]
TILES: dict[str, dict[int, list[Tile]]] = {
    "forward": {
        64: [
            (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (64, 64, 8, 3),
            (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2),
        ],
        128: [*_SQUARE_64, (64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 1)],
    },
    "backward_queries": dict.fromkeys(WIDTHS, _SQUARE_64 + _SQUARE_32),
    "backward_keys": dict.fromkeys(WIDTHS, _SQUARE_64 + _SQUARE_32),
    "backward_table": dict.fromkeys(WIDTHS, _SQUARE_64 + _SQUARE_32),
}  # fmt: skip


def swept(kernel: str, width: int) -> list[Work]:
    """The table's own tile first."""
    atomics = kernel != "backward_table"  # which runs without them alone
    base = Work(TABLE, B=8, H=16, L=SWEEP_LENGTH, M=SWEEP_LENGTH, D=width, kernel=kernel, atomics=atomics)
    base = replace(base, backward=kernel != "forward")
    return [base, *(replace(base, name="{}x{}, {} warps, {} stages".format(*t), tile=t) for t in TILES[kernel][width])]


def sweep() -> Iterator[Work]:
    for width in WIDTHS:
        for kernel in KERNELS:
            yield from swept(kernel, width)


def record() -> Iterator[Work]:
    """The official record's attention shapes, and the small ones that it checks values on."""
    for batch, heads, length, width in [
        (8, 16, 2048, 64), (22, 8, 512, 64), (8, 8, 1024, 128), (4, 16, 256, 64),
    ]:  # fmt: skip
        base = Work("", B=batch, H=heads, L=length, M=length, D=width)
        yield from (base, replace(base, L=70, M=90, B=min(batch, 8)), replace(base, backward=False))
    yield Work("", B=1, H=8, L=128, M=3800, D=64)
    yield Work("", B=1, H=8, L=70, M=90, D=64)
    for batch in (1, 8, 64):
        for length in (1, 2, 4, 8, 16):
            for memory in (3800, 800, 32768, 1200):
                yield Work("", B=batch, H=8, L=length, M=memory, D=64, backward=False)


def call(number: int) -> list[Work]:
    """All that a call launches by itself."""
    if number == 1:
        return [*smallest(), *timed(), *same_bits(), *decoding(), *map(yardstick.case, WIDTHS)]
    return list(sweep() if number == 2 else record())
