"""Let one rank of a real server go another way than the first, in ways that SGLang's own code never asks for."""

from __future__ import annotations

#: Runs in every Python process of the server. A request is to go astray where its id begins with the way in which.
_CODE = """
VICTIM = "sglang::scheduler_TP1"
#: A request is at work once it has given so many tokens.
AT_WORK = 10
done = set()


def change(module):
    import setproctitle

    handle = module.Scheduler.process_input_requests

    def process_input_requests(self, recv_reqs):
        if not setproctitle.getproctitle().startswith(VICTIM):
            return handle(self, recv_reqs)
        if "prefetch" not in done:
            done.add("prefetch")
            refuse_some(self.tree_cache)
        kept = [one for one in recv_reqs if not str(getattr(one, "rid", "")).startswith("drop")]
        given = handle(self, kept)
        batch = self.running_batch
        for req in list(batch.reqs) if batch is not None else []:
            way = req.rid.partition("-")[0]
            if way in ("abort", "retract") and req.rid not in done and len(req.output_ids) >= AT_WORK:
                done.add(req.rid)
                if way == "abort":
                    self.abort_request(module.AbortReq(rid=req.rid))
                else:
                    retract_once(module.ScheduleBatch)
        return given

    module.Scheduler.process_input_requests = process_input_requests


def refuse_some(cache):
    fetch = getattr(cache, "prefetch_from_storage", None)

    def prefetch_from_storage(request, *arguments, **options):
        # As one whose own count of what is under way is at its limit.
        if not str(getattr(request, "rid", request)).startswith("prefetch"):
            return fetch(request, *arguments, **options)

    cache.prefetch_from_storage = prefetch_from_storage


def retract_once(batches):
    check = batches.check_decode_mem

    def check_decode_mem(self, *args, **kwargs):
        batches.check_decode_mem = check
        return False

    batches.check_decode_mem = check_decode_mem
"""
#: For `import_hook.write_site`.
SITE = (_CODE, "sglang.srt.managers.scheduler")
