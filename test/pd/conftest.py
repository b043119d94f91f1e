from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("prefill and decode")
    group.addoption("--pd-release", default="0.5.23", metavar="RELEASE", help="which SGLang")
    group.addoption("--pd-device", default="cpu", choices=("cpu", "cuda"), help="where prefill and decode run")


# The options are not registered where this folder is not named on the command line.


@pytest.fixture(scope="session")
def pd_release(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--pd-release", "0.5.23"))


@pytest.fixture(scope="session")
def pd_device(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--pd-device", "cpu"))
