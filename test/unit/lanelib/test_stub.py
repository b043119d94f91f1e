from __future__ import annotations

import ctypes

import pytest

from lanelib import stub
from lanelib.errors import LaneError


@pytest.fixture
def stub_dir(tmp_path, monkeypatch):
    folder = tmp_path / "stub"
    monkeypatch.setattr(stub, "LANES", tmp_path)
    monkeypatch.setattr(stub, "STUB", folder)
    monkeypatch.setattr(stub, "has_driver", lambda: False)
    return folder


def test_stub_names_a_compiler_that_fails(stub_dir, programs):
    programs.add("cc", "import sys; sys.exit('stdlib.h: No such file')")

    with pytest.raises(LaneError, match=r"cannot make the driver stub: .*") as caught:
        stub.ensure_stub()

    assert "stdlib.h: No such file" in caught.value.message
    assert "set CC" in str(caught.value.next_step)


def test_has_driver_is_not_misled_by_the_stub(stub_dir, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: type("Stub", (), {stub.MARKER: 0}))

    assert not stub.has_driver()


@pytest.mark.parametrize(
    ("there", "chosen", "found"),
    [
        (["gcc", "clang"], None, ["gcc"]),
        (["gcc", "wrapper"], "wrapper gcc", ["wrapper", "gcc"]),
        ([], None, r"no C compiler \(cc, gcc, clang\) on PATH"),
        (["gcc"], "icc", r"no C compiler \(icc\) on PATH"),
    ],
)
def test_the_compiler_is_the_one_that_cc_names_or_the_first_on_path(programs, monkeypatch, there, chosen, found):
    for name in there:
        programs.add(name, "")
    if chosen:
        monkeypatch.setenv("CC", chosen)

    if isinstance(found, list):
        assert stub.find_compiler() == found
    else:
        with pytest.raises(LaneError, match=found) as caught:
            stub.find_compiler()
        assert "apt-get install gcc libc6-dev" in str(caught.value.next_step)


def test_the_stub_says_that_there_is_no_device_and_is_compiled_anew_with_its_source(stub_dir, monkeypatch, tmp_path):
    assert stub.ensure_stub() == stub_dir
    library = ctypes.CDLL(str(stub_dir / "libcuda.so.1"))
    assert (library.cuInit(0), library.cuMemGetAddressRange_v2(), hasattr(library, stub.MARKER)) == (100, 100, True)
    with monkeypatch.context() as patch:
        patch.setattr(stub, "run_command", None)
        assert stub.ensure_stub() == stub_dir
        patch.setattr(stub, "has_driver", lambda: True)
        assert stub.ensure_stub() is None
    source = tmp_path / "stub.c"
    source.write_text(stub.SOURCE.read_text() + "NO_DEVICE(cuNew)\n")
    monkeypatch.setattr(stub, "SOURCE", source)
    monkeypatch.setattr(stub, "hash_files", lambda files: "changed")
    stub.ensure_stub()
    assert b"cuNew" in (stub_dir / "libcuda.so.1").read_bytes()
