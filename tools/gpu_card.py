"""The GPU of this machine as the kit needs it; without nvidia-smi.

    python tools/gpu_card.py architecture   what to build the CUDA C++ kernels for, e.g. 90a-real
    python tools/gpu_card.py built CLOCKS   whether the module fits: its GPU, its limit of clocks
    python tools/gpu_card.py facts          driver, clocks, power, ECC, MIG: a line of JSON

Facts come from NVML, the library behind nvidia-smi, which the driver brings as
libnvidia-ml.so.1; where a container leaves it out, the line says so.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96  # bytes; maximum length of NVML's strings
_SM, _MEMORY = 1, 2  # values of nvmlClockType_t


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


class Nvml:
    """NVML's functions, by their names without the prefix "nvml"; a function that fails returns
    None."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        self._call("Init_v2")

    def _call(self, name: str, *given: Any) -> bool:
        function = getattr(self._library, f"nvml{name}", None)
        return function is not None and function(*given) == 0

    def text(self, name: str, *given: Any) -> str | None:
        said = ctypes.create_string_buffer(_TEXT)
        return said.value.decode() if self._call(name, *given, said, ctypes.c_uint(_TEXT)) else None

    def number(self, name: str, *given: Any, kind: Any = ctypes.c_uint) -> int | None:
        said = kind()
        return said.value if self._call(name, *given, ctypes.byref(said)) else None

    def pair(self, name: str, device: Any) -> tuple[int, int] | None:
        first, second = ctypes.c_uint(), ctypes.c_uint()
        ok = self._call(name, device, ctypes.byref(first), ctypes.byref(second))
        return (first.value, second.value) if ok else None

    def device(self, uuid: str) -> ctypes.c_void_p:
        """Return the handle of torch's device by UUID, since NVML also counts GPUs hidden by
        CUDA_VISIBLE_DEVICES."""
        handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if not self._call("DeviceGetHandleByUUID", name.encode(), ctypes.byref(handle)):
            self._call("DeviceGetHandleByIndex_v2", ctypes.c_uint(0), ctypes.byref(handle))
        return handle

    def sm_mhz(self, device: Any) -> int | None:
        """Return the present clock of the multiprocessors in MHz."""
        return self.number("DeviceGetClockInfo", device, _SM)

    def facts(self, device: Any) -> dict[str, Any]:
        """Return clocks in MHz, power in W, temperature in degrees Celsius, and ECC and MIG modes
        as (present, after the next reset), 1 for on; None for values that the driver does not
        give."""
        watts = {
            name: None if x is None else x / 1000
            for name, x in (
                ("power", self.number("DeviceGetPowerUsage", device)),
                ("power limit", self.number("DeviceGetEnforcedPowerLimit", device)),
            )
        }
        return {
            "driver": self.text("SystemGetDriverVersion"),
            "name": self.text("DeviceGetName", device),
            "sm MHz": self.sm_mhz(device),
            "sm MHz, most": self.number("DeviceGetMaxClockInfo", device, _SM),
            "memory MHz": self.number("DeviceGetClockInfo", device, _MEMORY),
            "memory MHz, most": self.number("DeviceGetMaxClockInfo", device, _MEMORY),
            "throttled by": self.number("DeviceGetCurrentClocksThrottleReasons", device, kind=ctypes.c_ulonglong),
            **watts,
            "temperature": self.number("DeviceGetTemperature", device, 0),
            "ECC": self.pair("DeviceGetEccMode", device),
            "MIG": self.pair("DeviceGetMigMode", device),
        }


def facts(library: str = LIBRARY) -> dict[str, Any]:
    """Return NVML's and torch's data on the first GPU."""
    said: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    uuid = ""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        uuid = str(getattr(properties, "uuid", ""))
        said |= {"gpu": properties.name, "capability": [properties.major, properties.minor]}
        said |= {"multiprocessors": properties.multi_processor_count, "bytes": properties.total_memory}
    try:
        nvml = Nvml(library)
    except OSError as error:
        return said | {"nvml": f"is not here: {error}"}
    return said | {"nvml": nvml.facts(nvml.device(uuid))}


def mhz_under(run: Callable[[], None]) -> int:
    """Return the multiprocessors' clock in MHz under load: from NVML while calls run, or without
    NVML from the time of a kernel that waits for a fixed number of clocks, run directly after
    them."""
    for _ in range(100):
        run()
    try:
        nvml = Nvml()
        mhz = nvml.sm_mhz(nvml.device(str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))))
    except OSError:
        mhz = None
    if mhz is None:
        clocks, (begin, end) = 10**7, (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(clocks)
        end.record()
        end.synchronize()
        mhz = round(clocks / begin.elapsed_time(end) / 1000)
    torch.cuda.synchronize()
    return mhz


def main(arguments: list[str]) -> int:
    match arguments:
        case ["architecture"]:
            print(architecture(torch.cuda.get_device_capability()))
        case ["built", clocks]:
            reason = misfit(int(clocks), torch.cuda.get_device_capability())
            if reason is not None:
                print(reason, file=sys.stderr)
                return 1
        case ["facts"]:
            print(json.dumps(facts()))
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
