from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_crashkit.errors import CrashkitError
from sglang_crashkit.incident.quarantine import (
    EXPIRY_SECS,
    FILE,
    MAX_ENTRIES,
    Digest,
    Entry,
    Index,
    Origin,
    Prompt,
    add_entry,
    change_entries,
    clear_suspects,
    entry_of,
    entry_of_all,
    note_seen,
    note_suspects,
    read_entries,
)

NOW = 1_700_000_000.0
BODY = {
    "text": "a secret",
    "return_logprob": True,
    "top_logprobs_num": 600,
    "sampling_params": {"top_k": 5, "stop": ["a", "b"]},
}
STOP = ("sampling_params.stop",)
NAMES = ("return_logprob", "top_logprobs_num")
ORIGIN = Origin("It raised.", "1a2b3c4d", "/model", "0.5.23", "fault")


def made(names: tuple[str, ...] = NAMES, prompt: Prompt = "any", body: dict[str, Any] | None = None) -> Entry:
    return entry_of(body or BODY, names, prompt, ORIGIN, NOW)


def recognises(entry: Entry, body: dict[str, Any]) -> bool:
    return Index([made(("nothing",), "any", {"nothing": "alike"}), entry]).find(body.get) is entry


@pytest.mark.parametrize(
    ("entry", "other", "is_found"),
    [
        (made(), {"text": "another"}, True),
        (made(), {"top_logprobs_num": 5}, False),
        (made(), {"top_logprobs_num": [600]}, False),
        (made(("sampling_params.top_k",)), {}, True),
        (made(("sampling_params.top_k",)), {"sampling_params": {}}, False),
        (made(NAMES, "length"), {"text": "another1"}, True),
        (made(NAMES, "length"), {"text": "of another length"}, False),
        (made(NAMES, "length"), {"text": None}, False),
        (made((), "content"), {"return_logprob": False}, True),
        (made((), "content"), {"text": "b secret"}, False),
        (made((), "content", {"input_ids": [1, 2]}), {"text": None, "input_ids": [1, 2]}, True),
        (made(STOP), {}, True),
        (made(STOP), {"sampling_params": {"top_k": 5, "stop": ["a", "c"]}}, False),
        (made(STOP), {"sampling_params": {"top_k": 5, "stop": "ab"}}, False),
        (made(STOP), {"sampling_params": {"top_k": 5, "stop": [object(), "b"]}}, False),
        (made(("top_logprobs_num", *STOP)), {}, True),
        (made(("top_logprobs_num", *STOP)), {"sampling_params": {"stop": ["a"]}}, False),
        (made(("custom",), "any", {"custom": {"a": [1], "b": 2}}), {"custom": {"b": 2, "a": [1]}}, True),
        (made(("custom",), "any", {"custom": {"a": [1], "b": 2}}), {"custom": {"b": 2, "a": [3]}}, False),
        (made(("schema",), "any", {"schema": "x" * 9000}), {"schema": "x" * 9000}, True),
        (made(("schema",), "any", {"schema": "x" * 9000}), {"schema": "x" * 8999 + "y"}, False),
        (made(("x",), "any", {"x": float("nan")}), {"x": float("nan")}, True),
        (made(("x",), "any", {"x": "NaN"}), {"x": float("nan")}, True),
        (made(("x",), "any", {"x": float("inf")}), {"x": float("-inf")}, False),
    ],
)
def test_a_request_is_recognised_by_what_counts(entry: Entry, other: dict[str, Any], is_found: bool) -> None:
    assert recognises(entry, BODY | other) is is_found


@pytest.mark.parametrize(("names", "prompt"), [((), "any"), ((), "length"), (("not_there",), "any")])
def test_what_would_recognise_others_requests_is_refused(names: tuple[str, ...], prompt: Prompt) -> None:
    with pytest.raises(CrashkitError, match=r"recognises no request|refuse others' requests"):
        made(names, prompt)


def test_entries_are_kept_without_a_prompt_until_they_expire(tmp_path: Path) -> None:
    entries = [made(), made(STOP), made(NAMES, "content"), made(("text",), "any", {"text": "a secret" * 99})]
    change_entries(tmp_path, lambda _none: entries)
    assert read_entries(tmp_path, NOW + EXPIRY_SECS - 1) == entries
    assert read_entries(tmp_path, NOW + EXPIRY_SECS + 1) == []
    assert "secret" not in (tmp_path / FILE).read_text()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_one_that_is_there_already_keeps_since_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW + 5)
    add_entry(tmp_path, made())
    later = entry_of(BODY, NAMES, "any", ORIGIN, NOW + 5)
    add_entry(tmp_path, later)
    (entry,) = read_entries(tmp_path)
    assert (entry.first, entry.last) == (NOW, NOW + 5)


def test_no_more_than_the_latest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    entries = [entry_of({"n": n}, ("n",), "any", ORIGIN, NOW + n / 1e4) for n in range(MAX_ENTRIES + 5)]
    change_entries(tmp_path, lambda _none: entries)
    assert read_entries(tmp_path) == entries[5:]


def test_a_file_never_grows_beyond_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    wordy = replace(ORIGIN, reason="\U0001f525" * 400)
    entries = [entry_of({"n": n}, ("n",), "any", wordy, NOW + n / 1e4) for n in range(MAX_ENTRIES)]
    change_entries(tmp_path, lambda _none: entries)
    kept = read_entries(tmp_path)
    assert MAX_ENTRIES // 2 < len(kept) < MAX_ENTRIES
    assert kept == entries[-len(kept) :]


def test_a_crash_folder_may_be_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    add_entry(tmp_path / "link", made())
    assert read_entries(tmp_path / "real") == read_entries(tmp_path / "link") == [made()]


def test_who_changes_it_waits_for_another(tmp_path: Path) -> None:
    def change(_entries: list[Entry]) -> list[Entry]:
        with pytest.raises(CrashkitError, match=r"is locked by another process\n  next: the same command again"):
            change_entries(tmp_path, lambda entries: entries, 0.0)
        return []

    change_entries(tmp_path, change)


def test_when_one_came_last_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    add_entry(tmp_path, made())
    note_seen(tmp_path, {made().key: NOW + 9, "gone": NOW + 9})
    assert [(one.first, one.last) for one in read_entries(tmp_path)] == [(NOW, NOW + 9)]
    note_seen(tmp_path, {made().key: NOW + 5})
    assert read_entries(tmp_path)[0].last == NOW + 9


@pytest.mark.parametrize("value", [["a", "\u00e9\n"], ["a", 1], [], [["a"]], [None, 1.5], {"b": 1, "a": ["x"]}])
def test_a_value_with_parts_is_known_by_its_json(value: Any) -> None:
    ((_name, digest),) = made(("x",), "any", {"x": value}).parameters
    assert isinstance(digest, Digest)
    assert digest.digest == hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


IDS = list(range(4096))


@pytest.mark.parametrize("place", [0, 2000, 4095])
def test_a_prompt_of_the_same_length_is_another(place: int) -> None:
    entry = entry_of_all({"input_ids": IDS}, ORIGIN, NOW)
    assert entry is not None
    other = [*IDS[:place], 7000, *IDS[place + 1 :]]
    # An entry that an earlier release wrote has no sample.
    for one in (entry, replace(entry, sample=None)):
        index = Index([one])
        assert index.find({"input_ids": IDS}.get, lambda: entry.rest) is one
        assert index.find({"input_ids": other}.get, lambda: entry.rest) is None


def test_a_long_prompt_that_is_another_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of_all({"input_ids": IDS}, ORIGIN, NOW)
    assert entry is not None
    monkeypatch.setattr("sglang_crashkit.incident.quarantine.digest_of", None)
    assert Index([entry]).find({"input_ids": [number + 1 for number in IDS]}.get) is None


def suspect(incident: str, fault: str = "fault", text: str = "a secret", model: str = "/model") -> Entry:
    origin = replace(ORIGIN, incident=incident, fault=fault, model=model)
    made = entry_of_all(BODY | {"text": text}, origin, NOW, "suspected")
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("second", "is_alone", "level"),
    [
        (suspect("2"), True, "proven"),
        (suspect("2"), False, "suspected"),
        (suspect("2", fault="another"), True, "suspected"),
    ],
)
def test_the_only_request_of_a_second_fatal_step_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: Entry, is_alone: bool, level: str
) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    others = [suspect("1"), suspect("1", text="another")]
    note_suspects(tmp_path, others, is_alone=True, lock_secs=1.0)
    assert {entry.level for entry in read_entries(tmp_path)} == {"suspected"}
    note_suspects(tmp_path, [second], is_alone=is_alone, lock_secs=1.0)
    found = {entry.key: entry for entry in read_entries(tmp_path)}
    assert [found[one.key].level for one in others] == [level, "suspected"]
    assert found[second.key].origin.incident == "2"
    clear_suspects(tmp_path, found.keys())
    assert len(read_entries(tmp_path)) == (level == "proven")


def test_what_another_model_died_of_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    for number in ("1", "2"):
        note_suspects(tmp_path, [suspect(number, model=number)], is_alone=True, lock_secs=1.0)
    assert [entry.level for entry in read_entries(tmp_path)] == ["suspected", "suspected"]


def test_suspects_give_way_to_what_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    proven = [entry_of({"n": n}, ("n",), "any", ORIGIN, NOW - 5) for n in range(MAX_ENTRIES)]
    change_entries(tmp_path, lambda _none: [suspect("1"), *proven])
    assert {entry.level for entry in read_entries(tmp_path)} == {"proven"}


@pytest.mark.parametrize("other", [{"n": 2}, {"sampling_params": {"top_k": 6}}, {"return_logprob": None}])
def test_a_whole_request_is_no_other_with_the_same_prompt(other: dict[str, Any]) -> None:
    entry = suspect("1")
    index = Index([entry])
    assert index.find(BODY.get, lambda: entry.rest) is entry
    assert index.find((BODY | other).get, lambda: "another") is None


def test_a_huge_file_or_somebody_elses_counts_for_nothing(tmp_path: Path) -> None:
    change_entries(tmp_path, lambda _none: [made()])
    (tmp_path / FILE).chmod(0o666)
    with pytest.raises(CrashkitError, match="nobody else may write"):
        read_entries(tmp_path, NOW)
    (tmp_path / FILE).chmod(0o600)
    os.truncate(tmp_path / FILE, 5 << 20)
    with pytest.raises(CrashkitError, match="more than"):
        read_entries(tmp_path, NOW)
    (tmp_path / FILE).rename(tmp_path / "elsewhere")
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CrashkitError, match="cannot be read"):
        read_entries(tmp_path, NOW)
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(CrashkitError, match="is no file"):
        read_entries(tmp_path, NOW)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
ANYTHING = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner))
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "parameters": st.lists(st.lists(SCALARS, max_size=3), max_size=3) | ANYTHING,
        "prompt": st.sampled_from(["any", "length", "content"]) | ANYTHING,
        "level": st.sampled_from(["proven", "suspected"]) | ANYTHING,
        "origin": st.just(asdict(ORIGIN)) | ANYTHING,
        "length": st.just(5) | ANYTHING,
        **dict.fromkeys(("digest", "rest"), st.sampled_from(["", "0" * 64]) | ANYTHING),
        **{name: st.just(NOW) | ANYTHING for name in ("first", "last", "sample")},
    },
)


@given(
    st.binary()
    | ANYTHING.map(lambda told: json.dumps(told).encode())
    | st.lists(FIELDS).map(lambda entries: json.dumps({"schema_version": 1, "entries": entries}).encode())
)
def test_whatever_the_file_holds_no_ordinary_request_is_recognised(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("crash")
    (folder / FILE).write_bytes(data)
    (folder / FILE).chmod(0o600)
    entries = []
    with contextlib.suppress(CrashkitError):
        entries = read_entries(folder, NOW)
    ordinary = {"text": "Hello", "sampling_params": {"max_new_tokens": 16}, "stream": False}
    assert Index(entries).find(ordinary.get, lambda: "f" * 64) is None


@given(st.text(max_size=8), st.text(max_size=8))
def test_an_entry_counts_for_its_own_model_and_release_alone(model: str, release: str) -> None:
    entry = replace(made(), origin=replace(ORIGIN, model=model, release=release))
    assert entry.counts_for("/model", "0.5.23+crashkit.1") is ((model, release) == ("/model", "0.5.23"))
