import pytest

from sglang_crashkit.errors import RefusedError
from sglang_crashkit.installer.lockfile import Lock, LockedFile, LockedRelease, load_lock
from sglang_crashkit.installer.resolver import LOCK_NAME, PatchDataError


def a_lock() -> Lock:
    files = {"srt/a.py": LockedFile("1" * 64, "0.5.9/srt/a.py.patch", "2" * 64), "srt/n.py": LockedFile(None, "x", "3")}
    return Lock(
        {"0.5.9": LockedRelease({"sglang-0.5.9-py3-none-any.whl": "4" * 64}, files), "0.5.10": LockedRelease({}, {})}
    )


def test_what_is_dumped_loads_back_and_does_not_depend_on_the_order(tmp_path):
    lock = a_lock()
    (tmp_path / LOCK_NAME).write_bytes(lock.dump())
    assert load_lock(tmp_path) == lock
    assert Lock(dict(reversed(lock.releases.items()))).dump() == lock.dump()


def test_an_unsupported_release_is_refused_with_the_range_and_how_to_port():
    with pytest.raises(
        RefusedError, match=r"SGLang 0\.5\.99 is not supported; supported are 0\.5\.9 to 0\.5\.10"
    ) as caught:
        a_lock().require("0.5.99")
    assert "scripts/port_release 0.5.99" in str(caught.value)


def test_a_local_build_of_a_release_is_that_release():
    assert a_lock().require("0.5.9+cu126") is not None
    assert a_lock().find("0.5.9.dev1") is None


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"schema_version": 2, "releases": {}}', '{"schema_version": 1, "releases": {"0.5.9": {}}}'],
)
def test_a_damaged_lock_is_named(tmp_path, text):
    (tmp_path / LOCK_NAME).write_text(text)
    with pytest.raises(PatchDataError, match=r"releases\.lock\.json"):
        load_lock(tmp_path)
