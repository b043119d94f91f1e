"""Upstream's names are in every release once it is patched, and what they hook into calls them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator

import pytest

pytestmark = pytest.mark.wheels

FLAGS = {
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "EnvBool(True)",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "EnvBool(True)",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "EnvFloat(60.0)",
    "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION": "EnvBool(False)",
}
DIAGNOSTICS = {
    "_resolve_cuda_coredump_pipe_path",
    "_is_sglang_scheduler_process",
    "collect_scheduler_processes",
    "pyspy_dump_schedulers",
    "trigger_cuda_user_coredump",
}
Parse = Callable[[str], ast.Module]


@pytest.fixture(scope="module")
def parse(read_patched) -> Parse:
    """Parse a file of the release as it is once patched."""

    @functools.cache
    def parse_file(path: str) -> ast.Module:
        patched = read_patched(path)
        assert patched is not None, path
        return ast.parse(patched)

    return parse_file


def names_in(body: list[ast.stmt]) -> set[str]:
    """Return what a module or a class body defines or imports."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def find(tree: ast.AST, name: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    """Return the only class or function of this name."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    (found,) = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name]
    return found


def decorators(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def calls_in(tree: ast.AST) -> list[str]:
    """Return the calls in `tree` in order of lines."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]


def test_the_module_of_the_diagnostics_is_there(parse: Parse) -> None:
    tree = parse("srt/utils/cudacore_pyspy_dump_utils.py")
    names = names_in(tree.body)
    assert names >= DIAGNOSTICS or names == {"stand_in_for"}
    assert "pyspy_dump_schedulers" in names_in(parse("srt/utils/common.py").body)


def test_each_flag_is_an_attribute_of_envs(parse: Parse) -> None:
    envs = find(parse("srt/environ.py"), "Envs")
    given = {
        ast.unparse(node.targets[0]): ast.unparse(node.value) for node in envs.body if isinstance(node, ast.Assign)
    }
    assert given.items() >= FLAGS.items()


def test_resolving_the_arguments_sets_the_core_dump_variables(parse: Parse) -> None:
    tree = parse("srt/server_args.py")
    assert "_handle_crash_dump_env" in names_in(find(tree, "ServerArgs").body)
    calls = calls_in(tree)
    if "self._handle_crash_dump_env()" not in calls:
        assert decorators(find(parse("srt/arg_groups/serving_hook.py"), "handle_crash_dump_env"))
        calls = calls_in(parse("srt/arg_groups/pipeline.py"))
        assert [call for call in calls if "handle_crash_dump_env" in call]


def test_a_watchdog_tells_the_kit_and_acts_as_before(parse: Parse) -> None:
    tree = parse("srt/utils/watchdog.py")
    calls = calls_in(find(find(tree, "WatchdogRaw"), "_watchdog_once"))
    at = calls.index("on_watchdog_timeout(self)")
    assert calls[at + 1] == "pyspy_dump_schedulers()"
    assert "pyspy_dump_schedulers" in names_in(tree.body)
    upstream = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SubprocessWatchdog"]
    assert all("crashkit" not in ast.unparse(node) for node in upstream)


def test_every_way_to_a_crash_saves_the_requests(parse: Parse) -> None:
    tree = parse("srt/managers/tokenizer_manager.py")
    (decorator,) = decorators(find(tree, "dump_requests_before_crash"))
    assert decorator == "on_crash_dump"
    for name in ("running_phase_sigquit_handler", "print_exception_wrapper", "sigterm_watchdog"):
        assert [call for call in calls_in(find(tree, name)) if call.endswith("dump_requests_before_crash()")], name
    in_watchdog = calls_in(find(tree, "sigterm_watchdog"))
    dumps = [at for at, call in enumerate(in_watchdog) if call == "self.dump_requests_before_crash()"]
    # The second one is that of an orderly exit.
    assert len(dumps) == 1 or in_watchdog[dumps[1] - 1] == "on_orderly_exit(self)"


def test_the_router_of_several_tokenizers_can_save_requests(parse: Parse) -> None:
    tree = parse("srt/managers/multi_tokenizer_mixin.py")
    assert decorators(find(tree, "MultiTokenizerRouter")) == ["on_tokenizer_router"]
    assert "kill_process_tree" in names_in(tree.body)
    assert "func.__self__.dump_requests_before_crash()" in calls_in(find(tree, "print_exception_wrapper"))


def attributes_in(tree: ast.AST) -> set[str]:
    """Return what `tree` assigns to ``self``, and the fields of a dataclass."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [target for node in nodes for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    own = {ast.unparse(target).removeprefix("self.") for target in targets}
    return {name for name in own if name.isidentifier()}


BACKENDS = ("mooncake", "nixl", "mori")
CONN = "srt/disaggregation/{}/conn.py"


def test_both_sides_of_a_pair_watch_by_tables_that_exist(parse: Parse) -> None:
    common = parse(CONN.format("common"))
    assert "transfer_infos" in attributes_in(find(common, "CommonKVManager"))
    assert "bootstrap_addr" in attributes_in(find(common, "CommonKVReceiver"))
    for backend in BACKENDS:
        tree = parse(CONN.format(backend))
        assert attributes_in(find(tree, "TransferInfo")) >= {"endpoint", "dst_port"}, backend
        # One that does not name a failed request's reason ends the rank: NIXL before 0.5.12.
        assert {"failure_records", "init_time"} <= attributes_in(common) | attributes_in(tree) or backend == "nixl"
    assert "failed_sessions" in attributes_in(parse(CONN.format("mooncake")))
    fake = attributes_in(parse(CONN.format("fake")))
    assert "bootstrap_addr" not in fake, "a warm-up would be taken for a request"


def test_the_watch_begins_with_the_queue(parse: Parse) -> None:
    prefill, decode = parse("srt/disaggregation/prefill.py"), parse("srt/disaggregation/decode.py")
    for tree, name, hook, attributes in (
        (prefill, "PrefillBootstrapQueue", "watch_decode_servers(self)", {"queue", "kv_manager", "scheduler"}),
        (decode, "DecodePreallocQueue", "watch_prefill_servers(self)", {"queue", "kv_manager", "transfer_queue"}),
    ):
        begin = find(find(tree, name), "__init__")
        assert attributes_in(begin) >= attributes
        calls = calls_in(begin)
        assert calls[calls.index(hook) - 1] == "self._init_kv_manager()"
    assert "disagg_kv_sender" in ast.unparse(find(prefill, "PrefillBootstrapQueue"))
    assert attributes_in(find(decode, "DecodeRequest")) >= {"req", "kv_receiver"}
    assert "queue" in attributes_in(find(find(decode, "DecodeTransferQueue"), "__init__"))
    scheduler = attributes_in(parse("srt/managers/scheduler.py"))
    assert scheduler >= {"waiting_queue", "disagg_prefill_inflight_queue"}


def test_a_manager_gives_a_server_up_by_methods_that_the_kit_wraps(parse: Parse) -> None:
    """They are looked up at each call, so that what the kit sets on the object is what is called."""
    trees = {backend: parse(CONN.format(backend)) for backend in ("common", *BACKENDS)}
    functions = {
        backend: {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for backend, tree in trees.items()
    }
    for backend in ("mooncake", "nixl"):
        its = functions["common"] | functions[backend]
        assert [each.arg for each in its["_handle_node_failure"].args.args] == ["self", "failed_bootstrap_addr"]
        assert "self._handle_node_failure(bootstrap_addr)" in calls_in(its["heartbeat_checker"])
    for backend in BACKENDS:
        its = functions["common"] | functions[backend]
        assert [each.arg for each in its["update_status"].args.args] == ["self", "bootstrap_room", "status"], backend
    # Whatever a worker fails has its reason recorded before.
    calls = [
        call for call in calls_in(trees["mooncake"]) if call.startswith(("self.record_failure", "self.conclude_f"))
    ]
    assert any("Failed to send kv chunk" in call for call in calls)
    kinds = find(parse("srt/disaggregation/base/conn.py"), "KVPoll")
    assert "Failed = 0" in [ast.unparse(line) for line in kinds.body]


def test_every_worker_has_stack_hooks_after_title_and_faulthandler(parse: Parse) -> None:
    assert decorators(find(parse("srt/utils/common.py"), "configure_logger"))[0] == "on_configure_logger"
    for module in ("scheduler", "data_parallel_controller", "detokenizer_manager"):
        calls = [call.partition("(")[0] for call in calls_in(parse(f"srt/managers/{module}.py"))]
        at = calls.index("configure_logger")
        assert "setproctitle.setproctitle" in calls[:at], module
        assert "faulthandler.enable" not in calls[at:], module
    tree = parse("srt/managers/multi_tokenizer_mixin.py")
    assert decorators(find(tree, "TokenizerWorker")) == ["on_tokenizer_worker"]


#: The event loops of the scheduler, by the files that upstream has them in.
EVENT_LOOPS = {
    "srt/managers/scheduler.py": {"event_loop_normal", "event_loop_overlap"},
    "srt/managers/scheduler_pp_mixin.py": {
        "event_loop_pp",
        "event_loop_pp_disagg_prefill",
        "event_loop_pp_disagg_decode",
    },
    "srt/disaggregation/prefill.py": {"event_loop_normal_disagg_prefill", "event_loop_overlap_disagg_prefill"},
    "srt/disaggregation/decode.py": {"event_loop_normal_disagg_decode", "event_loop_overlap_disagg_decode"},
    "srt/multiplex/multiplexing_mixin.py": {"event_loop_pdmux"},
}


def test_every_event_loop_beats_in_every_round(parse: Parse) -> None:
    scheduler = find(parse("srt/managers/scheduler.py"), "Scheduler")
    first = find(scheduler, "process_input_requests").body[0]
    assert ast.unparse(first) == "on_iteration(self, recv_reqs)"
    if "def ingest_requests" in ast.unparse(scheduler):
        assert [node for node in find(scheduler, "ingest_requests").body if takes_in_requests(node)]
    for path, loops in EVENT_LOOPS.items():
        tree = parse(path)
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and "event_loop_" in node.name]
        assert {node.name for node in found if any(isinstance(child, ast.While) for child in ast.walk(node))} == loops
        for name in loops:
            (forever,) = [node for node in find(tree, name).body if isinstance(node, ast.While)]
            # Not behind a condition: the round that receives nothing, and that of a paused engine, beat too.
            assert [node for node in unconditional(forever.body) if takes_in_requests(node)], (path, name)


def test_every_batch_is_counted(parse: Parse) -> None:
    calls = [ast.unparse(node) for node in find(parse("srt/managers/scheduler.py"), "run_batch").body]
    assert calls[calls.index("self.forward_ct += 1") + 1] == "on_batch(self, batch)"


def test_the_batch_at_work_is_where_it_is_looked_for(parse: Parse) -> None:
    scheduler = find(parse("srt/managers/scheduler.py"), "Scheduler")
    for name in ("event_loop_normal", "event_loop_overlap"):
        lines = ast.unparse(find(scheduler, name)).splitlines()
        assert {"self.cur_batch = batch", "self.cur_batch_for_debug = batch"} & {line.strip() for line in lines}, name


def unconditional(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that are reached in every round, those within ``with`` and ``for`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.With | ast.For):
            yield from unconditional(node.body)


def takes_in_requests(node: ast.stmt) -> bool:
    own = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    return own is not None and ast.unparse(own).startswith(("self.process_input_requests(", "self.ingest_requests("))
