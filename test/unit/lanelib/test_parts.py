from __future__ import annotations

import io
import json
import tarfile

import pytest

from lanelib.errors import LaneError
from lanelib.parts import MANIFEST, join_parts, sha256_of, write_parts


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for number, size in enumerate((0, 1, 5000, 123_456)):
        (folder / f"{number}.whl").write_bytes(bytes(byte % 251 for byte in range(size)))
    return sorted(folder.iterdir())


def test_what_was_packed_is_unpacked_whatever_the_size_of_the_parts(files, tmp_path):
    for most in (1000, 10_240, 1 << 20):
        parts = write_parts(files, tmp_path / f"parts-{most}", most)

        found = join_parts(tmp_path / f"parts-{most}", tmp_path / f"out-{most}")

        assert [(path.name, path.read_bytes()) for path in found] == [(path.name, path.read_bytes()) for path in files]
        assert all(path.stat().st_size == most for path in parts[:-1])
        assert 0 < parts[-1].stat().st_size <= most


def test_nothing_but_the_files_is_unpacked(files, tmp_path):
    write_parts(files, tmp_path / "parts", 10_240)
    join_parts(tmp_path / "parts", tmp_path / "out")

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [path.name for path in files]


def test_the_manifest_names_each_part_with_its_checksum(files, tmp_path):
    parts = write_parts(files, tmp_path / "parts", 50_000)

    document = json.loads((tmp_path / "parts" / MANIFEST).read_text())
    assert [(row["name"], row["sha256"]) for row in document["parts"]] == [(p.name, sha256_of(p)) for p in parts]
    assert len(parts) > 2


def test_the_same_files_make_the_same_parts(files, tmp_path):
    first = write_parts(files, tmp_path / "a", 50_000)
    files[2].touch()
    second = write_parts(reversed(files), tmp_path / "b", 50_000)

    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_changed_part_is_named(files, tmp_path):
    parts = write_parts(files, tmp_path / "parts", 50_000)
    content = bytearray(parts[1].read_bytes())
    content[100] ^= 1
    parts[1].write_bytes(content)

    with pytest.raises(LaneError, match=r"part\.001 is not as it was packed"):
        join_parts(tmp_path / "parts", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_part_that_is_cut_off_is_named(files, tmp_path):
    parts = write_parts(files, tmp_path / "parts", 50_000)
    parts[-1].write_bytes(parts[-1].read_bytes()[:-1])

    with pytest.raises(LaneError, match=rf"{parts[-1].name} is not as it was packed"):
        join_parts(tmp_path / "parts", tmp_path / "out")


def test_missing_parts_are_named(files, tmp_path):
    parts = write_parts(files, tmp_path / "parts", 50_000)
    parts[0].unlink()
    parts[2].unlink()

    with pytest.raises(LaneError, match=r"lacks part\.000, part\.002"):
        join_parts(tmp_path / "parts", tmp_path / "out")


def test_a_folder_without_a_manifest_is_named(tmp_path):
    with pytest.raises(LaneError, match="has no manifest"):
        join_parts(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2, "parts": [], "files": []}', '{"parts": 3}'])
def test_what_is_no_manifest_is_named(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)

    with pytest.raises(LaneError, match="is no manifest of parts"):
        join_parts(tmp_path, tmp_path / "out")


def test_parts_are_not_mixed_with_older_ones(files, tmp_path):
    write_parts(files, tmp_path / "parts")

    with pytest.raises(LaneError, match="has parts in it already"):
        write_parts(files, tmp_path / "parts")


@pytest.mark.parametrize("name", ["../outside.whl", "/outside.whl", "folder/inside.whl"])
def test_an_archive_writes_nowhere_but_into_the_folder(tmp_path, name):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "part.000").write_bytes(stream.getvalue())
    row = {"name": "part.000", "bytes": len(stream.getvalue()), "sha256": sha256_of(parts / "part.000")}
    (parts / MANIFEST).write_text(json.dumps({"version": 1, "parts": [row], "files": []}))

    with pytest.raises(LaneError, match="no plain file"):
        join_parts(parts, tmp_path / "out")
    assert not (tmp_path / "outside.whl").exists()
    assert list((tmp_path / "out").iterdir()) == []
