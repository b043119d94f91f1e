"""``sglang-crashkit collect --via ssh`` on two hosts, with a rank each, of one real server that hangs.

Both hosts are names of this machine, behind a real sshd. What a host sees is one node's processes, and its files are
where no one else looks.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import sglang_crashkit
from integration.commands.loopback_sshd import HOST_VARIABLE, Sshd, why_not
from integration.commands.test_collect import Collected, collect
from integration.crashes.test_two_nodes import RANKS, two_nodes
from integration.scenario import stopped
from lanelib.servers import wait_all_ready
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.model.snapshot import parse

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

HOSTS = ("h0", "h1")
#: For a collector on a loaded machine, in seconds.
LONG_S = 240.0
#: The kit as a host has it. The last of two equal options counts.
KIT = f"""#!/bin/sh
export PYTHONPATH={shlex.quote(str(Path(sglang_crashkit.__file__).parents[1]))}
here=$(dirname "$0")
exec {shlex.quote(sys.executable)} -m sglang_crashkit "$@" \\
    --pid="$(cat "$here/${HOST_VARIABLE}.pid")" --output-dir="$here/of ${HOST_VARIABLE}"
"""


@dataclass(frozen=True)
class Story:
    """A server of which one rank is stopped, collected by both names of this machine."""

    ranks: dict[str, int]  # pids of the ranks, by the name of their host
    both: Collected  # what was collected of these
    more: Collected  # what was collected of three hosts that do not answer as well
    answers: tuple[list[int], list[int]]  # the server's to the same request before and after


def collect_from(sshd: Sshd, kit: Path, output: Path, *hosts: str) -> Collected:
    words = ["--snapshots=2", "--interval=0.2", f"--hosts={','.join(hosts)}"]
    words += [f"--via={shlex.join([*sshd.command, '{host}'])}", f"--remote-command={shlex.quote(str(kit))}"]
    return collect(output, *words, timeout_s=LONG_S)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    if reason := why_not():
        pytest.skip(reason)
    # GIVEN names that a shell would take apart
    folder = tmp_path_factory.mktemp("ssh")
    odd = folder / "it's $HOME; here"
    odd.mkdir()
    kit = odd / "the kit"
    kit.write_text(KIT)
    kit.chmod(0o755)
    with two_nodes("0.5.23", folder / "crashes") as nodes, Sshd(folder, HOSTS) as sshd:
        wait_all_ready(nodes)
        for host, node in zip(HOSTS, nodes, strict=True):
            (odd / f"{host}.pid").write_text(str(node.pid))
        ranks = {host: node.pid_of(title) for host, node, title in zip(HOSTS, nodes, RANKS, strict=True)}
        before = nodes[0].generate()["output_ids"]
        with stopped(ranks["h1"]):
            both = collect_from(sshd, kit, odd / "both", *HOSTS)
            more = collect_from(sshd, kit, odd / "more", *HOSTS, "locked", "stranger", "gone")
        yield Story(ranks, both, more, (before, nodes[0].generate(timeout_s=LONG_S)["output_ids"]))


def test_the_ranks_of_both_hosts_are_one_result(story: Story) -> None:
    assert story.both.status == ExitCode.DONE, story.both.document
    for number, host in enumerate(HOSTS):
        (process,) = story.both.node(host)["processes"]
        assert (process["pid"], process["ranks"]) == (story.ranks[host], {"tp": number})
        assert set(process["states"]) == ({"T"} if host == "h1" else set(process["states"]) - {"T"})


def test_the_verdict_names_the_rank_with_its_host(story: Story) -> None:
    for collected in (story.both, story.more):
        verdict = json.loads((collected.folder / "verdict.json").read_text())["verdict"]
        assert verdict == collected.document["verdict"]
        assert verdict["level"] == "established"
        assert (verdict["class"], verdict["first"]) == ("stopped_process", "TP1 on h1")
        assert verdict["headline"].startswith("TP1 on h1 is stopped (state T")
        assert verdict["headline"] in (collected.folder / "explanation.txt").read_text()


def test_the_files_of_both_hosts_are_here(story: Story) -> None:
    for host, pid in story.ranks.items():
        folder, node = story.both.folder / host, story.both.node(host)
        assert node["problems"] == []
        (text,) = folder.glob(f"pyspy_*_{pid}.txt")
        assert "torch/distributed" in text.read_text() or "event_loop" in text.read_text()
        rounds = [parse(path.read_text()) for path in sorted(folder.glob("snapshot_*.json"))]
        assert [[process.pid for process in one.processes] for one in rounds] == [[pid], [pid]]
        # The host has them elsewhere.
        own = {path.name for path in (folder.parents[1] / f"of {host}").iterdir()}
        assert set(node["files"]) <= own & {path.name for path in folder.iterdir()}
        assert f"### TP{HOSTS.index(host)}: " in (folder / "summary.md").read_text()


@pytest.mark.parametrize(
    ("host", "why", "following"),
    [
        ("locked", "Permission denied (", "BatchMode=yes"),
        ("stranger", "Host key verification failed", "known_hosts"),
        ("gone", "ssh: connect to host 127.0.0.1 port ", "ssh -o BatchMode=yes -F "),
    ],
)
def test_a_host_that_lets_nobody_in_is_named(story: Story, host: str, why: str, following: str) -> None:
    assert story.more.status == ExitCode.PARTIAL
    (problem,) = story.more.node(host)["problems"]
    assert problem["what"] == f"host {host}"
    assert f"without a result: {why}" in problem["why"]
    assert following in problem["next"]
    assert [len(story.more.node(one)["processes"]) for one in (*HOSTS, host)] == [1, 1, 0]
    assert f"host {host}: {problem['why']}" in (story.more.folder / "explanation.txt").read_text()


def test_the_server_serves_as_before(story: Story) -> None:
    before, after = story.answers
    assert before == after
