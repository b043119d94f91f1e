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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (JOB, DebugConfig(True, 600, "{log_dir}/backtraces")),
        (JOB + "  wait_seconds: 1800\n  output_dir: /shared/debug\n", DebugConfig(True, 1800, "/shared/debug")),
        ("name: x", DebugConfig(False)),
        ("", DebugConfig(False)),
    ],
)
def test_other_sections_are_other_programs_and_defaults_are_documented(
    tmp_path: Path, text: str, expected: DebugConfig
) -> None:
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("debug: {enabled: 1}", "Expected `bool`, got `int` - at `$.debug.enabled`"),
        ("debug: {wait_seconds: true}", "Expected `int`, got `bool` - at `$.debug.wait_seconds`"),
        ("debug: {wait_seconds: -1}", "Expected `int` >= 0 - at `$.debug.wait_seconds`"),
        ("debug: {output_dir: ''}", "Expected `str` of length >= 1 - at `$.debug.output_dir`"),
        ("debug: {wait_secs: 5}", "Object contains unknown field `wait_secs` - at `$.debug`"),
        ("debug: true", "Expected `object`, got `bool` - at `$.debug`"),
        ("debug:", "Expected `object`, got `null` - at `$.debug`"),
        ("- a\n- b\n", "Expected `object | null`, got `array`"),
        ("debug: [", "it is not YAML: "),
        (b"\xff\xfe\xff", "it is not YAML: "),
        ("x: 2026-99-99", "it is not YAML: month must be in 1..12"),
        ("!!python/object/apply:os.system [x]", "it is not YAML: "),
        (None, "No such file or directory"),
    ],
)
def test_what_makes_no_sense_is_named_with_the_file(tmp_path: Path, text: str | bytes | None, why: str) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, text) if text is not None else read_debug_config(tmp_path / "job.yaml")
    assert error.value.message.startswith(f"{tmp_path}/job.yaml: {why}")


def test_the_folder_of_logs_is_put_in() -> None:
    assert expand_output("{log_dir}/backtraces", Path("/logs/7")) == Path("/logs/7/backtraces")
    assert expand_output("/shared", Path("/logs/7")) == Path("/shared")
    assert expand_output("~/x", Path()) == Path.home() / "x"
    with pytest.raises(UsageError, match=r"\{job_id\} is unknown"):
        expand_output("/shared/{job_id}", Path())
