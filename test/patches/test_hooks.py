"""The file that hands out the kit's functions: the kit's own where it is there, and SGLang as published where not."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

import sglang_crashkit
from patches.hook_table import HOOK_FILE
from sglang_crashkit.installer.patches import PatchTree, apply_patch, find_patch_root

REF = PatchTree.load(find_patch_root()).resolve("0.5.9")[HOOK_FILE]
TEXT = apply_patch(None, REF.read())
#: Says, as the last line, what the program found.
TELL = "import json; print(json.dumps(found))"
SWITCH = "SGLANG_CRASHKIT_ENABLED"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages with no more of SGLang than this file, and no kit."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    for folder in ("sglang", "sglang/srt"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "sglang" / HOOK_FILE).write_bytes(TEXT)
    (tmp_path / "sglang-0.5.23+crashkit.0.1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23+crashkit.0.1.0\n"
    (tmp_path / "sglang-0.5.23+crashkit.0.1.0.dist-info" / "METADATA").write_text(metadata)
    return tmp_path


def put_kit(site: Path, modules: dict[str, str]) -> None:
    """Install a kit with these modules."""
    (site / "sglang_crashkit-0.1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: sglang-crashkit\nVersion: 0.1.0\n"
    (site / "sglang_crashkit-0.1.0.dist-info" / "METADATA").write_text(metadata)
    for name, text in {"": "", "srt/__init__": "", "srt/managers/__init__": "", **modules}.items():
        file = site / "sglang_crashkit" / f"{name or '__init__'}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def ask(site: Path, program: str, *arguments: str, **environ: str) -> tuple[dict[str, object], str]:
    """Run `program` where only `site` is installed; return the `found` that it made, and its log."""
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", f"found = {{}}\n{textwrap.dedent(program)}\n{TELL}", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(site), "PATH": os.environ["PATH"], **environ},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


WITHOUT = """
    import os, threading
    from sglang.srt.crashkit import on_kill_process_tree, on_engine_launch, on_scheduler_groups, open_crash_dump
    from sglang.srt.crashkit import provide_fail_fast_watcher, on_tokenizer_router
    from sglang.srt.crashkit import set_crash_dump_env, still_holding_resources
    class Router: ...
    found["decorator"] = on_kill_process_tree(os.kill) is os.kill and on_tokenizer_router(Router) is Router
    found["event"] = on_engine_launch(object(), more=1)
    found["value"] = on_scheduler_groups(object(), ["ready"])
    provide_fail_fast_watcher()([("server", None)]).set()
    class Arguments:
        _handle_crash_dump_env = set_crash_dump_env
    found["method"] = Arguments()._handle_crash_dump_env()
    with open_crash_dump(object(), os.environ["DUMP"], {}) as file:
        file.write(b"requests")
    try:
        still_holding_resources(1)
    except RuntimeError as error:
        found["absent"] = str(error)
"""


def test_without_the_kit_sglang_does_what_it_does_as_published(site):
    found, log = ask(site, WITHOUT, DUMP=str(site / "dump.pkl"))
    assert found == {
        "decorator": True,
        "event": None,
        "value": ["ready"],
        "method": None,
        "absent": "this function is sglang-crashkit's, which is not there; next: pip install sglang-crashkit",
    }
    assert (site / "dump.pkl").read_bytes() == b"requests"
    assert log == (
        "crash kit: sglang-crashkit is not installed (ModuleNotFoundError(\"No module named 'sglang_crashkit'\")): "
        "SGLang runs as published, and a crash leaves no incident; next: pip install sglang-crashkit, "
        "or, to do without the kit, pip install --force-reinstall --no-deps sglang==0.5.23\n"
    )


def test_one_process_of_a_server_reports_a_missing_kit(site):
    program = """
        import subprocess, sys
        import sglang.srt.crashkit as hooks
        hooks.on_batch, hooks.on_iteration
        child = [sys.executable, "-S", "-B", "-c", "from sglang.srt.crashkit import on_batch; on_batch(1, 2)"]
        found["child"] = subprocess.run(child, capture_output=True, text=True, check=True, timeout=60).stderr
    """
    found, log = ask(site, program)
    assert found == {"child": ""}
    assert log.count("crash kit:") == 1


def test_a_missing_kit_that_is_switched_off_is_not_reported(site):
    assert ask(site, "from sglang.srt.crashkit import on_batch", **{SWITCH: "0"}) == ({}, "")


@pytest.mark.parametrize(
    ("arming", "why"),
    [
        ("1 / 0", "ZeroDivisionError('division by zero')"),
        ("raise SystemExit(3)", "SystemExit(3)"),
        ("def", "SyntaxError("),
        ("import gone", "ModuleNotFoundError(\"No module named 'gone'\")"),
        ("", "AttributeError("),
    ],
)
def test_a_kit_that_does_not_import_is_switched_off_whole(site, arming, why):
    beat = "def on_batch(*args): raise RuntimeError\ndef on_iteration(*args): raise RuntimeError\n"
    put_kit(site, {"srt/stack_hooks": arming, "srt/managers/scheduler_heartbeat": beat})
    program = """
        import os
        from sglang.srt.crashkit import on_batch, on_configure_logger, on_iteration
        found["logger"] = on_configure_logger(os.kill) is os.kill
        found["before"] = on_batch.__module__
        found["after"] = on_iteration(1, 2)
        found["switch"] = os.environ["SGLANG_CRASHKIT_ENABLED"]
    """
    found, log = ask(site, program)
    before = "sglang_crashkit.srt.managers.scheduler_heartbeat"
    assert found == {"logger": True, "before": before, "after": None, "switch": "0"}
    assert log.startswith(f"crash kit: sglang-crashkit does not work ({why}")
    assert log.count("crash kit:") == 1
    assert "; next: pip install --force-reinstall sglang-crashkit, or" in log


def test_a_hook_imports_the_kits_own_module_only(site):
    put_kit(site, {"srt/stack_hooks": "", "srt/managers/scheduler_heartbeat": "def on_batch(): ...\n"})
    program = """
        import sys
        from sglang.srt.crashkit import on_batch
        import sglang_crashkit.srt.managers.scheduler_heartbeat as beat
        found["same"] = on_batch is beat.on_batch
        found["modules"] = sorted(name for name in sys.modules if name.startswith("sglang_crashkit"))
    """
    found, log = ask(site, program)
    assert log == ""
    assert found["same"] is True
    assert "sglang_crashkit.srt.stack_hooks" not in found["modules"]


def test_a_name_that_is_no_hook_is_an_error(site):
    program = """
        try:
            from sglang.srt.crashkit import on_nothing
        except ImportError as error:
            found["error"] = str(error)
    """
    found, log = ask(site, program)
    assert "cannot import name 'on_nothing'" in found["error"]
    assert log == ""


#: What is in the place of a hook without the kit, by how SGLang's files use it.
BY_USE = {
    "decorator": {"_undecorated"},
    "statement": {"_nothing"},
    "value": {"_unchanged"},
    "with": {"_opened"},
    "name": {"_nothing", "_absent"},
    "factory": {"_no_watcher"},
}


def _names(node: ast.Assign, name: str) -> bool:
    return [ast.unparse(target) for target in node.targets] == [name]


def uses(tree: ast.Module, hooks: set[str]) -> dict[str, str]:
    """Return how `tree` uses each of `hooks`."""

    def called(node: ast.AST | None) -> str:
        return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""

    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found |= {each.id: "decorator" for each in node.decorator_list if isinstance(each, ast.Name)}
        elif isinstance(node, ast.Expr):
            found[called(node.value)] = "statement"
        elif isinstance(node, ast.withitem):
            found[called(node.context_expr)] = "with"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            found[node.value.id] = "name"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and called(node.value) in hooks:
            args = [ast.unparse(each) for each in node.value.args]
            is_kept = bool(args) and _names(node, args[-1])
            found[called(node.value)] = "value" if is_kept else "factory"
    return {name: use for name, use in found.items() if name in hooks}


#: Calls each hook of the table while something fails, and tells those that did not do as SGLang does as published.
WALK = """
import errno, inspect, os, socket, subprocess, sys, threading, time
from multiprocessing import get_context
import sglang.srt.crashkit as hooks

class Fault(Exception):
    pass

class Hostile:
    def __getattr__(self, name):
        raise Fault(name)

def failing(error):
    def fail(*args, **kwargs):
        raise error
    return fail

def kill_process_tree(parent_pid, include_parent=True, skip_pid=None):
    return "upstream's"

def any_function(*args, **kwargs):
    return "upstream's"

async def launcher(server_args):
    return hooks.on_configure_logger(any_function)(server_args)

def ended(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value

class Router:
    def __init__(self, *args):
        self.upstreams = True

ALONE = {"still_holding_resources", "wait_for_reap_or_raise", "open_crash_dump", "stand_in_for"}
CLASSES = {"on_tokenizer_router", "on_tokenizer_worker"}

def call(name, hook, kind):
    if kind == "_undecorated" and name in CLASSES:
        return hook(Router)(Hostile()).upstreams
    if kind == "_undecorated":
        function = kill_process_tree if name == "on_kill_process_tree" else any_function
        arguments = [999999999] if name == "on_kill_process_tree" else [Hostile()]
        arguments = [[Hostile()], [Hostile()]] if name == "on_wait_for_scheduler_ready" else arguments
        arguments = [[Hostile()], 0.1] if name == "on_wait_for_reap" else arguments
        if name in ("on_grpc_program", "on_encoder_rank"):
            return ended(hook(launcher)(*arguments)) == "upstream's"
        return hook(function)(*arguments) in ("upstream's", None)
    if kind == "_unchanged":
        return hook(Hostile(), given := ["upstream's"]) == given or "upstream's"
    if kind == "_no_watcher":
        return hook()([("server", Hostile())]).set() is None
    return hook(*[Hostile() for one in inspect.signature(hook).parameters.values() if one.default is one.empty]) is None

context = get_context("fork")
reader, writer = context.Pipe(False)
rank = context.Process(target=lambda: (writer.send({"status": "ready"}), time.sleep(60)))
rank.start()
imported = {name: getattr(hooks, name) for name in hooks._HOOKS}
fault = sys.argv[1]
if fault == "no thread":
    fail = failing(RuntimeError("can't start new thread"))
    threading.Thread.start = fail
    for module in [module for name, module in sys.modules.items() if name.startswith("sglang_crashkit")]:
        vars(module).update({name: fail for name in ("start_new_thread",) if hasattr(module, name)})
elif fault == "no descriptor":
    os.open = socket.socket = subprocess.Popen = failing(OSError(errno.EMFILE, "Too many open files"))
elif fault == "no memory":
    from sglang_crashkit.settings import Settings
    Settings.from_environ = failing(MemoryError())
wrong = {}
for name, hook in imported.items():
    try:
        if name not in ALONE and not call(name, hook, hooks._HOOKS[name][1].__name__):
            wrong[name] = "another answer"
    except BaseException as error:
        wrong[name] = repr(error)
wait = imported["on_wait_for_scheduler_ready"]
try:
    found["ready"] = wait(lambda readers, ranks: [one.recv() for one in readers])([reader], [rank])
except BaseException as error:
    found["ready"] = repr(error)
rank.terminate()
found["wrong"] = wrong
"""


@pytest.mark.parametrize("fault", ["odd objects", "no thread", "no descriptor", "no memory"])
def test_whatever_fails_in_a_hook_sglang_goes_on(site, fault):
    kit = Path(sglang_crashkit.__file__).parents[1]
    packages = os.pathsep.join([str(site), str(kit), str(Path(psutil.__file__).parents[1])])
    # Of a server that has lost its crash handler.
    environ = {"SGLANG_CRASHKIT_SOCKET": str(site / "gone"), "SGLANG_CRASHKIT_MODE": "library", "PYTHONPATH": packages}
    found, _log = ask(site, WALK, fault, **environ)
    assert found == {"ready": [{"status": "ready"}], "wrong": {}}


@pytest.mark.wheels
def test_what_replaces_a_hook_suits_each_use_of_it(read_patched, patches, release):
    (hooks,) = [node.value for node in ast.parse(TEXT).body if isinstance(node, ast.Assign) and _names(node, "_HOOKS")]
    table = {ast.literal_eval(name): row.elts[1].id for name, row in zip(hooks.keys, hooks.values, strict=True)}
    refs = patches.resolve(release)
    used: dict[str, str] = {}
    for path in refs:
        if path != HOOK_FILE:
            used |= uses(ast.parse(read_patched(path) or b""), set(table))
    called = {call.rpartition(".")[2] for ref in refs.values() for call in ref.read().calls}
    assert used.keys() == called
    assert {name: use for name, use in used.items() if table[name] not in BY_USE[use]} == {}
