"""The report of what runs on this machine, to be pasted into a bug report."""

import platform
import sys
import sysconfig
import time
import warnings

import torch

import txl_kernels
from txl_kernels.backends import BACKENDS, KERNELS, choose_unasked, cpu, cuda, self_check, triton
from txl_kernels.backends.limits import DECODE_QUERIES
from txl_kernels.backends.native_modules import PACKAGE, NativeModule
from txl_kernels.backends.protocol import architecture

_ON_AMD = """  Triton's kernels were compiled for AMD GPUs, and have run on none yet: the first call of each kind is compared
  with the reference. To say how they do here, paste the output of `python -m txl_kernels --check` into an issue."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _origin(native: NativeModule) -> str:
    borrowed = native.file is not None and native.file.parent != PACKAGE
    return f"  {native.file}{', installed: this source tree has none of its own' if borrowed else ''}"


def _native_lines() -> list[str]:
    if cpu.native.module is None:
        return [f"  {cpu.native.why_not_loaded}"]
    module = cpu.module()
    why_not_amx = module.why_not_amx()
    others = [isa for isa in module.isas(False) if isa not in module.isas(True) and not (why_not_amx and isa == "amx")]
    lines = [_origin(cpu.native), f"  instruction set {module.isa()} (runs here: {', '.join(module.isas(True))})"]
    if others:
        lines.append(f"  not on this processor: {', '.join(others)}")
    if why_not_amx:
        lines.append(f"  {why_not_amx}")
    pool = "torch's OpenMP pool" if module.threading() == "torch-openmp" else "threads of its own: torch has no OpenMP"
    lines.append(f"  {torch.get_num_threads()} threads on {pool}")
    return lines


def _cuda_lines() -> list[str]:
    if cuda.native.module is None:
        return [f"  {cuda.native.why_not_loaded}"]
    module = cuda.native.module
    built = f"compiled by {module.compiler} for {module.architectures}"
    lines = [
        _origin(cuda.native),
        f"  forward of up to {DECODE_QUERIES} queries, on H100 and H200 of any number and gradients; {built}",
    ]
    if module.no_driver():
        lines.append(f"  {module.no_driver()}")
    return lines


def _model(device: torch.device) -> str:
    """Return the name of a GPU, of an AMD GPU with its architecture."""
    found = architecture(device)
    return torch.cuda.get_device_name(device) + (f", {found}" if isinstance(found, str) else "")


def _tried(name: str, device: torch.device) -> str:
    """Return what the self-check of a backend found for bfloat16 at head width 64, as the end of a
    line; "" if there is no self-check, as on a CPU."""
    if name not in KERNELS or not self_check.concerns(device):
        return ""
    if not self_check.is_wanted():
        return f"; not tried, as {self_check.SETTING}=off"
    # "cuda" computes gradients on one architecture only.
    kind = self_check.Kind(name, device, torch.bfloat16, 64, decode=name == cuda.NAME, gradients=name != cuda.NAME)
    begun = time.perf_counter()
    try:
        reason = self_check.why_not_trusted(KERNELS[name], kind)
    except Exception as error:  # out of memory, or a lost context
        return f"; a small case could not be tried: {type(error).__name__}: {error}"
    if reason is not None:
        return f"; but it is left out: {reason}"
    return f"; a small case agrees with the reference, {time.perf_counter() - begun:.1f} s"


def _taken(device: torch.device, dtype: torch.dtype) -> str:
    try:
        return choose_unasked(device, dtype)
    except Exception as error:
        return f"what could not be tried ({type(error).__name__})"


def report() -> str:
    """Return the report: versions, devices, and for each backend and device the dtypes that it
    supports, or why it supports none."""
    threads = " free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    lines = [
        f"txl_kernels {txl_kernels.__version__}, torch {torch.__version__}, Python {platform.python_version()}{threads}, "
        f"{platform.system()} {platform.machine()}",
        f"imported from {txl_kernels.__path__[0]}, run by {sys.executable}",
    ]
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    for device in (torch.device("cpu"), *(torch.device("cuda", i) for i in gpus)):
        model = f" ({_model(device)})" if device.type == "cuda" else ""
        lines.append(f"\non {device}{model}:")
        for name, backend in BACKENDS.items():
            reasons = {dtype: backend.why_not_tensors(device, dtype) for dtype in _DTYPES}
            works = [_short(dtype) for dtype, reason in reasons.items() if reason is None]
            verdict = f"does not run: {reasons[torch.float32]}"
            if works:
                verdict = f"works for {', '.join(works)}{_tried(name, device)}"
            lines.append(f"  {name:<10} {verdict}")
        is_amd = device.type == "cuda" and torch.version.hip is not None
        if is_amd and triton.why_not_tensors(device, torch.float32) is None:
            lines.append(_ON_AMD)
        with warnings.catch_warnings():  # a warning that a backend is left out would repeat a line above
            warnings.simplefilter("ignore")
            taken = f"backend=None takes {_taken(device, torch.float32)} for float32"
            if device.type == "cuda":
                taken += f" and {_taken(device, torch.bfloat16)} for bfloat16, with gradients"
            lines.append(f"  {taken}")
    lines += ["\nnative module:", *_native_lines(), "\ncuda module:", *_cuda_lines()]
    return "\n".join(lines).encode(errors="backslashreplace").decode()  # a path may be none that can be printed
