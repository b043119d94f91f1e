from __future__ import annotations

import zipfile

import pytest

from sglang_crashkit import __version__
from sglang_crashkit.errors import ExitCode, RefusedError
from sglang_crashkit.installer.operations import apply, revert
from sglang_crashkit.installer.patchedwheel import build_patched_wheel
from sglang_crashkit.installer.record import Record
from sglang_crashkit.installer.tree import Overall, read_tree
from unit.installer.fake_sglang import FILES, install, write_wheel

VERSION = f"0.5.9+crashkit.{__version__}"
INFO = f"sglang-{VERSION}.dist-info"


@pytest.fixture
def built(tmp_path, wheel, kit):
    out = tmp_path / "out"
    out.mkdir()
    return build_patched_wheel(wheel, out, kit.patches, kit.lock)


def test_the_wheel_is_a_local_version_of_the_release_with_the_same_tags(built):
    assert built.name == f"sglang-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(built) as archive:
        metadata = archive.read(f"{INFO}/METADATA").decode()
        assert archive.read(f"{INFO}/WHEEL").endswith(b"Tag: py3-none-any\n")
    head, _, text = metadata.partition("\n\n")
    assert f"Version: {VERSION}\nRequires-Dist: sglang-crashkit=={__version__}\n" in head
    assert "Requires-Dist: torch" in head
    assert text == "Text.\nVersion: of the text\n"


def test_record_lists_every_member_with_its_hash(built):
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        record = Record.parse(archive.read(f"{INFO}/RECORD"), source="RECORD")
        assert [row.path for row in record.rows] == names
        assert names[-1] == f"{INFO}/RECORD"
        for row in record.rows[:-1]:
            assert row.raw == record.format_row(row.path, archive.read(row.path))


def test_permission_bits_and_compiled_extensions_are_kept(built, wheel):
    with zipfile.ZipFile(built) as new, zipfile.ZipFile(wheel) as old:
        assert new.getinfo("sglang/tool.so").external_attr >> 16 == 0o100755
        assert new.read("sglang/tool.so") == old.read("sglang/tool.so")
        assert new.read("sglang/srt/new/third.py") == b"THIRD = 3\n"


def test_a_second_build_gives_the_same_bytes(built, wheel, kit, tmp_path):
    (tmp_path / "again").mkdir()
    again = build_patched_wheel(wheel, tmp_path / "again", kit.patches, kit.lock)
    assert again.read_bytes() == built.read_bytes()


def test_an_installation_of_it_is_patched_and_says_how_to_go_back(built, kit, other_kit, tmp_path):
    environment = install(built, tmp_path / "patched-site")
    tree = read_tree(environment, kit.lock.find(environment.version))
    assert (tree.overall, tree.by_wheel) == (Overall.PATCHED, True)
    assert apply(environment, kit.patches, kit.lock).changed == ()
    with pytest.raises(RefusedError, match="came patched, from a wheel that the kit built") as caught:
        revert(environment, kit.patches, kit.lock)
    assert caught.value.next_step.endswith("install --force-reinstall --no-deps sglang==0.5.9")
    with pytest.raises(RefusedError, match="from a wheel that another kit built") as caught:
        apply(environment, other_kit.patches, other_kit.lock)
    assert "sglang-crashkit wheel 0.5.9" in caught.value.next_step


def test_a_wheel_that_is_not_upstreams_is_refused(tmp_path, kit, built):
    changed = write_wheel(tmp_path / "changed", files=FILES | {"srt/first.py": b"mine\n"})
    with pytest.raises(RefusedError, match="its sha256 is not the one in the lock"):
        build_patched_wheel(changed, tmp_path, kit.patches, kit.lock)
    # Of a platform that the lock does not list: its files decide.
    elsewhere = write_wheel(tmp_path, files=FILES | {"srt/first.py": b"mine\n"}, tags="cp312-cp312-linux_x86_64")
    with pytest.raises(RefusedError, match=r"srt/first\.py is not upstream's of 0\.5\.9"):
        build_patched_wheel(elsewhere, tmp_path, kit.patches, kit.lock)
    with pytest.raises(RefusedError, match="is not a wheel of SGLang as upstream built it"):
        build_patched_wheel(built, tmp_path, kit.patches, kit.lock)


def test_a_wheel_of_another_platform_is_built_from_its_files(tmp_path, kit):
    elsewhere = write_wheel(tmp_path, tags="cp312-cp312-linux_x86_64")
    built = build_patched_wheel(elsewhere, tmp_path, kit.patches, kit.lock)
    assert built.name == f"sglang-{VERSION}-cp312-cp312-linux_x86_64.whl"


def test_a_damaged_wheel_is_refused(tmp_path, kit, wheel):
    damaged = tmp_path / "sglang-0.5.9-py3-none-manylinux1_x86_64.whl"
    damaged.write_bytes(b"PK")
    with pytest.raises(RefusedError, match="does not read as a wheel"):
        build_patched_wheel(damaged, tmp_path, kit.patches, kit.lock)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(damaged, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"other" if name.endswith("tool.so") else old.read(name))
    with pytest.raises(RefusedError, match=r"tool\.so is not as its RECORD says"):
        build_patched_wheel(damaged, tmp_path, kit.patches, kit.lock)


def test_an_unsupported_release_is_refused_with_exit_code_4(tmp_path, kit):
    with pytest.raises(RefusedError, match="is not supported") as caught:
        build_patched_wheel(write_wheel(tmp_path, "0.5.99"), tmp_path, kit.patches, kit.lock)
    assert caught.value.exit_code is ExitCode.REFUSED
