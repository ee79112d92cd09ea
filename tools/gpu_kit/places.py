"""Where things are. Everything prepared for the device lies in one folder, which git ignores."""

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / "gpu-kit"
SCRATCH = ROOT / "build" / "gpu-kit"  # of `prepare`: what is kept between two of them
ABOUT = CARRIED / "kit.json"
MODULES = ("_native", "_cuda")  # compiled modules of txl_kernels


def triton_cache() -> Path:
    """On the device's machine; TRITON_CACHE_DIR if that is set."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or built("triton"))


def built(name: str) -> Path:
    """For what is made on the device's machine and not taken home."""
    folder = Path(tempfile.gettempdir(), "txl-gpu-kit")
    folder.mkdir(exist_ok=True)
    return folder / name
