"""What releases for GPUs lack to run all that they can on a CPU: a few kernels, in Python.

With these there are DP attention, speculative decoding, and a hierarchical cache. What they compute is good enough for
random weights: of what was drafted only the root is accepted, and nothing is copied to or from the host.
"""

from __future__ import annotations

_MODULES = (
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.layers.rotary_embedding.base",
    "sglang.srt.mem_cache.allocation",
    "sglang.srt.mem_cache.pool_host.common",
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.speculative.spec_utils",
    "torch.cpu",
    "sglang.kernels.ops.kvcache.cache_move",
    "sglang.kernels.ops.speculative.cache_locs",
    "sglang.kernels.ops.speculative.reconstruct_tree",
    "sglang.kernels.ops.speculative.spec_tree",
)
_CODE = """
def complete_attention(backend):
    attend = backend._run_sdpa_forward_extend

    def run(self, query, output, keys, values, req_to_token, indices, lengths, prefixes, extended, *more, **options):
        if prefixes is None:
            # A pass that verifies what was drafted: as many tokens of each request, behind what it has.
            drafts = query.shape[0] // len(lengths)
            prefixes, extended = lengths, lengths.new_full(lengths.shape, drafts)
            lengths = lengths + drafts
        return attend(
            self, query, output, keys, values, req_to_token, indices, lengths, prefixes, extended, *more, **options
        )

    backend._run_sdpa_forward_extend = run
    backend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def put_places(indices, req_to_token, starts, ends, places, width):
    at = 0
    for index, start, end in zip(indices.tolist(), starts.tolist(), ends.tolist()):
        req_to_token[index, start:end] = places[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def do_nothing(*_arguments, **_options):
    return None


def find_places(indices, req_to_token, starts, ends, out, width):
    at = 0
    for index, start, end in zip(indices.tolist(), starts.tolist(), ends.tolist()):
        out[at : at + end - start] = req_to_token[index, start:end].to(out.dtype)
        at += end - start


def build_chain(mask, seq_lens, positions, index, next_token, next_sibling, size, drafts):
    import torch

    for place in range(size):
        row = slice(place * drafts, (place + 1) * drafts)
        positions[row] = seq_lens[place] + torch.arange(drafts)
        index.view(-1)[row] = torch.arange(place * drafts, (place + 1) * drafts)
    following = torch.arange(1, drafts + 1)
    following[-1] = -1
    next_token.view(size, drafts)[:] = following
    next_sibling.fill_(-1)


def accept_roots(predicts, accept_index, accept_token_num, candidates, retrive_index, target_predict, **_links):
    accept_index.fill_(-1)
    accept_index[:, 0] = retrive_index[:, 0]
    accept_token_num.fill_(0)
    predicts.copy_(target_predict.reshape(-1)[: predicts.numel()])


def leave_nothing_alone(embedding):
    rotate = embedding.forward_native

    def forward_native(self, positions, query, key, *more, **options):
        # A rank that has nothing to do runs along.
        return rotate(self, positions, query, key, *more, **options) if positions.numel() else (query, key)

    embedding.forward_native = forward_native


STAND_INS = {
    "allocation": ("assign_req_to_token_pool_cpu", put_places),
    "common": ("_cuda_host_register", do_nothing),
    "cache_move": ("copy_all_layer_kv_cache_cpu", do_nothing),
    "cache_locs": ("assign_extend_cache_locs_cpu", find_places),
    "reconstruct_tree": ("reconstruct_indices_from_tree_mask_func", build_chain),
    "spec_utils": ("move_accept_tokens_to_target_kvcache", do_nothing),
    "spec_tree": ("sgl_verify_tree_greedy_cpu", accept_roots),
}


def change(module):
    last = module.__name__.rpartition(".")[2]
    if last == "torch_native_backend":
        complete_attention(module.TorchNativeAttnBackend)
    elif last == "cpu":
        module.Stream.synchronize = do_nothing
    elif last == "mha":
        for name in ("transfer_kv_all_layer_direct_lf_pf", "transfer_kv_per_layer_direct_pf_lf", "transfer_kv_direct"):
            setattr(module, name, do_nothing)
    elif last == "base":
        leave_nothing_alone(module.RotaryEmbedding)
    else:
        setattr(module, *STAND_INS[last])
"""
#: For `import_hook.write_site`.
SITE = (_CODE, *_MODULES)
