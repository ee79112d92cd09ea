"""Archives are walked as streams, and truncated or damaged ones never pass for whole."""

import gzip
import random
import tarfile
from pathlib import Path

import pytest
from packed import tarred, zipped

from txl.errors import TxlError
from txl.text import archives
from txl.text import corpus as data

FILES = [
    (f"folder/{name}.txt", random.Random(name).randbytes(3000).hex().encode()) for name in ("train", "valid", "test")
]
ARCHIVES = {
    "zip": zipped(("folder/", b""), *FILES),
    "tar": tarred(*FILES),
    "tar.gz": tarred(*FILES, mode="w:gz"),
    "tar.bz2": tarred(*FILES, mode="w:bz2", form=tarfile.PAX_FORMAT),
    "tar.xz": tarred(*FILES, mode="w:xz"),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_members_in_order(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(ARCHIVES[kind])
    assert [(name, b"".join(pieces)) for name, pieces in archives.members(tmp_path / "a")] == FILES
    assert archives.names(tmp_path / "a") == [name for name, _ in FILES]


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_truncated_archive_is_one_line(kind: str, tmp_path: Path) -> None:
    whole = ARCHIVES[kind]
    contents = sum(512 + -(-len(content) // 512) * 512 for _, content in FILES)
    cuts = {len(whole) * n // 8 for n in range(1, 8)} | {len(whole) - 1}
    if kind == "tar":  # ending anywhere but in the zeros that follow its last file
        cuts = {cut for cut in cuts if cut < contents} | {512, 512 + 6144, 512 + 6144 + 100, contents}
    for cut in cuts:
        (tmp_path / "a").write_bytes(whole[:cut])
        with pytest.raises(TxlError, match=rf"^{tmp_path}/a: .*truncated or damaged") as raised:
            data.prepare(tmp_path / "a", tmp_path / "c")
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_damaged_header_does_not_end_a_tar_archive(pack: type[bytes], tmp_path: Path) -> None:
    whole = bytearray(ARCHIVES["tar"])
    second = 512 + 6144
    assert whole[second : second + 6] == b"folder"
    whole[second + 150] ^= 0x15
    (tmp_path / "a").write_bytes(pack(bytes(whole)))
    with pytest.raises(TxlError, match="its tar data is truncated or damaged"):
        data.prepare(tmp_path / "a", tmp_path / "c")


def test_encrypted_members(tmp_path: Path) -> None:
    archive = bytearray(ARCHIVES["zip"])
    at = -1
    while (at := archive.find(b"PK\1\2", at + 1)) >= 0:
        archive[at + 8] |= 1
    (tmp_path / "a").write_bytes(archive)
    with pytest.raises(TxlError, match="a: the zip archive is encrypted"):
        data.prepare(tmp_path / "a", tmp_path / "c")


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"text")
    assert archives.names(tmp_path / "a") is None
    with pytest.raises(TxlError, match="a: is no archive"):
        list(archives.members(tmp_path / "a"))
