from __future__ import annotations

import pytest

from sglang_crashkit.analysis.waits import of_frames, of_state
from sglang_crashkit.model.sample import Frame
from unit.analysis.real_stacks import ALL_REDUCE, BATCH, BROADCAST, INGEST, LOOP, stack

CHECK_BUILD = ("VecISA.check_build (torch/_inductor/cpu_vec_isa.py:128)", *BATCH)


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        ("collective", ALL_REDUCE),
        ("collective", BROADCAST),
        ("collective", ("PyNcclCommunicator.all_reduce (distributed/device_communicators/pynccl.py:99)", *BATCH)),
        ("collective", ("send_tensor_dict (sglang/srt/distributed/parallel_state.py:1200)", *BATCH)),
        ("collective", ("barrier (mooncake/mooncake_ep_buffer.py:80)", *BATCH)),
        ("store", ("_new_process_group_helper (torch/distributed/distributed_c10d.py:1901)", "f (x.py:1)")),
        ("store", ("_create_gloo_process_group (torch/distributed/distributed_c10d.py:669)", "f (x.py:1)")),
        ("store", ("_create_c10d_store (torch/distributed/rendezvous.py:189)", "init_process_group (y.py:1)")),
        ("store", ("StatelessProcessGroup.barrier (distributed/utils.py:190)", "f (x.py:1)")),
        ("cuda_sync", ("synchronize (torch/cuda/__init__.py:1040)", *BATCH)),
        ("cuda_sync", ("Event.synchronize (torch/cuda/streams.py:231)", *BATCH)),
        ("compiling", ("Popen._try_wait (subprocess.py:2004)", "check_call (subprocess.py:408)", *CHECK_BUILD)),
        ("compiling", ("BaseFileLock.acquire (filelock/_api.py:517)", *CHECK_BUILD)),
        (
            "compiling",
            ("make_cubin (triton/backends/nvidia/compiler.py:400)", "compile (triton/compiler/compiler.py:9)"),
        ),
        ("compiling", ("run_ninja (flashinfer/jit/cpp_ext.py:200)", *BATCH)),
        ("loading", ("safetensors_weights_iterator (model_loader/weight_utils.py:700)", "f (x.py:1)")),
        ("loading", ("copy_ (torch/_tensor.py:1)", "LlamaForCausalLM.load_weights (llama.py:600)")),
        ("idle", ("Socket.recv_pyobj (zmq/sugar/socket.py:989)", *INGEST)),
        ("idle", INGEST),
        ("idle", ("IdleSleeper.maybe_sleep (managers/utils.py:80)", *LOOP)),
        ("idle", ("Socket.recv_pyobj (zmq/sugar/socket.py:989)", "DetokenizerManager.event_loop (d.py:148)")),
        ("idle", ("Runner.run (asyncio/runners.py:118)", "asyncio_run (uvicorn/_compat.py:30)")),
        ("socket", ("SSLSocket.read (ssl.py:1100)", "fetch (x.py:1)")),
        ("socket", ("poll (zmq/sugar/poll.py:100)", "wait_for_peer (x.py:1)")),
        ("lock", ("Condition.wait (threading.py:331)", "Event.wait (threading.py:629)", "f (x.py:1)")),
        ("unknown", ("match (managers/schedule_batch.py:100)", *BATCH)),
        ("unknown", ()),
    ],
)
def test_what_python_functions_say(kind: str, frames: tuple[str, ...]) -> None:
    activity = of_frames(stack(*frames))
    assert activity.kind == kind
    assert activity.function == (frames[0] if frames else "")
    assert activity.words.endswith(activity.function or "in an unknown place")


@pytest.mark.parametrize("around", [ALL_REDUCE, BROADCAST, ("Event.synchronize (torch/cuda/streams.py:231)",), INGEST])
def test_what_runs_inside_a_function_that_waits_is_no_wait(around: tuple[str, ...]) -> None:
    # As a signal handler does, or a hook.
    activity = of_frames(stack("spin (sitecustomize.py:12)", "on_stick (sitecustomize.py:30)", *around))
    assert (activity.kind, activity.words) == ("unknown", "was in spin (sitecustomize.py:12)")


# -- native frames; with the patterns of upstream's guide to hangs


def test_a_kernel_that_runs_is_recognised() -> None:
    kernels = ["flash_fwd_kernel<...>"]
    sync = stack("synchronize (torch/cuda/__init__.py:1040)")
    activity = of_frames(sync, (), kernels)
    assert activity.kind == "kernel"
    assert "flash_fwd_kernel<...>" in activity.words
    assert "collective of NCCL" in of_frames(sync, (), ["ncclDevKernel_AllReduce_Sum"]).words
    assert of_frames(stack(*ALL_REDUCE), (), kernels).kind == "collective"


@pytest.mark.parametrize(
    ("kind", "words", "function"),
    [
        ("collective", "NCCL", "ncclAllReduce"),
        ("collective", "NCCL", "c10d::ProcessGroupNCCL::WorkNCCL::wait"),
        ("collective", "gloo", "gloo::transport::tcp::UnboundBuffer::waitRecv"),
        ("collective", "gloo", "c10d::ProcessGroupGloo::AsyncWork::wait"),
        ("collective", "mooncake", "mooncake::MooncakeBackend::allreduce"),
        ("store", "", "c10d::TCPStore::doWait"),
        ("store", "", "c10d::PrefixStore::get"),
        ("cuda_sync", "", "cudaStreamSynchronize"),
        ("cuda_sync", "", "cuEventSynchronize"),
        ("cuda_sync", "", "cudaMemcpy"),
        ("gil_wait", "", "take_gil"),
        ("gil_wait", "", "PyEval_RestoreThread"),
        ("lock", "", "__pthread_mutex_lock"),
        ("socket", "", "zmq::socket_poller_t::wait"),
        ("socket", "", "__libc_recv"),
        ("socket", "", "epoll_wait"),
    ],
)
def test_what_native_functions_say(kind: str, words: str, function: str) -> None:
    activity = of_frames((), (Frame("futex_wait", "libc.so.6", 0), Frame(function, "x.so", 0)))
    assert activity.kind == kind
    assert words in activity.words


# -- the kernel's word


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        ("T", "stopped", "was stopped (state T) until somebody sends SIGCONT"),
        ("t", "traced", "was held by process 7, a debugger or tracer (state t)"),
        ("D", "disk_sleep", "was in uninterruptible sleep (state D) in the kernel's rpc_wait"),
        ("Z", "gone", "had ended (state Z)"),
    ],
)
def test_what_the_state_says(state: str, kind: str, words: str) -> None:
    activity = of_state(state, "rpc_wait", 7)
    assert activity is not None
    assert (activity.kind, activity.words) == (kind, words)


def test_one_that_sleeps_in_the_freezer_is_stopped() -> None:
    frozen = of_state("S", "do_freezer_trap")
    assert frozen is not None
    assert (frozen.kind, frozen.words) == ("stopped", "was frozen by its cgroup, as a container that is paused")
    assert of_state("R", "do_freezer_trap") is None
