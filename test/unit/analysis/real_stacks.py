"""Stacks of schedulers as py-spy reads them, and processes made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_crashkit.model.sample import Frame, Sample, Thread
from sglang_crashkit.model.snapshot import NodeSnapshot


def stack(*texts: str) -> tuple[Frame, ...]:
    """Return frames, innermost first, of texts such as ``f (x.py:1)``."""
    frames = []
    for text in texts:
        function, _space, place = text.partition(" (")
        file, _colon, line = place.rstrip(")").rpartition(":")
        frames.append(Frame(function, file, int(line or 0)))
    return tuple(frames)


LOOP = (
    "Scheduler.event_loop_overlap (scheduler.py:1596)",
    "context_decorator.<locals>.decorate_context (torch/utils/_contextlib.py:124)",
    "dispatch_event_loop (scheduler.py:3914)",
    "Scheduler.run_event_loop (scheduler.py:1536)",
    "run_scheduler_process (scheduler.py:4045)",
    "BaseProcess.run (multiprocessing/process.py:108)",
    "BaseProcess._bootstrap (multiprocessing/process.py:314)",
    "_main (multiprocessing/spawn.py:135)",
    "spawn_main (multiprocessing/spawn.py:122)",
    "<module> (<string>:1)",
)
BATCH = (
    "LlamaModel.forward (llama.py:381)",
    "Module._call_impl (torch/nn/modules/module.py:1790)",
    "LlamaForCausalLM.forward (llama.py:524)",
    "ModelRunner.forward (model_runner.py:3330)",
    "TpModelWorker.forward_batch_generation (tp_worker.py:472)",
    "Scheduler.run_batch (scheduler.py:3043)",
    *LOOP,
)
INGEST = (
    "SchedulerRequestReceiver.recv_requests (scheduler_components/request_receiver.py:90)",
    "Scheduler.ingest_requests (scheduler.py:2207)",
    *LOOP,
)
ALL_REDUCE = (
    "all_reduce (torch/distributed/distributed_c10d.py:3075)",
    "_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)",
    "GroupCoordinator.all_reduce (distributed/parallel_state.py:582)",
    "tensor_model_parallel_all_reduce (distributed/communication_op.py:20)",
    *BATCH,
)
BROADCAST = (
    "broadcast (torch/distributed/distributed_c10d.py:2974)",
    "_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)",
    "broadcast_pyobj (utils/common.py:1358)",
    *INGEST,
)
SYNCHRONIZE = ("synchronize (torch/cuda/streams.py:231)", *BATCH)
RECEIVE = ("Socket.recv_pyobj (zmq/sugar/socket.py:989)", *INGEST)
ON_IDLE = ("Scheduler.on_idle (scheduler.py:5250)", *LOOP)
CHECK = (
    "SchedulerInvariantChecker._check_full_pool (scheduler_components/invariant_checker.py:138)",
    "SchedulerInvariantChecker._check_all_pools (scheduler_components/invariant_checker.py:482)",
    *ON_IDLE,
)
SPIN = ("spin (sitecustomize.py:12)", "on_stick (sitecustomize.py:32)", *BATCH)
HOLD_GIL = ("hold_gil (sitecustomize.py:19)", "on_stick (sitecustomize.py:32)", *BROADCAST)
MATMUL = ("linear (torch/nn/functional.py:2300)", *BATCH)
STORE = (
    "_new_process_group_helper (torch/distributed/distributed_c10d.py:2810)",
    "init_process_group (torch/distributed/distributed_c10d.py:2420)",
    "init_distributed_environment (distributed/parallel_state.py:1800)",
    "ModelRunner.init_torch_distributed (model_runner.py:700)",
    "run_scheduler_process (scheduler.py:4000)",
)
LOAD = (
    "safetensors_weights_iterator (model_loader/weight_utils.py:700)",
    "DefaultModelLoader.load_weights_and_postprocess (model_loader/loader.py:660)",
    "ModelRunner.load_model (model_runner.py:1000)",
    "run_scheduler_process (scheduler.py:4000)",
)
COMPILE = ("Popen._try_wait (subprocess.py:2004)", "VecISA.check_build (torch/_inductor/cpu_vec_isa.py:128)", *BATCH)
DECODE = ("Scheduler.event_loop_overlap_disagg_decode (disaggregation/decode.py:3170)", *LOOP[1:])


DETOKENIZE = (
    "Socket.recv_pyobj (zmq/sugar/socket.py:989)",
    "DetokenizerManager.event_loop (managers/detokenizer_manager.py:150)",
    "run_detokenizer_process (managers/detokenizer_manager.py:440)",
    *LOOP[5:],
)
IMPORT = (
    "exec_module (<frozen importlib._bootstrap_external>:940)",
    "prepare (multiprocessing/spawn.py:246)",
    *LOOP[7:],
)


def process(pid: int, frames: Sequence[str] = (), **fields: Any) -> Sample:
    """Return a scheduler whose main thread is in `frames`; ranks as ``tp=0``, other fields by their names."""
    ranks = {name: fields.pop(name) for name in ("dp", "pp", "tp", "ep") if name in fields}
    thread = Thread("MainThread", pid, active=False, owns_gil=fields.pop("owns_gil", False), frames=stack(*frames))
    worker = stack("_worker (concurrent/futures/thread.py:81)", "Thread._bootstrap (threading.py:1002)")
    threads = (thread, Thread("pool", pid + 5000, active=False, owns_gil=False, frames=worker)) if frames else ()
    title = "".join(f"_{name.upper()}{number}" for name, number in ranks.items())
    defaults = {"host": "n1", "start_ticks": 1, "role": "scheduler", "time": 0.0, "server": 1, "state": "S"}
    fields = {"title": f"sglang::scheduler{title}", **defaults, **fields}
    return Sample(pid=pid, ranks=ranks, threads=threads, **fields)


def rounds(*looks: Sequence[Sample], host: str = "n1", secs: float = 5.0) -> list[NodeSnapshot]:
    """Return what was seen on one host at each of several rounds, so many seconds apart."""
    return [
        NodeSnapshot(host, 100.0 + secs * position, tuple(_at(one, 100.0 + secs * position, host) for one in look))
        for position, look in enumerate(looks)
    ]


def _at(one: Sample, time: float, host: str) -> Sample:
    return Sample(**{**vars(one), "time": time, "host": host})
