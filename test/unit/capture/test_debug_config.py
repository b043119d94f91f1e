from __future__ import annotations

from pathlib import Path

import pytest

from sglang_crashkit.capture.debug_config import DebugConfig, expand_output, read_debug_config
from sglang_crashkit.errors import UsageError

JOB = """
name: my-benchmark
resources: {gpu_type: gb200, decode_nodes: 2}
debug:
  enabled: true
"""


def read(folder: Path, text: str | bytes) -> DebugConfig:
    path = folder / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_debug_config(path)


def test_other_sections_are_other_programs_and_defaults_are_documented(tmp_path: Path) -> None:
    assert read(tmp_path, JOB) == DebugConfig(True, 600, "{log_dir}/backtraces")


def test_every_option_is_read(tmp_path: Path) -> None:
    text = JOB + "  wait_seconds: 1800\n  output_dir: /shared/debug\n"
    assert read(tmp_path, text) == DebugConfig(True, 1800, "/shared/debug")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("debug: {enabled: 'yes please'}", "debug.enabled must be true or false, not 'yes please'"),
        ("debug: {enabled: 1}", "debug.enabled must be true or false, not 1"),
        ("debug: {wait_seconds: soon}", "debug.wait_seconds must be a whole number of seconds, 0 or more, not 'soon'"),
        ("debug: {wait_seconds: true}", "debug.wait_seconds must be a whole number of seconds, 0 or more, not True"),
        ("debug: {wait_seconds: -1}", "debug.wait_seconds must be a whole number of seconds, 0 or more, not -1"),
        ("debug: {output_dir: [a]}", "debug.output_dir must be the path of a folder, not a list"),
        ("debug: {output_dir:}", "debug.output_dir must be the path of a folder, not nothing"),
        ("debug: {wait_secs: 5}", "debug.wait_secs is unknown"),
        ("debug: true", "debug must hold enabled, wait_seconds, output_dir, not True"),
        ("debug:", "debug must hold enabled, wait_seconds, output_dir, not nothing"),
    ],
)
def test_what_makes_no_sense_is_named_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert error.value.message == f"{tmp_path}/job.yaml: {message}"


def test_the_folder_of_logs_is_put_in() -> None:
    assert expand_output("{log_dir}/backtraces", Path("/logs/7")) == Path("/logs/7/backtraces")
    assert expand_output("/shared", Path("/logs/7")) == Path("/shared")
    assert expand_output("~/x", Path()) == Path.home() / "x"
    with pytest.raises(UsageError, match=r"\{job_id\} is unknown"):
        expand_output("/shared/{job_id}", Path())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("debug: [", "is not YAML: "),
        ("a: b: c", "is not YAML: "),
        (b"\xff\xfe\xff", "is not YAML: "),
        ("!!python/object/apply:os.system [x]", "is not YAML: "),
        ("- a\n- b\n", "must hold sections such as debug:, not a list"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_file_of_sections_is_named(tmp_path: Path, text: str | bytes | None, why: str) -> None:
    with pytest.raises(UsageError, match=rf"\.yaml:? {why}"):
        read(tmp_path, text) if text is not None else read_debug_config(tmp_path / "absent.yaml")
