"""The kit gets into an image of an SGLang as published: by a layer of the recipe's, and by an init container's."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
import yaml

from containers.docker_host import DockerHost, base_of
from containers.left import kill_a_rank
from lanelib.lanes import Lane, ensure_lane
from lanelib.paths import PYPROJECT, ROOT

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(1200)]

RECIPES = (ROOT / "docs" / "recipes.md").read_text()
LAYERED = "sglang-with-the-kit"
#: As the recipes call it; no registry is asked.
UPSTREAM = re.search(r"^FROM (\S+)$", RECIPES, re.MULTILINE)[1]  # type: ignore[index]
#: What a Dockerfile's commands and pip's call.
_PROGRAMS = ("sh", "cp", "dirname")
_WITHOUT = ("__pycache__", "test", "site-packages")
_SHARED = re.compile(r"(?:=> )?(/\S+) \(0x")


def make_upstream_image(docker: DockerHost, lane: Lane, folder: Path) -> None:
    """Give Docker an image of a pristine lane's SGLang, by the name that the recipes have for upstream's.

    It is as upstream's: a Python with SGLang as published, pip and a shell, and nothing of the kit. What is large, such
    as torch, is not in it: a lane's packages are found where a container has the lane mounted.
    """
    base = base_of(lane)
    (site,) = lane.root.glob("lib/python3*/site-packages")
    (standard,) = base.glob("lib/python3.*/os.py")
    into = standard.parent / "site-packages"
    archive = folder / "upstream.tar"
    with tarfile.open(archive, "w") as tar:
        programs = list(_programs(base))
        packages = list(_packages(site))
        modules = [
            *standard.parent.glob("lib-dynload/*.so"),
            *(site / name for name in packages if name.endswith(".so")),
        ]
        libraries = {library for program in (*programs, *modules) for library in _libraries(program)}
        # A lane's own are where the lane is mounted.
        for file in sorted({*programs, *(one for one in libraries if not one.is_relative_to(lane.root))}):
            tar.add(file.resolve(), str(file))
        _link(tar, Path("/bin"), "usr/bin")
        for name in ("python3", "python"):
            _link(tar, base / "bin" / name, programs[0].name)
        tar.add(
            standard.parent,
            str(standard.parent),
            filter=lambda info: None if Path(info.name).name in _WITHOUT else info,
        )
        for file in packages:
            tar.add(site / file, str(into / file))
        for found in standard.parent.glob("site-packages/pip*"):
            tar.add(found, str(into / found.name))
        _write(
            tar,
            base / "bin" / "pip",
            f"#!{base}/bin/python3\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n",
            0o755,
        )
        _write(tar, into / "lane.pth", f"{site}\n")
        _write(tar, Path("/tmp/.keep"), "")
    docker.run("import", f"--change=ENV PATH={base}/bin:/usr/bin:/bin", str(archive), UPSTREAM, timeout_s=300)


def _programs(base: Path) -> Iterator[Path]:
    yield next(path for path in base.glob("bin/python3.*") if path.resolve() == path and path.suffix[1:].isdigit())
    yield from (Path(found) for name in _PROGRAMS if (found := shutil.which(name, path="/usr/bin:/bin")))


def _libraries(program: Path) -> Iterable[Path]:
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=60, check=False)
    return map(Path, _SHARED.findall(done.stdout))


def _packages(site: Path) -> Iterator[str]:
    """Yield the files of SGLang and of what the kit needs in a folder of packages, MarkupSafe for Jinja2 among it."""
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)
    wanted = {_plain(name) for name in ("sglang", "MarkupSafe", *re.findall(r'"([\w-]+)', block))}
    found: dict[str, Distribution] = {_plain(one.metadata["Name"]): one for one in distributions(path=[str(site)])}
    for name in sorted(wanted):
        files = [str(file) for file in found[name].files or () if (site / file).is_file()]
        yield from (file for file in files if not file.startswith("..") and "__pycache__" not in file)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _write(tar: tarfile.TarFile, path: Path, text: str, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(str(path))
    info.size, info.mode = len(text), mode
    tar.addfile(info, io.BytesIO(text.encode()))


def _link(tar: tarfile.TarFile, path: Path, target: str) -> None:
    info = tarfile.TarInfo(str(path))
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)


@pytest.fixture(scope="module")
def lane() -> Lane:
    return ensure_lane("0.5.23", pristine=True)


@pytest.fixture(scope="module")
def context(docker: DockerHost, lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that an image is built from, with the kit's wheel; upstream's image is there."""
    folder = tmp_path_factory.mktemp("image")
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*argv, f"--wheel-dir={folder}/wheels", str(ROOT)], check=True, timeout=300)
    make_upstream_image(docker, lane, folder)
    (folder / "upstream.tar").unlink()
    yield folder
    shutil.rmtree(folder)


def test_a_layer_of_the_recipe(docker: DockerHost, lane: Lane, context: Path, volume: Path) -> None:
    (text,) = re.findall(r"```dockerfile\n(.*?)```", RECIPES, re.DOTALL)
    (context / "Dockerfile").write_text(text)
    docker.run("build", "--network=host", f"--tag={LAYERED}", str(context), timeout_s=300)
    with docker.serve(lane, volume, image=LAYERED) as server:
        kill_a_rank(server, volume)


def test_an_init_container_of_the_recipe(
    docker: DockerHost, lane: Lane, context: Path, volume: Path, temporary: Path
) -> None:
    manifest = yaml.safe_load((ROOT / "docs" / "kubernetes" / "init-container.yaml").read_text())
    init = manifest["spec"]["initContainers"][0]
    assert init["image"] == UPSTREAM
    mounts = {mount["name"]: mount["mountPath"] for mount in init["volumeMounts"]}
    kit, wheels = f"--volume={temporary}:{mounts['crashkit']}", f"--volume={context}/wheels:{mounts['wheels']}:ro"
    docker.run("run", "--rm", "--network=host", kit, wheels, UPSTREAM, *init["command"], timeout_s=300)
    with docker.serve(lane, volume, kit, image=UPSTREAM, python=f"{mounts['crashkit']}/bin/python") as server:
        kill_a_rank(server, volume)
