"""The GPU of this machine as the kit needs it.

python tools/gpu_card.py architecture   what to build the CUDA C++ kernels for, e.g. 90a-real
python tools/gpu_card.py built CLOCKS   whether the module fits: its GPU, its limit of clocks
"""

import sys
from collections.abc import Callable

import torch


def architecture(capability: tuple[int, int]) -> str:
    """Return CMake's name of an architecture; "a" enables Hopper's architecture-specific
    instructions."""
    major, minor = capability
    return f"{major}{minor}{'a' if capability == (9, 0) else ''}-real"


def covers(architectures: str, capability: tuple[int, int]) -> bool:
    """Whether a module built for these architectures ("80-real 90a-real 100") runs on a GPU.
    Machine code runs on GPUs of the same major and the same or a later minor version, or, with an
    "a", only on exactly that version. PTX, which is included unless the name ends in "-real", runs
    on all later GPUs."""
    wanted = 10 * capability[0] + capability[1]
    for name in architectures.split():
        digits = int(name.split("-")[0].rstrip("af"))
        if name.split("-")[0].endswith("a"):
            fits = digits == wanted
        else:
            is_same = digits // 10 == capability[0] and digits <= wanted
            fits = (is_same and not name.endswith("-virtual")) or (not name.endswith("-real") and digits <= wanted)
        if fits:
            return True
    return False


def misfit(clocks: int, capability: tuple[int, int]) -> str | None:
    """Return why the installed CUDA C++ module does not fit the GPU or the clock limit; None if it
    does."""
    from txl_kernels.backends import cuda

    module = cuda.native.module
    if module is None:
        return str(cuda.native.why_not_loaded)
    if module.clock_limit != clocks:
        return f"the module ends waits after {module.clock_limit} clocks, {clocks} are wanted"
    if not covers(module.architectures, capability):
        return f"the module is for {module.architectures}, this GPU is {architecture(capability)}"
    return None


def mhz_under(run: Callable[[], object], calls: int = 100) -> int:
    """Return the multiprocessors' clock in MHz under load: from the time of a kernel that waits for
    a fixed number of clocks, run directly after some calls."""
    for _ in range(calls):
        run()
    clocks, (begin, end) = 10**7, (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(clocks)
    end.record()
    end.synchronize()
    return round(clocks / begin.elapsed_time(end) / 1000)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["architecture"]:
            print(architecture(torch.cuda.get_device_capability()))
        case ["built", clocks]:
            reason = misfit(int(clocks), torch.cuda.get_device_capability())
            if reason is not None:
                print(reason, file=sys.stderr)
                return 1
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
