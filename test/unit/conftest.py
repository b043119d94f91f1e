from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from sglang_crashkit.cli.main import main
from unit.support.command import Cli, Said

# The machine may be busy with other things, and nothing is to be left in the working folder.
settings.register_profile("unit", deadline=None, max_examples=60, database=None)
settings.load_profile("unit")
# scripts/test --fast asks for this one.
settings.register_profile("fast", parent=settings.get_profile("unit"), max_examples=15)


def pytest_collection_finish() -> None:
    """Have no collection of a test's garbage go through all that was imported and collected."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path: that of a socket has 107 bytes at most, too few for `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="ck-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def runtime(short_folder: Path) -> Path:
    """A runtime folder, which has sockets."""
    return short_folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """``sglang-crashkit``, run in this process."""

    def run(*arguments: object, status: int | None = 0) -> Said:
        try:
            ended = main([*map(str, arguments)])
        except SystemExit as error:
            # As argparse ends a process.
            ended = error.code
        assert status in (None, ended)
        return Said(*capsys.readouterr(), ended)

    return run
