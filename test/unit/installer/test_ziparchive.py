import zipfile

from sglang_crashkit.installer.ziparchive import Member, write_archive


def test_the_bytes_depend_on_the_members_alone(tmp_path, monkeypatch):
    members = [Member("b/x.so", b"\x00" * 1000, 0o100755), Member("a.py", b"text")]
    write_archive(tmp_path / "1.zip", members)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    write_archive(tmp_path / "2.zip", members)
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "1.zip") as archive:
        assert archive.namelist() == ["b/x.so", "a.py"]
        assert archive.getinfo("b/x.so").external_attr >> 16 == 0o100755
        assert archive.read("a.py") == b"text"
