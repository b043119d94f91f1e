"""`bisect` and `replay` on servers that break by a rule."""

from __future__ import annotations

import contextlib
import json
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_crashkit.cli.main import main
from sglang_crashkit.replay.requests import StoredRequest
from sglang_crashkit.replay.trials import BudgetSpentError
from unit.replay.breakable import BY_PARAMETERS, POISON, incident
from unit.support.stored import make_incident
from unit.support.waiting import LONG, wait_until

pytestmark = pytest.mark.wide


def bisect(path: Path, out: Path, command: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    status = main(["bisect", str(path), "--serve", command, "-o", str(out), "--json", *more])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if result["reproduced"] else 5)
    return result


@pytest.mark.parametrize("suspects", [None, ["0"]])
def test_a_fault_of_parameters_is_reduced_to_them(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str], suspects: list[str] | None
) -> None:
    path = incident(tmp_path / "crash", {"text": "a secret prompt", **POISON}, suspects=suspects)
    result = bisect(path, tmp_path / "out", serve(BY_PARAMETERS), capsys)
    assert result["rids"] == ["0"]
    assert (sorted(result["parameters"]), result["prompt"]) == (sorted(POISON), "nothing")
    assert result["requests"] == [
        {"text": "d", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "top_logprobs_num": 600}
    ]
    # What is reduced must not be all that is recognised.
    assert dict(result["entry"]["parameters"]) == POISON
    assert result["starts"] <= (8 if suspects else 10)
    told = (tmp_path / "out" / "reproduce.sh").read_text() + (tmp_path / "out" / "reproducer.json").read_text()
    assert "secret" not in told


@pytest.mark.parametrize(
    ("rule", "what", "reason"),
    [
        ("False", "forward", "not reproduced in 2 tries of 13 requests"),
        (BY_PARAMETERS, "another_place", "not reproduced in 2 tries of 13 requests"),
        # More than it gets where they are tried on a server of their own.
        ("served > 13", "forward", "not reproduced in 2 tries: it came back once, and not by the same requests alone"),
    ],
)
def test_what_does_not_come_back_is_said(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str], rule: str, what: str, reason: str
) -> None:
    path = incident(tmp_path / "crash", {"text": "a", "session_params": {"id": "s"}, **POISON})
    result = bisect(path, tmp_path / "out", serve(rule, what), capsys, "--tries", "2")
    assert result["left_out"] == ["request 0: its session, which no other server has"]
    assert not result["reproduced"]
    assert result["reason"].startswith(reason)


def test_several_at_once_find_the_same(tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = incident(tmp_path / "crash", {"text": "a secret prompt", **POISON})
    result = bisect(path, tmp_path / "out", serve(BY_PARAMETERS), capsys, "--jobs", "3")
    assert (result["rids"], sorted(result["parameters"]), result["prompt"]) == (["0"], sorted(POISON), "nothing")
    command = ["bisect", str(path), "--jobs", "2", "--serve", serve(BY_PARAMETERS) + " --port 1"]
    assert main(command) == 2


class ChanceTrials:
    """Fail where two requests are sent together, but not the first time that they are the only ones."""

    starts, starts_left = 0, 1

    def __init__(self, *_arguments: object) -> None:
        self._survivors: set[tuple[str, ...]] = set()
        self._missed = False

    def first_failing(self, groups: Sequence[Sequence[StoredRequest]]) -> int | None:
        return next((place for place, group in enumerate(groups) if self._fails(group)), None)

    def fails_afresh(self, group: Sequence[StoredRequest]) -> bool:
        return self._fails(group)

    def failed_afresh(self, _group: Sequence[StoredRequest]) -> bool:
        return False

    def contrast(
        self, innocent: Sequence[StoredRequest], group: Sequence[StoredRequest], *, in_order: bool = False
    ) -> str:
        return "harm" if self._fails(innocent) else "same" if self._fails(group) else "survived"

    def survived(self, _group: Sequence[StoredRequest]) -> bool:
        return True

    @contextlib.contextmanager
    def keeping(self, starts: int) -> Iterator[None]:
        self.kept = starts
        yield
        self.kept = 0

    kept = 0

    def forget_survivors(self) -> None:
        self._survivors.clear()

    def close(self) -> None:
        pass

    def _fails(self, group: Sequence[StoredRequest]) -> bool:
        texts = tuple(one.body["text"] for one in group)
        met = {"left", "right"} <= {*texts} and texts not in self._survivors
        misses = met and len(texts) == 2 and not self._missed
        self._missed = self._missed or misses
        if misses or not met:
            self._survivors.add(texts)
        return met and not misses


class RuleTrials(ChanceTrials):
    """Fail where a rule says so of the bodies that are sent together, and not of others before them."""

    rule: Callable[[list[dict[str, Any]]], bool]

    def _fails(self, group: Sequence[StoredRequest]) -> bool:
        return type(self).rule([dict(one.body) for one in group])

    def raise_refusal(self) -> None:
        pass


@pytest.fixture
def found(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what `bisect` finds of bodies by a rule; the incident has them among innocent ones."""

    def find(rule: Callable[[list[dict[str, Any]]], bool], *bodies: dict[str, Any], **more: Any) -> dict[str, Any]:
        monkeypatch.setattr(
            "sglang_crashkit.replay.bisect.Trials", type("Trials", (RuleTrials,), {"rule": staticmethod(rule)})
        )
        return bisect(incident(tmp_path / "crash", *bodies, **more), tmp_path / "out", "serve", capsys)

    return find


LEFT, RIGHT = {"text": "left"}, {"text": "right"}


@pytest.mark.parametrize(
    ("bodies", "rule", "prompt", "texts"),
    [
        ([{"text": "some xyz text"}], lambda texts: any("xyz" in one for one in texts), "content", ["xyz"]),
        ([{"text": "of many characters"}], lambda texts: any(len(one) > 17 for one in texts), "length", ["d" * 18]),
        ([LEFT, RIGHT], lambda texts: {"left", "right"} <= texts, "unknown", ["left", "right"]),
    ],
)
def test_what_of_the_prompts_it_takes_is_found(
    found: Any, bodies: list[dict[str, Any]], rule: Callable[[set[str]], bool], prompt: str, texts: list[str]
) -> None:
    result = found(lambda sent: rule({one["text"] for one in sent}), *bodies)
    assert (result["reproduced"], result["prompt"]) == (True, prompt)
    assert [body["text"] for body in result["requests"]] == texts
    entry = result["entry"]
    assert (entry is None) is (len(bodies) > 1)
    # It is of the request as it came, and has no prompt.
    assert entry is None or entry["length"] == len(bodies[0]["text"])


def test_what_each_of_two_takes_is_found(found: Any) -> None:
    bodies = [{"text": "l", "lora_path": "x", "n": 3}, {"text": "r", "return_logprob": True}]
    result = found(
        lambda sent: all(any(one.get(name) for one in sent) for name in ("lora_path", "return_logprob")), *bodies
    )
    shortest = {"text": "b", "sampling_params": {"max_new_tokens": 1}}
    assert result["requests"] == [shortest | {"lora_path": "x"}, shortest | {"return_logprob": True}]
    assert result["entry"] is None


def test_a_suspected_part_stands_for_its_request(found: Any) -> None:
    parts = [{"text": "abc", "sampling_params": {"n": 2, "max_new_tokens": 4}}] * 2
    result = found(lambda sent: any(one["text"] == "abc" for one in sent), *parts, suspects=["1", "0"])
    assert (result["rids"], result["prompt"], len(result["requests"])) == (["0"], "content", 1)
    assert result["reproduced"]


def test_an_id_is_kept_where_it_takes_that(found: Any, tmp_path: Path) -> None:
    result = found(lambda sent: any(one.get("rid") == "0" for one in sent), {"text": "a"}, suspects=["0"])
    assert (result["parameters"], result["prompt"], result["is_confirmed"]) == (["rid"], "nothing", True)
    assert result["requests"] == [{"rid": "0", "text": "c", "sampling_params": {"max_new_tokens": 1}}]
    assert '"rid": "0"' in (tmp_path / "out" / "reproduce.sh").read_text()
    assert result["entry"]["parameters"] == [["rid", "0"]]


def has(guilty: list[int], *, logprobs: bool = False) -> Callable[[list[dict[str, Any]]], bool]:
    """Return a rule: some request has these token ids in a row, and asks for logprobs."""

    def is_in(ids: list[int]) -> bool:
        return any(ids[begin : begin + len(guilty)] == guilty for begin in range(len(ids)))

    return lambda bodies: any(
        is_in(one.get("input_ids", [])) and one.get("return_logprob", False) >= logprobs for one in bodies
    )


ANSWERED = {"input_ids": [30, 100, 20], "state": "finished", "return_logprob": True}


@pytest.mark.parametrize(
    ("ids", "guilty", "logprobs"),
    [([7, 30, 40, 50], [7], True), ([7, 7, 7, 12], [7, 7, 7], False), ([600, 1, 2, 3], [600], False)],
)
@pytest.mark.parametrize("others", [(), (ANSWERED,)])
def test_a_guilty_token_is_its_own_content(
    found: Any, ids: list[int], guilty: list[int], logprobs: bool, others: tuple[dict[str, Any], ...]
) -> None:
    body = {"input_ids": ids} | ({"return_logprob": True} if logprobs else {})
    result = found(has(guilty, logprobs=logprobs), body, *others)
    assert (result["rids"], result["prompt"], result["is_confirmed"]) == (["0"], "content", True)
    assert [one["input_ids"] for one in result["requests"]] == [guilty]
    assert (result["entry"]["prompt"], result["entry"]["length"]) == ("content", len(ids))
    assert result["parameters"] == ["return_logprob"] * logprobs


def test_a_neutral_prompt_is_of_ids_that_were_answered(found: Any) -> None:
    result = found(
        lambda bodies: any(len(one.get("input_ids", ())) > 3 for one in bodies),
        {"input_ids": [30, 9, 9, 9, 9]},
        ANSWERED,
    )
    assert (result["prompt"], result["requests"][0]["input_ids"]) == ("length", [20] * 5)


def test_one_neutral_prompt_that_fails_says_nothing(found: Any) -> None:
    result = found(
        lambda bodies: any("z" in one["text"] or one["text"] in ("a", "aaa") for one in bodies), {"text": "xyz"}
    )
    assert (result["prompt"], result["requests"][0]["text"]) == ("content", "z")


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_an_entry_that_recognises_another_request_is_made_exact(found: Any, state: str) -> None:
    other = {"text": "another", "return_logprob": True, "stream": True, "state": state}
    body = {"text": "some", "return_logprob": True}
    result = found(
        lambda bodies: any(one.get("return_logprob") and not one.get("stream") for one in bodies), body, other
    )
    assert (result["prompt"], result["parameters"]) == ("nothing", ["return_logprob"])
    assert (result["entry"]["prompt"], result["entry"]["length"]) == ("content", 4)
    assert result["entry"]["rest"]


@pytest.mark.parametrize(
    ("body", "suspect", "why"),
    [
        ({"omitted": {"input_embeds": "a list"}}, "0", "its input_embeds (a list) is not kept"),
        ({"text": "ab", "truncated": {"text": 900}}, "0", "the middle of its text is not kept"),
        ({"omitted": {"text": "off"}}, "0", "its text (off) is not kept"),
        ({"text": "a", "session_params": {"id": "s"}}, "0", "its session, which no other server has"),
        ({"text": "a"}, "gone", "it is not among the requests that are kept"),
        ({"text": "a", "aborted": "2026-01-01T00:00:04Z"}, "0", "its abort, which is not repeated"),
    ],
)
def test_a_suspect_that_was_never_sent_is_a_reason(found: Any, body: dict[str, Any], suspect: str, why: str) -> None:
    result = found(lambda _bodies: False, body, suspects=[suspect, "1"])
    assert result["reason"].startswith("not reproduced in 3 tries of 1")
    assert result["reason"].endswith(f"; suspect {suspect} could not be sent as it came: {why}")


@pytest.mark.parametrize(
    ("lacking", "why"),
    [
        ({"text": "a cat", "omitted": {"image_data": "str, 9000 characters"}}, "its image_data (str, 9000 characters)"),
        ({"omitted": {"text": "withheld"}}, "its text (withheld)"),
        ({"text": "begin...end", "truncated": {"text": 900}}, "the middle of its text"),
        ({"text": "more", "session_params": {"id": "s"}}, "its session"),
    ],
)
def test_a_fault_of_parameters_is_found_in_what_is_kept(found: Any, lacking: dict[str, Any], why: str) -> None:
    def rule(bodies: list[dict[str, Any]]) -> bool:
        return any(one.get("top_logprobs_num") == 600 and "session_params" not in one for one in bodies)

    result = found(rule, {**lacking, "top_logprobs_num": 600}, suspects=["0"])
    assert (result["rids"], result["parameters"], result["prompt"]) == (["0"], ["top_logprobs_num"], "nothing")
    assert result["entry"]["parameters"] == [["top_logprobs_num", 600]]
    assert [why in one for one in result["left_out"]] == [True]


def test_the_fewest_tokens_are_asked_for_that_it_takes(found: Any) -> None:
    result = found(
        lambda bodies: any(one["sampling_params"]["max_new_tokens"] > 2 for one in bodies if one["text"] == "x"),
        {"text": "x", "n": 2},
    )
    assert result["parameters"] == ["sampling_params.max_new_tokens"]
    assert result["requests"] == [{"text": "x", "sampling_params": {"max_new_tokens": 3}}]


def test_what_stands_in_for_a_prompt_is_not_refused(found: Any) -> None:
    result = found(lambda bodies: any(one["text"] == "a" for one in bodies), {"omitted": {"text": "withheld"}})
    assert (result["reproduced"], result["prompt"], result["entry"]) == (True, "content", None)


class OrderTrials(RuleTrials):
    """Fail where the rule says so of the bodies of a group that is sent in order; at once they do once only."""

    starts_left = 30

    def first_failing(self, groups: Sequence[Sequence[StoredRequest]]) -> int | None:
        return len(groups) - 1 if self.comes_once else None

    def fails_afresh(self, group: Sequence[StoredRequest], *, in_order: bool = False) -> bool:
        self.starts_left -= 1
        assert self.starts_left >= 0
        return in_order and self._fails(group)

    def contrast(
        self, innocent: Sequence[StoredRequest], group: Sequence[StoredRequest], *, in_order: bool = False
    ) -> str:
        self.starts_left -= 1 + in_order
        return super().contrast(innocent, group, in_order=in_order)

    comes_once = False


class OtherTrials(RuleTrials):
    """Fail by the rule; what `other_rule` says so of brings another fault about."""

    other_rule: Callable[[list[dict[str, Any]]], bool]

    def contrast(
        self, innocent: Sequence[StoredRequest], group: Sequence[StoredRequest], *, in_order: bool = False
    ) -> str:
        return super().contrast(innocent, group) if self.survived(innocent) else "unfit"

    def survived(self, group: Sequence[StoredRequest]) -> bool:
        return not type(self).other_rule([dict(one.body) for one in group])

    starts_left = 30


@pytest.mark.parametrize(
    ("body", "more", "rule", "other_rule"),
    [
        # Ids that the model has not.
        (
            {"input_ids": [5, 6, 7, 8]},
            {},
            lambda ids: 7 in ids,
            lambda ids: any(number > 128 for number in ids),
        ),
        ({"input_ids": [5, 6, 7, 8]}, {"input_ids": [1, 2]}, lambda ids: 7 in ids, lambda ids: len(set(ids)) == 1),
    ],
)
def test_what_others_break_otherwise_is_proven_by_harmless_ones(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, Any],
    more: dict[str, Any],
    rule: Callable[[list[int]], bool],
    other_rule: Callable[[list[int]], bool],
) -> None:
    rules = {
        name: staticmethod(lambda sent, its=its: any(its(one.get("input_ids", [])) for one in sent))
        for name, its in (("rule", rule), ("other_rule", other_rule))
    }
    monkeypatch.setattr("sglang_crashkit.replay.bisect.Trials", type("Trials", (OtherTrials,), rules))
    answered = [more | {"state": "finished"}] if more else []
    result = bisect(incident(tmp_path / "crash", body, *answered), tmp_path / "out", "serve", capsys)
    assert (result["rids"], result["is_confirmed"], result["reason"]) == (["0"], True, "")
    assert result["entry"]["prompt"] == "content"


class FewTrials(OrderTrials):
    """Fail where the rule says so; each failure costs a start, of which there are few."""

    def first_failing(self, groups: Sequence[Sequence[StoredRequest]]) -> int | None:
        at = next((place for place, group in enumerate(groups) if self._fails(group)), None)
        if at is not None and self.starts_left <= self.kept:
            raise BudgetSpentError("no more")
        self.starts_left -= at is not None
        return at

    def fails_afresh(self, group: Sequence[StoredRequest], *, in_order: bool = False) -> bool:
        self.starts_left -= 1
        return self._fails(group)


@pytest.mark.parametrize("starts", [2, 3, 4, 5, 6, 8, 12, 30])
@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ({"sampling_params": {"max_new_tokens": 777}}, lambda one: one["sampling_params"]["max_new_tokens"] > 100),
        ({"sampling_params": {"max_new_tokens": 0}}, lambda one: one["sampling_params"]["max_new_tokens"] == 0),
        ({"sampling_params": {"max_new_tokens": 4}}, lambda one: "sec" in one["text"]),
        ({"top_logprobs_num": 600}, lambda one: one.get("top_logprobs_num") == 600),
    ],
)
def test_few_starts_make_no_fault_one_of_time(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    starts: int,
    body: dict[str, Any],
    rule: Callable[[dict[str, Any]], bool],
) -> None:
    more = {"rule": staticmethod(lambda sent: any(map(rule, sent))), "starts_left": starts}
    monkeypatch.setattr("sglang_crashkit.replay.bisect.Trials", type("Trials", (FewTrials,), more))
    path = incident(tmp_path / "crash", {"text": "a secret"} | body, suspects=["0"])
    result = bisect(path, tmp_path / "out", "serve", capsys)
    assert (result["reproduced"], result["rids"], result["reason"]) == (True, ["0"], "")
    # One for the first failure, one alone, two for the proof.
    assert result["is_confirmed"] is (starts >= 4)
    assert (result["entry"] is not None) is result["is_confirmed"]


class LuckTrials(FewTrials):
    """Fail by chance, whatever is sent: each request does with this probability."""

    probability = 0.1
    luck = random.Random(0)

    def _fails(self, group: Sequence[StoredRequest]) -> bool:
        return any(self.luck.random() < self.probability for _one in group)


def _left_then_right(bodies: list[dict[str, Any]]) -> bool:
    texts = [body["text"] for body in bodies]
    return {"left", "right"} <= {*texts} and texts.index("left") < texts.index("right")


@pytest.mark.parametrize("comes_once", [False, True])
@pytest.mark.parametrize(("starts", "most"), [(30, 2), (3, 7), (2, 14)])
def test_requests_that_are_needed_in_order_are_found(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    comes_once: bool,
    starts: int,
    most: int,
) -> None:
    afresh = 3 if comes_once else 0
    more = {"rule": staticmethod(_left_then_right), "comes_once": comes_once, "starts_left": starts + afresh}
    monkeypatch.setattr("sglang_crashkit.replay.bisect.Trials", type("Trials", (OrderTrials,), more))
    # What was answered is sent last, where all are sent at once.
    path = incident(tmp_path / "crash", {"text": "left", "state": "finished"}, {"text": "right"})
    result = bisect(path, tmp_path / "out", "serve", capsys)
    assert (result["in_order"], result["is_confirmed"], result["reason"]) == (True, starts == 30, "")
    assert result["rids"][:2] == ["0", "1"]
    assert len(result["rids"]) <= most
    assert result["entry"] is None
    assert " &" not in (tmp_path / "out" / "reproduce.sh").read_text()


def test_what_no_order_brings_back_depends_on_time_or_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"rule": staticmethod(lambda _bodies: False), "comes_once": True}
    monkeypatch.setattr("sglang_crashkit.replay.bisect.Trials", type("Trials", (OrderTrials,), more))
    result = bisect(incident(tmp_path / "crash", {"text": "a"}), tmp_path / "out", "serve", capsys)
    assert not result["reproduced"]
    assert result["reason"].endswith("it depends on time or on load")


@pytest.mark.parametrize("probability", [0.02, 0.1, 0.3])
def test_what_comes_by_chance_is_no_requests_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, probability: float
) -> None:
    path, found = incident(tmp_path / "crash", {"text": "a"}), []
    for seed in range(50):
        more = {"probability": probability, "luck": random.Random(seed)}
        monkeypatch.setattr("sglang_crashkit.replay.bisect.Trials", type("Trials", (LuckTrials,), more))
        found.append(bisect(path, tmp_path / f"out-{seed}", "serve", capsys))
    # Chance may look like anything, but seldom.
    assert sum(one["reproduced"] for one in found) <= 1
    assert not any(one["entry"] for one in found)


@pytest.mark.parametrize("number", [0, 1])
def test_what_asks_for_too_few_tokens_is_known_by_that(found: Any, number: int) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": number}}
    result = found(lambda sent: any(one["sampling_params"]["max_new_tokens"] == number for one in sent), body)
    assert (result["rids"], result["prompt"], result["is_confirmed"]) == (["0"], "nothing", True)
    assert result["entry"]["parameters"] == [["sampling_params.max_new_tokens", number]]


def test_an_empty_prompt_may_have_nothing_to_do_with_it(found: Any) -> None:
    result = found(lambda sent: any(one.get("top_k") == 9 for one in sent), {"text": "", "top_k": 9})
    assert (result["parameters"], result["prompt"]) == (["top_k"], "nothing")
    assert result["entry"]["prompt"] == "any"
    result = found(lambda sent: any(not one["text"] for one in sent), {"text": ""})
    assert (result["prompt"], result["requests"][0]["text"], result["is_confirmed"]) == ("content", "", True)


def test_an_entry_stays_wide_where_the_same_request_came_again(found: Any) -> None:
    body = {"text": "some", "return_logprob": True}
    result = found(lambda bodies: any(one.get("return_logprob") for one in bodies), body, body)
    assert result["entry"]["prompt"] == "any"


def test_two_that_missed_each_other_once_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_crashkit.replay.bisect.Trials", ChanceTrials)
    path = incident(tmp_path / "crash", {"text": "left"}, {"text": "right"})
    result = bisect(path, tmp_path / "out", "serve", capsys)
    assert (result["rids"], [body["text"] for body in result["requests"]]) == (["0", "1"], ["left", "right"])


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_keeps_what_is_known_and_leaves_no_server(tmp_path: Path, serve: Any, jobs: int) -> None:
    path, out = incident(tmp_path / "crash", {"text": "a", **POISON}), tmp_path / "out"
    words = [sys.executable, "-m", "sglang_crashkit", "bisect", str(path), "--serve", serve(BY_PARAMETERS)]
    with subprocess.Popen([*words, "-o", str(out), "--jobs", str(jobs)]) as popen:
        wait_until((out / "trials.json").exists, "something is known")
        popen.send_signal(signal.SIGINT)
        assert popen.wait(LONG) != 0
    assert json.loads((out / "trials.json").read_text())["trials"]
    found = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True, timeout=LONG)
    assert str(out) not in found.stdout


def test_an_incident_without_requests_leaves_no_folder(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "bisected"
    path = make_incident(tmp_path)
    assert main(["bisect", str(path), "--serve", serve("False"), "-o", str(folder)]) == 3
    assert not folder.exists()


def test_a_server_that_fails_unasked_is_an_error(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = incident(tmp_path / "crash", {"text": "a"})
    command = shlex.join([sys.executable, "-c", "raise SystemExit(1)"])
    assert main(["bisect", str(path), "--serve", command, "-o", str(tmp_path / "out")]) == 1
    assert "the server ended before it was ready" in capsys.readouterr().err


def test_the_same_command_again_goes_on_where_it_was_stopped(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = incident(tmp_path / "crash", {"text": "a secret prompt", **POISON})
    stopped = bisect(path, tmp_path / "out", serve(BY_PARAMETERS), capsys, "--starts", "4")
    assert (stopped["starts"], stopped["rids"]) == (4, ["0"])
    # What an earlier release wrote is gone on with, too.
    assert json.loads((tmp_path / "out" / "trials.json").read_text()).keys() == {"incident", "command", "trials"}
    result = bisect(path, tmp_path / "out", serve(BY_PARAMETERS), capsys)
    assert (sorted(result["parameters"]), result["prompt"]) == (sorted(POISON), "nothing")
    assert result["starts"] < 9


def test_one_whose_client_had_gone_is_sent_and_named(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = {"state": "dropped", "ended": "2026-01-01T00:00:09Z", "aborted": "2026-01-01T00:00:04.000000Z"}
    path = incident(tmp_path / "crash", {"text": "a", "session_params": {"id": "s"}, **POISON, **gone}, suspects=["0"])
    command = ["replay", str(path), "--suspects", "--max-gap", "0", "--serve", serve(BY_PARAMETERS)]
    assert main([*command, "-o", str(tmp_path / "replay")]) == 5
    told = capsys.readouterr()
    assert "the same fault: It raised." in told.out
    assert "request 0: it had been given up; it is sent, too, and waited for" in told.err
    assert "request 0: it goes on with a session" in told.err
    assert bisect(path, tmp_path / "out", serve(BY_PARAMETERS), capsys)["rids"] == ["0"]
