"""The meaning of an exception that a backend's first call raised: whether it says anything about
the backend, and what to install."""

import errno
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

_LONGEST = 300  # characters of an exception's message
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
# Messages of errors of memory or of the CUDA context: torch's own, and CUDA's and HIP's as Triton
# and the CUDA C++ module report them.
_TRANSIENT = re.compile(
    r"^(CUDA|HIP) error:|^(CUDA|HIP) out of memory|^CUDA: out of memory|\[(CUDA|HIP)\]:.*out of memory|illegal memory access"
    r"|device-side assert|unspecified launch failure|misaligned address|uncorrectable ECC|context is destroyed"
)
_UNKNOWN_GPU = re.compile(r"gpu-name|no kernel image|recognized (processor|target)|unsupported.*(arch|sm_|toolchain)")


def is_transient(error: Exception, device: torch.device) -> bool:
    """Whether an error says nothing about the backend: memory is full, or the CUDA context is lost.
    Such an error is raised, and the next call tries again."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    lost = getattr(torch, "AcceleratorError", None)  # newer than torch 2.7
    if lost is not None and isinstance(error, lost):
        return True
    if isinstance(error, RuntimeError) and _TRANSIENT.search(str(error)):
        return True
    return is_lost(device)


def is_lost(device: torch.device) -> bool:
    """Whether the device's CUDA context answers every call with an error, as after an illegal
    memory access."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def reason_of(error: Exception) -> str:
    """Return the exception in one line, the same for all calls that fail alike, followed by what to
    install."""
    advice = _advice(error)
    return f"its first call raised {type(error).__name__}: {_text_of(error)}" + (f" {advice}" if advice else "")


def _text_of(error: Exception) -> str:
    """Return the exception's message without names of temporary files, which differ from call to
    call."""
    if isinstance(error, subprocess.CalledProcessError):
        command = error.cmd if isinstance(error.cmd, str) else next(iter(error.cmd), "a command")
        return f"{command} ended with exit status {error.returncode}."
    if isinstance(error, OSError) and error.strerror:
        file = f": {error.filename}" if error.errno == errno.ENOENT and error.filename else ""
        return f"{error.strerror}{file}."
    text = " ".join(str(error).split()) or "no message"
    return (text if len(text) <= _LONGEST else text[:_LONGEST] + " ...").rstrip(".") + "."


def _advice(error: Exception) -> str | None:
    text = str(error)
    if isinstance(error, OSError) and error.errno in _FULL:
        folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(
            os.environ.get("TRITON_HOME", os.path.expanduser("~")), ".triton", "cache"
        )
        return f"Triton keeps what it compiles in {folder}: make room there, or name another folder by TRITON_CACHE_DIR"
    if "C compiler" in text or isinstance(error, (subprocess.CalledProcessError, FileNotFoundError)):
        return _missing_to_compile()
    if type(error).__name__ == "PTXASError" or _UNKNOWN_GPU.search(text):
        if torch.version.hip is not None:  # PyPI's torch is NVIDIA's
            return "A newer torch for ROCm brings a Triton that knows this GPU"
        return "A newer torch brings a Triton that knows this GPU: pip install --upgrade torch"
    if "libamdhip64" in text:
        return "libamdhip64.so is part of ROCm: in a container, start it with --device=/dev/kfd --device=/dev/dri"
    if "libcuda" in text:
        return "libcuda.so.1 is part of the NVIDIA driver: in a container, start it with --gpus all"
    return None


def _missing_to_compile() -> str:
    """Return which tools are missing that Triton needs to build its launcher."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    lacks = []
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))):
        lacks.append("a C compiler (Debian: apt-get install gcc; CC names another)")
    if not header.is_file():
        lacks.append(f"Python's headers, {header} (Debian: apt-get install python3-dev)")
    if lacks:
        return f"Triton needs {' and '.join(lacks)}"
    return (
        "Triton needs a C compiler and Python's headers (Debian: apt-get install gcc python3-dev; CC names a compiler)"
    )
