from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from lanelib import machine
from lanelib.errors import LaneError


def test_find_compiler_names_the_package_when_there_is_none(programs):
    with pytest.raises(LaneError) as caught:
        machine.find_compiler()

    assert str(caught.value) == (
        "no C compiler (cc, gcc or clang) on PATH; the driver stub needs one\n  next: apt-get install gcc libc6-dev"
    )


def test_find_compiler_takes_the_first_that_is_there(programs):
    programs.add("clang", "")
    programs.add("gcc", "")

    assert machine.find_compiler() == ["gcc"]


def test_find_compiler_honours_cc_with_its_arguments(programs, monkeypatch):
    programs.add("gcc", "")
    programs.add("wrapper", "")
    monkeypatch.setenv("CC", "wrapper gcc")

    assert machine.find_compiler() == ["wrapper", "gcc"]


def test_find_compiler_names_a_cc_that_is_not_there(programs, monkeypatch):
    programs.add("gcc", "")
    monkeypatch.setenv("CC", "icc")

    with pytest.raises(LaneError, match="the C compiler icc that CC names is not on PATH"):
        machine.find_compiler()


def test_find_python_names_the_package_when_there_is_none(programs, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))

    with pytest.raises(LaneError, match=r"python3\.11 is not on PATH") as caught:
        machine.find_python()

    assert "apt-get install python3.11 python3.11-venv" in str(caught.value)


def test_find_python_returns_what_a_wrapper_leads_to(programs, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    programs.add("python3.11", "print(3, 11, '/real/python 3.11')")

    assert machine.find_python() == Path("/real/python 3.11")


def test_find_python_says_that_venv_is_missing(programs, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    programs.add("python3.11", "raise ImportError('No module named ensurepip')")

    with pytest.raises(LaneError, match="no venv or ensurepip") as caught:
        machine.find_python()

    assert caught.value.next_step == "apt-get install python3.11-venv"


def test_require_disk_says_what_is_free_and_what_is_needed(tmp_path):
    with pytest.raises(LaneError, match=r"GB are free at .*, and up to 1000000000 GB are needed"):
        machine.require_disk(tmp_path / "not" / "yet", 10**18)


def test_require_disk_is_silent_when_there_is_enough(tmp_path):
    machine.require_disk(tmp_path / "not" / "yet", 1)


@pytest.fixture
def no_libibverbs(monkeypatch):
    def load(name):
        if name == "libibverbs.so.1":
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_require_libraries_names_the_debian_packages(no_libibverbs):
    with pytest.raises(LaneError) as caught:
        machine.require_libraries()

    assert caught.value.message.endswith("not installed: libibverbs1")
    assert caught.value.next_step == "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2 ibverbs-providers"


def test_install_libraries_is_refused_without_root(no_libibverbs, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    with pytest.raises(LaneError, match="needs root"):
        machine.install_libraries()
