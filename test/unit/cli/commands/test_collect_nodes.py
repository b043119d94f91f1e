"""What ``collect --slurm-job`` and ``--via`` ask other commands for, here stand-ins, and make of their answers."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from incident_schema import assert_fits
from sglang_crashkit.errors import ExitCode
from sglang_crashkit.model.sample import Sample
from sglang_crashkit.model.snapshot import NodeSnapshot
from unit.support.command import Cli, Said
from unit.support.targets import make_tool
from unit.support.waiting import LONG

RANK = Sample("host", 4711, 1, "sglang::scheduler_TP0", "scheduler", {"tp": 0}, 1.0, state="S")
ROUND = NodeSnapshot("host", 1.0, (RANK,))
FOUND = {
    "exit_code": 0,
    "snapshots": ["snapshot_1.json", "snapshot_2.json"],
    "processes": [],
    "rounds": [ROUND.to_json(), ROUND.to_json()],
}
NOTHING = {"error": "there is no SGLang process on this host", "next": "x", "exit_code": 3}
REFUSED = {"error": "cannot write to /x", "next": "name another", "exit_code": 1}


#: Notes what it is asked for each node, and answers for it.
SRUN = f"""for a; do case $a in --nodelist=*) n=${{a#*=}};; esac; done
printf '%s\\n' "$@" >$0.$n; echo {shlex.quote(json.dumps(FOUND))}"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder ahead of all others on PATH, with a Slurm that knows one job."""
    tools = {"squeue": "echo '12|12|RUNNING|n[1-2]'", "scontrol": "echo n1; echo n2", "srun": SRUN}
    for name, script in tools.items():
        make_tool(tmp_path / "slurm", script, name)
    monkeypatch.setenv("PATH", str(tmp_path / "slurm"), prepend=os.pathsep)
    return tmp_path / "slurm"


def test_each_node_runs_the_collector_in_its_own_container(slurm: Path, tmp_path: Path, cli: Cli) -> None:
    arguments = ["--container-name=sglang_{job_id}_{node}", "--snapshots=2", "--interval=0.5", "--all"]
    cli("collect", "--slurm-job=12", f"--output-dir={tmp_path}/out", *arguments)
    for node in ("n1", "n2"):
        asked = (slurm / f"srun.{node}").read_text().splitlines()
        (step,) = [word for word in asked if word.startswith("--job-name=crashkit-")]
        assert step.endswith(f"-{node}")
        assert [word for word in asked if word != step] == [
            *("--overlap", "--jobid=12", f"--nodelist={node}", "--nodes=1", "--ntasks=1"),
            f"--container-name=sglang_12_{node}",
            *("python3", "-m", "sglang_crashkit", "collect", "--json", "--gathered-within=300"),
            *("--snapshots=2", "--interval=0.5", "--all", "--no-native"),
            f"--output-dir={tmp_path}/out/{node}",
        ]


def test_a_missing_job_is_told_before_the_wait(slurm: Path, cli: Cli) -> None:
    make_tool(slurm, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "squeue")
    said = cli("collect", "--slurm-job=12", "--wait-seconds=3600", status=ExitCode.NOTHING)
    assert "Slurm knows no job 12, or no longer" in said.err


POD_RANK = replace(RANK, host="pod", pid=17)
#: Its ``asked.txt`` gets the words that it was given; what it does is in a file of the host's name.
CARRIER = """
import pathlib, sys
folder, host, *words = sys.argv[1:]
(pathlib.Path(folder) / f"{host}.asked").write_text("\\n".join(words))
exec((pathlib.Path(folder) / host).read_text())
"""
HANGS = "import time; time.sleep(600)"
REFUSES = "print('me@bad: Permission denied (publickey,password).', file=sys.stderr); sys.exit(255)"


def answer(*looks: Sample, **fields: Any) -> dict[str, Any]:
    """Return what the collector prints on a host, with its text files."""
    rounds = [NodeSnapshot(look.host, look.time, (look,)) for look in looks]
    names = [f"snapshot_pod_{number}.json" for number, _round in enumerate(rounds, start=1)]
    texts = {"summary.md": "# stopped\n", "pyspy_pod_17.txt": "all_reduce\n"}
    processes = [{"files": ["pyspy_pod_17.txt"]}]
    document = {"exit_code": 0, "output_dir": "/elsewhere", "snapshots": names, "processes": processes}
    return {**document, "rounds": [one.to_json() for one in rounds], "texts": texts, **fields}


def does_print(document: object) -> str:
    """Return the script of a host that answers, amid what its container prints."""
    return f"print('== PyTorch ==\\n{{not json}}'); print({json.dumps(document)!r}); print('bye {{}}\\n{{}}')"


STOPPED = replace(POD_RANK, title="sglang::scheduler_TP1", ranks={"tp": 1}, state="T")
ANSWERS = {
    "h0": does_print(answer(POD_RANK, replace(POD_RANK, time=2.0))),
    "h1": does_print(answer(STOPPED, replace(STOPPED, time=2.0))),
}


class Hosts:
    """Hosts behind a command that runs a script for each of them.

    Args:
        folder: where the scripts are, and what each host was asked is noted.
        cli: see the fixture.
    """

    def __init__(self, folder: Path, cli: Cli) -> None:
        self._folder, self._cli = folder, cli
        (folder / "carrier.py").write_text(CARRIER)
        self.via = shlex.join([sys.executable, str(folder / "carrier.py"), str(folder), "{host}"])
        self.output = folder / "out put"

    def collect(self, hosts: dict[str, str], *arguments: str, status: int = 0) -> Said:
        for host, script in hosts.items():
            (self._folder / host).write_text(script)
        listed = [f"--via={self.via}", f"--hosts={','.join(hosts)}", f"--output-dir={self.output}"]
        return self._cli("collect", *listed, *arguments, status=status)

    def asked(self, host: str) -> list[str]:
        return (self._folder / f"{host}.asked").read_text().splitlines()


@pytest.fixture
def hosts(tmp_path: Path, cli: Cli) -> Hosts:
    return Hosts(tmp_path, cli)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (FOUND, FOUND, ExitCode.DONE),
        (FOUND, NOTHING, ExitCode.DONE),
        (FOUND, FOUND | {"exit_code": 5}, ExitCode.PARTIAL),
        (FOUND, REFUSED, ExitCode.PARTIAL),
        (FOUND, "no object", ExitCode.PARTIAL),
        (FOUND, FOUND | {"snapshots": ["one-of-two.json"]}, ExitCode.PARTIAL),
        (NOTHING, NOTHING, ExitCode.NOTHING),
        (NOTHING, REFUSED, ExitCode.FAILED),
        (NOTHING, "no object", ExitCode.FAILED),
        ("no object", "no object", ExitCode.FAILED),
    ],
)
def test_the_status_says_whether_all_nodes_gave_what_they_have(
    hosts: Hosts, first: object, second: object, status: ExitCode
) -> None:
    document = hosts.collect({"a": does_print(first), "b": does_print(second)}, "--json", status=status).json
    assert_fits(document, "collect_hosts")
    assert document["exit_code"] == status


def test_the_ranks_of_all_hosts_are_one_result(hosts: Hosts) -> None:
    lines = hosts.collect(ANSWERS).out.splitlines()
    assert lines[:5] == [
        "2 hosts by python",
        "h0  TP0          pid 17       S  no Python frame",
        "h1  TP1          pid 17       T  no Python frame",
        f"files: {hosts.output}/<host>/, {hosts.output}/explanation.txt",
        "",
    ]
    assert lines[5].startswith("TP1 on h1 is stopped (state T")
    assert "next     1. `kill -CONT 17` lets TP1 on h1 continue" in lines
    verdict = json.loads((hosts.output / "verdict.json").read_text())
    assert (verdict["via"], verdict["verdict"]["level"], verdict["silent"]) == ("python", "established", [])


def test_each_host_is_asked_for_files_by_the_users_command(hosts: Hosts) -> None:
    hosts.collect(ANSWERS, "--all-servers", "--any-user", "--snapshots=2", "--remote-command=X='a b' kit")
    for host in ANSWERS:
        assert hosts.asked(host) == [
            *("env", "X=a b", "kit", "collect", "--json", "--gathered-within=300"),
            *("--all-servers", "--snapshots=2", "--interval=5", "--any-user", "--no-native"),
            f"--output-dir={hosts.output}/{host}",
        ]
    hosts.collect(ANSWERS)
    assert hosts.asked("h0")[:4] == ["python3", "-m", "sglang_crashkit", "collect"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (HANGS, "no answer within 4 s"),
        (REFUSES, "with status 255 and without a result: me@bad: Permission denied"),
        ("print('Welcome'); print('{no json')", "with status 0 and without a result: {no json"),
        ("print('[]'); sys.exit(1)", "with status 1 and without a result: []"),
        ("print('{\"a\":' * 100_000)", 'with status 0 and without a result: "a":{"a":'),
        ("raise SystemExit('x' * 9999)", f"without a result: {'x' * 300}"),
        ("import os; os.kill(os.getpid(), 9)", "with status -9 and without a result"),
    ],
    ids=["hangs", "wants a password", "junk", "no object", "deep", "long", "killed"],
)
def test_a_host_without_an_answer_is_named_beside_the_others(hosts: Hosts, script: str, why: str) -> None:
    # The others are to answer within that, too.
    limit = 4 if script == HANGS else int(LONG)
    options = (f"--node-timeout={limit}", "--fan-out=3")
    lines = hosts.collect({**ANSWERS, "bad": script}, *options, status=ExitCode.PARTIAL).out.splitlines()
    assert lines[3] == "bad  no answer"
    assert lines[4].startswith("host bad: ")
    assert why in lines[4]
    assert len(lines[4]) < 450
    assert any(line.startswith("TP1 on h1 is stopped") for line in lines)
    assert lines[4] in (hosts.output / "explanation.txt").read_text().splitlines()
    assert json.loads((hosts.output / "verdict.json").read_text())["silent"] == ["bad"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"texts": {"../../h0": "x"}}, "'../../h0' is no name of a file"),
        ({"texts": {".bashrc": "x"}}, "'.bashrc' is no name of a file"),
        ({"snapshots": ["/etc/x", "y"]}, "'/etc/x' is no name of a file"),
        ({"snapshots": ["only one"]}, "argument"),
        ({"texts": {"a": 5}}, "encode"),
        ({"texts": 5}, "iterable"),
        ({"texts": {"x" * 255: "x"}}, "File name too long"),
    ],
)
def test_a_host_writes_nothing_but_files_of_its_own_folder(hosts: Hosts, fields: dict[str, object], why: str) -> None:
    bad = does_print(answer(POD_RANK, replace(POD_RANK, time=2.0), **fields))
    lines = hosts.collect({"h1": ANSWERS["h1"], "bad": bad}, status=ExitCode.PARTIAL).out.splitlines()
    (problem,) = [line for line in lines if line.startswith("a snapshot of host bad: ")]
    assert why in problem
    assert sorted(path.name for path in hosts.output.iterdir()) == [*("bad", "explanation.txt", "h1", "verdict.json")]
    assert not list((hosts.output / "bad").glob(".*"))


@pytest.mark.parametrize("listed", ["h0\n\n# spare: h9\nh1 # new\n", "h0, h1", "h0\th1,\r\nh0\n"])
def test_hosts_may_be_the_lines_of_a_file(hosts: Hosts, cli: Cli, listed: str) -> None:
    hosts.collect(ANSWERS)
    said = cli("collect", f"--via={hosts.via}", f"--hosts={listed}", f"-o{hosts.output}")
    assert said.out.startswith("2 hosts by python\n")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--via=sh {host}"], "--hosts is missing"),
        (["--hosts=a"], "--via is missing"),
        (["--via=sh {host}", "--hosts= , "], "there is no host in the list"),
        (["--via=sh {node}", "--hosts=a"], "does not say where the host's name goes"),
        (["--via={host}", "--hosts=a"], "does not say where the host's name goes"),
        (["--via=", "--hosts=a"], "does not say where the host's name goes"),
        (["--via=sh '{host}", "--hosts=a"], "No closing quotation"),
        (["--via=/no/such {host}", "--hosts=a"], "there is no command /no/such here"),
        (["--via=sh {host}", "--hosts=a", "--pid=1"], "--pid names a process of one machine"),
        (["--via=sh {host}", "--hosts=a", "--container-name=x"], "is for a Slurm job"),
        (["--slurm-job=1", "--pid=1"], "--pid names a process of one machine"),
        (["--slurm-job=1", "--hosts=a"], "a Slurm job has its own hosts"),
        (["--via=sh {host}", "--hosts=a", "--slurm-job=1"], "not allowed with argument"),
        (["--via=sh {host}", "--remote-command="], "--remote-command: a command is missing"),
        (["--via=sh {host}", "--remote-command='"], "is no command: No closing quotation"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, cli: Cli, arguments: list[str], why: str) -> None:
    assert why in cli("collect", f"-o{tmp_path / 'out'}", *arguments, status=ExitCode.USAGE).err
    assert not (tmp_path / "out").exists()
