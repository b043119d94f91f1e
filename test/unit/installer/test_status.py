from dataclasses import replace

import pytest

from sglang_crashkit.installer.environment import Kit
from sglang_crashkit.installer.operations import apply
from sglang_crashkit.installer.status import format_status, read_status
from unit.installer.fake_sglang import install, without_kit, write_wheel


def text(environment, lock) -> str:
    return "\n".join(format_status(read_status(environment, lock)))


def test_the_next_command_fits_the_state(environment, kit, other_kit):
    status = read_status(environment, kit.lock)
    assert status.next_step == f"sglang-crashkit apply --python {environment.python}"
    assert read_status(without_kit(environment), kit.lock).next_step == environment.install_kit
    apply(environment, kit.patches, kit.lock)
    assert read_status(environment, kit.lock).next_step is None
    assert read_status(environment, other_kit.lock).next_step.startswith("sglang-crashkit apply")
    empty = replace(kit.lock, releases={})
    assert read_status(environment, empty).next_step.startswith("sglang-crashkit revert")
    (environment.package / "srt/first.py").write_text("mine\n")
    assert read_status(environment, kit.lock).next_step == environment.reinstall
    assert "state    foreign: 1 neither upstream's nor the kit's" in text(environment, kit.lock)


def test_an_unsupported_release_is_named_with_the_supported_ones(tmp_path, kit):
    environment = install(write_wheel(tmp_path / "w", "0.5.99"), tmp_path / "s")
    assert "(not supported: 0.5.9 to 0.5.9 (1 releases) are)" in text(environment, kit.lock)
    assert read_status(environment, kit.lock).next_step.startswith("scripts/port_release 0.5.99")


def test_another_kit_in_that_python_is_pointed_out(environment, kit):
    other = replace(environment, kit=Kit("9.9", environment.site, {}, only_by_python_path=False))
    assert "kit      9.9 in" in text(other, kit.lock)
    assert ", another one" in text(other, kit.lock)


@pytest.mark.parametrize(
    "field", ["python", "sglang_version", "state", "files", "next", "supported_range", "schema_version"]
)
def test_json_has_what_a_program_needs(environment, kit, field):
    assert field in read_status(environment, kit.lock).to_json()
