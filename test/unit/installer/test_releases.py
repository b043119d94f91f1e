import pytest

from sglang_crashkit.errors import UsageError
from sglang_crashkit.installer.releases import base_release, is_release, local_label, release_key, sorted_releases


def test_post_releases_come_after_their_release_and_numbers_are_not_text():
    given = ["0.5.10", "0.5.9", "0.5.12.post1", "0.5.13", "0.5.12", "0.5.10.post1"]
    assert sorted_releases(given) == ["0.5.9", "0.5.10", "0.5.10.post1", "0.5.12", "0.5.12.post1", "0.5.13"]


@pytest.mark.parametrize("version", ["0.5.24.dev3+g12", "0.5.9rc1", "0.5.9+cu126", "", "v0.5.9", "../0.5.9"])
def test_only_final_and_post_releases_are_releases(version):
    assert not is_release(version)
    with pytest.raises(UsageError, match="is not a release"):
        release_key(version)


def test_a_local_version_is_a_build_of_its_release():
    assert base_release("0.5.23+crashkit.0.1.0") == "0.5.23"
    assert local_label("0.5.23+crashkit.0.1.0") == "crashkit.0.1.0"
    assert local_label("0.5.23") == ""
