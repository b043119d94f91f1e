"""The kit gets into an image of an SGLang as published: by a layer of the recipe's, and by an init container's."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from containers.docker_host import Container, DockerHost
from containers.left import TP0, TP1, begin, stack_of, the_incident
from containers.upstream_image import UPSTREAM, make_upstream_image, make_wheels
from lanelib.lanes import Lane, ensure_lane
from lanelib.paths import ROOT
from sglang_crashkit.incident.exit_status import ServerExit
from unit.support.waiting import LONG

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(1200)]

RECIPES = (ROOT / "docs" / "recipes.md").read_text()
LAYERED = "sglang-with-the-kit"


def dockerfile() -> str:
    (text,) = re.findall(r"```dockerfile\n(.*?)```", RECIPES, re.DOTALL)
    return str(text)


def init_container() -> dict[str, Any]:
    manifest = yaml.safe_load((ROOT / "docs" / "kubernetes" / "init-container.yaml").read_text())
    return dict(manifest["spec"]["initContainers"][0])


@pytest.fixture(scope="module")
def lane() -> Lane:
    return ensure_lane("0.5.23", pristine=True)


@pytest.fixture(scope="module")
def context(docker: DockerHost, lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that an image is built from, with the kit's wheel; upstream's image is there."""
    folder = tmp_path_factory.mktemp("image")
    make_wheels(folder / "wheels")
    make_upstream_image(docker, lane, folder)
    (folder / "upstream.tar").unlink()
    yield folder
    shutil.rmtree(folder)


def break_it(server: Container, volume: Path) -> None:
    """Kill a rank, and expect all that a server with the kit leaves."""
    begin(server)
    os.kill(server.pid_of(TP1), signal.SIGKILL)
    assert server.popen.wait(LONG) == ServerExit.KILLED
    _folder, document = the_incident(volume)
    assert document["verdict"]["first_failure"]["title"] == TP1
    assert stack_of(document, TP0)["status"] == "captured"


def test_a_layer_of_the_recipe(docker: DockerHost, lane: Lane, context: Path, volume: Path) -> None:
    (context / "Dockerfile").write_text(dockerfile())
    docker.run("build", "--network=host", f"--tag={LAYERED}", str(context), timeout_s=300)
    with docker.serve(lane, volume, image=LAYERED) as server:
        break_it(server, volume)


def test_an_init_container_of_the_recipe(
    docker: DockerHost, lane: Lane, context: Path, volume: Path, temporary: Path
) -> None:
    init = init_container()
    assert init["image"] == UPSTREAM
    mounts = {mount["name"]: mount["mountPath"] for mount in init["volumeMounts"]}
    kit, wheels = f"--volume={temporary}:{mounts['crashkit']}", f"--volume={context}/wheels:{mounts['wheels']}:ro"
    docker.run("run", "--rm", "--network=host", kit, wheels, UPSTREAM, *init["command"], timeout_s=300)
    with docker.serve(lane, volume, kit, image=UPSTREAM, python=f"{mounts['crashkit']}/bin/python") as server:
        break_it(server, volume)
