from __future__ import annotations

import zipfile

import pytest

from lanelib.errors import LaneError
from lanelib.kernelwheel import generation_of, strip_kernels

RECORD = "sglang_kernel-1.dist-info/RECORD"
KEPT = (
    "sgl_kernel/__init__.py",
    "sgl_kernel/flash_attn.py",
    "sgl_kernel/spatial_ops.abi3.so",
    "include/mscclpp/core.hpp",
)
LEFT_OUT = (
    "sgl_kernel/flash_ops.abi3.so",
    "sgl_kernel/flashmla_ops.abi3.so",
    "_mscclpp.cpython-310-x86_64-linux-gnu.so",
    "lib/libmscclpp_static.a",
)
SM90, SM100 = "sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/sm100/common_ops.abi3.so"


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "sglang_kernel-1-cp310-abi3-manylinux2014_x86_64.whl"
    names = (*KEPT, *LEFT_OUT, SM90, SM100)
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"content of {name}" * 100)
        rows = [f"{name},sha256=abc,1\n" for name in names]
        archive.writestr(RECORD, "".join(rows) + f"{RECORD},,\n")
    return path


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize(("generation", "library"), [("sm90", SM90), ("sm100", SM100)])
def test_only_the_libraries_of_one_generation_stay(wheel, generation, library):
    before = wheel.stat().st_size

    saved = strip_kernels(wheel, generation)

    assert names_in(wheel) == {*KEPT, library, RECORD}
    assert saved == before - wheel.stat().st_size > 0
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(library).decode() == f"content of {library}" * 100


def test_record_names_what_is_left(wheel):
    strip_kernels(wheel, "sm90")

    with zipfile.ZipFile(wheel) as archive:
        rows = archive.read(RECORD).decode().splitlines()
    assert sorted(rows) == sorted([*(f"{name},sha256=abc,1" for name in (*KEPT, SM90)), f"{RECORD},,"])


def test_a_stripped_wheel_may_be_stripped_again(wheel):
    strip_kernels(wheel, "sm90")
    names = names_in(wheel)

    strip_kernels(wheel, "sm90")

    assert names_in(wheel) == names


def test_a_wheel_without_the_wanted_generation_stays_as_it_is(wheel):
    strip_kernels(wheel, "sm90")
    content = wheel.read_bytes()

    with pytest.raises(LaneError, match="no kernels for sm100"):
        strip_kernels(wheel, "sm100")
    assert wheel.read_bytes() == content
    assert list(wheel.parent.iterdir()) == [wheel]


def test_what_is_no_wheel_is_named(wheel):
    wheel.write_bytes(b"not a zip file")

    with pytest.raises(LaneError, match="is no wheel"):
        strip_kernels(wheel, "sm90")


def test_hopper_alone_loads_the_libraries_for_it():
    assert [generation_of(capability) for capability in ((8, 9), (9, 0), (10, 0))] == ["sm100", "sm90", "sm100"]
