"""The manifests of docs/kubernetes: Kubernetes' own schemas know each field of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import latest_version, validate

FOLDER = Path(__file__).parents[3] / "docs" / "kubernetes"
MANIFESTS = [yaml.safe_load(path.read_text()) for path in sorted(FOLDER.iterdir())]
#: The oldest that the package of schemas has, and the newest.
VERSIONS = ("1.25.0", latest_version())


def known_parts(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what Kubernetes itself has a schema for: the manifest, or an extension's templates of pods."""
    if manifest["kind"] != "LeaderWorkerSet":
        return [manifest]
    parts = manifest["spec"]["leaderWorkerTemplate"].items()
    return [{"apiVersion": "v1", "kind": "PodTemplate", "template": part} for name, part in parts if "Template" in name]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: str(manifest["kind"]))
def test_a_manifest_has_no_field_that_kubernetes_does_not_know(manifest: dict[str, Any], version: str) -> None:
    parts = known_parts(manifest)
    assert parts
    for part in parts:
        validate(part, version, strict=True)
