"""Another release of a library whose attention is accelerated: what changed in its source, whether
the adapters still compute what it does, and if so its entry.

    PEERS=.peers python tools/rehash.py LIBRARY [VERSION]

LIBRARY is a line of tests/integrations/peers.txt; VERSION the newest unless said. Both releases are
fetched into a temporary folder beside the other libraries of PEERS (`make peers`). For each known
class the difference to the pinned release is shown; where there is one, its hash is written into
the adapter's file, and tests/integrations compares outputs and gradients. If a test fails, the
files are as they were; else peers.txt names the new release. Read the difference either way: tests
see what they call.
"""

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from get_peers import LIST, PEERS_OF, fetch

ROOT = Path(__file__).parents[1]
ADAPTERS = ROOT / "txl_kernels" / "integrations" / "adapters"
TESTS = ("test_exactness.py", "test_models.py", "test_streaming.py", "test_copies.py", "test_hf.py", "test_t5.py",
         "test_shared_bias.py", "test_inkling.py", "test_inkling_caches.py")  # fmt: skip
# Program run where the other release can be imported: prints {name of the peer: [hash, source]}.
READ = """
import inspect, json, sys
from implementations import bare_peers
bare_peers.use()
from txl_kernels.integrations import peers, source
found = {}
for peer in peers():
    if peer.distribution == sys.argv[1]:
        kind = bare_peers.original(peer)
        text = "\\n".join(inspect.getsource(part) for part in source.parts(kind))
        found[peer.name] = [source.source_hash(kind), text]
print(json.dumps(found))
"""


def with_entry(text: str, name: str, version: str, found: str) -> str:
    """Return an adapter's file with one more hash for the peer of that name.

    Raises:
        ValueError: the file has no such peer with hashes.
    """
    begin = text.find(f'Peer("{name}"')
    match = re.search(r'\{("[^"]+": "[0-9a-f]+"(?:,\s*)?)+\}', text[begin:]) if begin >= 0 else None
    if match is None:
        raise ValueError(f"no hashes of {name} in this file")
    end = begin + match.end() - 1
    return f'{text[:end]}, "{version}": "{found}"{text[end:]}'


def merged(folder: Path, peers: Path, own: Path) -> Path:
    """Make a folder of links to the packages of `own` and to those of `peers` that `own` does not
    have."""
    folder.mkdir()
    for source in (own, peers):
        for entry in source.iterdir():
            if not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry.resolve())
    return folder


def read(peers: Path, library: str) -> dict[str, list[str]]:
    """Return hash and source of each known class of a library, by the name of the peer."""
    done = subprocess.run(
        [sys.executable, "-c", READ, library], env=_environment(peers), cwd=ROOT, check=True, capture_output=True, text=True
    )  # fmt: skip
    result: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return result


def _environment(peers: Path) -> dict[str, str]:
    return {**os.environ, "PEERS": str(peers), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"}


def rehash(library: str, version: str | None, peers: Path) -> int:
    """Compare a release with the pinned one and update the adapter; return 0 if the release is
    known now, 1 if a test failed, 2 if the library is not listed."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    pinned = next((line.split("==")[1] for line in lines if line.startswith(f"{library}==")), None)
    if pinned is None:
        print(f"{library} is not in {LIST}: {', '.join(x.split('==')[0] for x in lines if '==' in x)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        fetch(place / "old", library, pinned)
        version = fetch(place / "new", library, version)
        before = read(merged(place / "with old", peers, place / "old"), library)
        now = merged(place / "with new", peers, place / "new")
        after = read(now, library)
        written = {path: path.read_text(encoding="utf-8") for path in ADAPTERS.glob("*.py")}
        for name, (found, text) in after.items():
            if found == before[name][0]:
                print(f"{name}: as in {library} {pinned}")
                continue
            print(f"{name}: another source than in {library} {pinned}")
            old = before[name][1].splitlines()
            print("\n".join(difflib.unified_diff(old, text.splitlines(), pinned, version, lineterm="")))
            (path,) = (path for path, said in written.items() if f'Peer("{name}"' in said)
            path.write_text(with_entry(path.read_text(encoding="utf-8"), name, version, found), encoding="utf-8")
        tests = [str(ROOT / "tests" / "integrations" / name) for name in TESTS]
        failed = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *tests], env=_environment(now), cwd=ROOT
        ).returncode
    if failed:
        for path, said in written.items():
            path.write_text(said, encoding="utf-8")
        print(f"{library} {version} stays unknown: its adapters compute something else", file=sys.stderr)
        return 1
    LIST.write_text(
        LIST.read_text(encoding="utf-8").replace(f"{library}=={pinned}", f"{library}=={version}"), encoding="utf-8"
    )
    print(
        f"{library} {version} is known; `make peers` fetches it, and CHANGELOG.md and docs/how-to/accelerate.md name it"
    )
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or PEERS_OF not in os.environ:
        sys.exit(__doc__)
    sys.exit(rehash(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else None, Path(os.environ[PEERS_OF])))
