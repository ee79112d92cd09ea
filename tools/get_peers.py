"""Puts other libraries' packages into a folder of their own, for the tests of integrations.

    python tools/get_peers.py FOLDER

Reads tests/integrations/peers.txt. Of Ray, which is large, one module is kept. A folder that holds
an earlier list is replaced, as pip leaves what it finds there. Nothing that is installed elsewhere
changes.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIST = Path(__file__).parents[1] / "tests" / "integrations" / "peers.txt"
WITH_DEPENDENCIES = "transformers"
OF_RAY = ("ray/rllib/models/torch/modules/relative_multi_head_attention.py", ".dist-info/METADATA")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True)


def get(folder: Path) -> None:
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    by_name = {line.split("==")[0]: line for line in lines}
    if (folder / WITH_DEPENDENCIES).is_dir():
        shutil.rmtree(folder)
    pip("install", "--target", str(folder), by_name.pop(WITH_DEPENDENCIES))
    ray = by_name.pop("ray")
    pip("install", "--target", str(folder), "--no-deps", *by_name.values())
    with tempfile.TemporaryDirectory() as wheels:
        pip("download", "--no-deps", "--dest", wheels, ray)
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(OF_RAY)])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    get(Path(sys.argv[1]))
