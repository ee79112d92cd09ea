"""`tools/rehash.py`: what it reads of a release, and where it writes a hash."""

import ast
import sys
from pathlib import Path

import pytest

from implementations import bare_peers
from txl_kernels.integrations import peers, source_hash

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
rehash = pytest.importorskip("rehash")


@pytest.mark.parametrize("peer", [peer for peer in peers() if "_" not in peer.name], ids=lambda peer: peer.name)
def test_an_entry_goes_to_its_peer_alone(peer: object) -> None:
    name = peer.name  # type: ignore[attr-defined]
    before = {path: path.read_text() for path in rehash.ADAPTERS.glob("*.py")}
    (text,) = [text for text in before.values() if f'Peer("{name}"' in text]
    added = rehash.with_entry(text, name, "99.0", "0123456789abcdef")
    calls = {
        node.args[0].value: ast.unparse(node)
        for node in ast.walk(ast.parse(added))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Peer"
    }
    assert [n for n, call in calls.items() if "'99.0': '0123456789abcdef'" in call] == [name]
    assert added.replace(', "99.0": "0123456789abcdef"', "") == text
    with pytest.raises(ValueError, match="no hashes of Nobody in this file"):
        rehash.with_entry(text, "Nobody", "99.0", "0")


@pytest.mark.peers
@pytest.mark.parametrize("library", ["nemo-toolkit", "ray"])
def test_reads_hashes_and_sources(library: str) -> None:
    found = rehash.read(bare_peers.FOLDER, library)
    known = {peer.name: peer for peer in peers() if peer.distribution == library}
    assert set(found) == set(known)
    for name, (hashed, text) in found.items():
        assert hashed == source_hash(bare_peers.original(known[name]))
        assert hashed in known[name].hashes.values()
        assert f"class {known[name].path.rpartition('.')[2]}(" in text
