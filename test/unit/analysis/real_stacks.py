"""Stacks of schedulers as py-spy reads them."""

from __future__ import annotations

from sglang_crashkit.model.sample import Frame


def stack(*texts: str) -> tuple[Frame, ...]:
    """Return frames, innermost first, of texts such as ``f (x.py:1)``."""
    return tuple(Frame.read(text) or Frame(text, "", 0) for text in texts)


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
SPIN = ("spin (sitecustomize.py:12)", "on_stick (sitecustomize.py:32)", *BATCH)
