"""`tools/rehash.py`: what it reads of a release, and where it writes a hash."""

import pytest
import rehash

from implementations import bare_peers
from txl_kernels.integrations import source_hash
from txl_kernels.integrations.adapters import KNOWN


def test_an_entry_goes_to_its_peer_alone() -> None:
    texts = [path.read_text() for path in rehash.ADAPTERS.glob("*.py")]
    entry = ', "99.0": "0123456789abcdef"'
    for name in (peer.name for peer in KNOWN):
        (text,) = [text for text in texts if f'Peer("{name}"' in text]
        before, _, after = rehash.with_entry(text, name, "99.0", "0123456789abcdef").partition(entry)
        assert before + after == text
        assert before.rpartition("Peer(")[2].startswith(f'"{name}"')
        assert after.startswith("}")


@pytest.mark.peers
@pytest.mark.parametrize("library", ["nemo-toolkit", "ray"])
def test_reads_hashes_and_sources(library: str) -> None:
    found = rehash.read(bare_peers.FOLDER, library)
    known = {peer.name: peer for peer in KNOWN if peer.distribution == library}
    assert set(found) == set(known)
    for name, (hashed, text) in found.items():
        assert hashed == source_hash(bare_peers.original(known[name]))
        assert hashed in known[name].hashes.values()
        assert f"class {known[name].path.rpartition('.')[2]}(" in text
