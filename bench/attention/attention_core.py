#!/usr/bin/env python3
"""Ring attention on one GPU against cuDNN's attention, and in a virtual cluster.

    ninja -C build/cpu mkernel_attention
    bench/attention/attention_core.py --lib build/cpu/libmkernel_attention.so --json bench/results/attention-h200.json

Needs PyTorch. attention_core: one rank on the whole GPU; both contestants in CUDA graphs, in random order in every
round, ratios of medians. attention_ring: ranks of a node share the GPU's SMs, the network is a link of so many GB/s;
its floor is the larger of the same call with a link as fast as memory, and of the bytes that a rank sends at the
link's rate. Results are compared with fp64 on sampled rows first.
"""
import argparse
import ctypes as C
import datetime
import json
import os
import random
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


class Case(C.Structure):
    _fields_ = [(n, C.c_int32) for n in ("nodes", "gpus", "sms", "heads", "kv_heads", "dim")] + [
        ("seq_q", C.c_int64), ("seq_k", C.c_int64)] + [
        (n, C.c_int32) for n in ("causal", "zigzag", "chunk_rows", "fp16")] + [
        ("gigabytes_per_s", C.c_double), ("latency_us", C.c_double)]


class Bench:
    """An operator on all its ranks, with random tensors."""

    def __init__(self, lib, case):
        self.lib, self.case, self.tensors = lib, case, []
        self.handle = lib.mk_create(C.byref(case))
        if not self.handle:
            raise RuntimeError(lib.mk_error().decode())
        for rank in range(case.nodes * case.gpus):
            q_tokens, k_tokens = (lib.mk_tokens(self.handle, rank, i) for i in (0, 1))
            make = lambda h, t: torch.randn(h, t, case.dim, device="cuda", dtype=torch.bfloat16)
            t = dict(q=make(case.heads, q_tokens), k=make(case.kv_heads, k_tokens), v=make(case.kv_heads, k_tokens),
                     o=torch.full((case.heads, q_tokens, case.dim), float("nan"), device="cuda", dtype=torch.bfloat16),
                     lse=torch.full((case.heads, q_tokens), float("nan"), device="cuda"))
            self.tensors.append(t)
            torch.cuda.synchronize()
            lib.mk_bind(self.handle, rank, *(t[n].data_ptr() for n in ("q", "k", "v", "o", "lse")))

    def close(self):
        self.lib.mk_destroy(self.handle)

    def launch(self):
        if self.lib.mk_launch(self.handle, 0, C.c_void_p(torch.cuda.current_stream().cuda_stream)):
            raise RuntimeError(self.lib.mk_error().decode())

    def run(self):
        sent = C.c_int64()
        us = self.lib.mk_run(self.handle, C.byref(sent))
        if us < 0:
            raise RuntimeError(self.lib.mk_error().decode())
        return us, sent.value

    def error(self, rows=64):
        """Relative error of sampled rows of some heads, and the log-sum-exp's largest absolute one. One rank."""
        c, t = self.case, self.tensors[0]
        worst, worst_lse = 0.0, 0.0
        for h in sorted({0, c.heads // 2, c.heads - 1}):
            at = torch.randint(0, c.seq_q, (rows,), device="cuda")
            kv = h // (c.heads // c.kv_heads)
            s = t["q"][h, at].double() @ t["k"][kv].double().T * c.dim ** -0.5
            if c.causal:
                s.masked_fill_(torch.arange(c.seq_k, device="cuda")[None] > (at + c.seq_k - c.seq_q)[:, None], -torch.inf)
            want = torch.softmax(s, -1) @ t["v"][kv].double()
            got = t["o"][h, at].double()
            worst = max(worst, ((got - want).norm() / want.norm()).item())
            worst_lse = max(worst_lse, (t["lse"][h, at].double() - torch.logsumexp(s, -1)).abs().max().item())
        return worst, worst_lse


def flops(c):
    return 4 * c.heads * c.seq_q * c.seq_k * c.dim * (0.5 if c.causal else 1)


def capture(f, count):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            f()
    return graph


def time_us(graph, count):
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    torch.cuda._sleep(100000)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def row(args, suite, c, ours, baseline, ratios, unit_extra):
    return dict(suite=suite, op="ring_attention", topology=f"{c.nodes}x{c.gpus}",
                shape=f"{c.heads}/{c.kv_heads} heads of {c.dim}, {c.seq_q} x {c.seq_k}{', causal' if c.causal else ''}"
                      f"{', zigzag' if c.zigzag else ''}",
                ours=round(ours, 3), baseline=round(baseline, 3) if baseline else None, unit="us",
                ratio=round(baseline / ours, 4) if baseline else None,
                spread=round(max(ratios) - min(ratios), 4) if ratios else None,
                gpu=torch.cuda.get_device_name(), torch=torch.__version__, cudnn=torch.backends.cudnn.version(),
                commit=args.commit, command=" ".join(sys.argv),
                date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), **unit_extra)


def core(lib, args, dim, seq, heads, kv_heads, causal):
    c = Case(1, 1, 0, heads, kv_heads, dim, seq, seq, causal, 0, 0, 0, 0, 0)
    bench = Bench(lib, c)
    t = bench.tensors[0]

    def cudnn():
        with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(t["q"][None], t["k"][None], t["v"][None], is_causal=bool(causal),
                                           enable_gqa=heads != kv_heads)

    bench.launch()
    torch.cuda.synchronize()
    error, lse_error = bench.error()
    if not error < 1e-2 or not lse_error < 1e-3:
        raise SystemExit(f"wrong: dim {dim}, {seq} tokens, causal {causal}: error {error}, of log-sum-exp {lse_error}")
    cudnn()
    torch.cuda.synchronize()
    count = max(2, min(64, int(args.block_ms * 5e11 / flops(c))))
    graphs = {"ours": capture(bench.launch, count), "cudnn": capture(cudnn, count)}
    times = {name: [] for name in graphs}
    for name, graph in graphs.items():
        time_us(graph, count)
    for _ in range(args.rounds):
        order = list(graphs)
        random.shuffle(order)
        for name in order:
            times[name].append(time_us(graphs[name], count))
    ours, baseline = (statistics.median(times[n]) for n in ("ours", "cudnn"))
    ratios = [b / a for a, b in zip(times["ours"], times["cudnn"])]
    result = row(args, "attention_core", c, ours, baseline, ratios,
                 dict(baseline_name="cuDNN through PyTorch's scaled_dot_product_attention",
                      detail=dict(ours_tflops=round(flops(c) / ours * 1e-6, 1),
                                  baseline_tflops=round(flops(c) / baseline * 1e-6, 1), error=error,
                                  lse_error=lse_error, launches_per_block=count,
                                  best_ratio=round(min(times["cudnn"]) / min(times["ours"]), 4),
                                  ratios=[round(r, 4) for r in ratios])))
    print(f"dim {dim:3} seq {seq:6} heads {heads}/{kv_heads} {'causal' if causal else 'full  '}: ours {ours:9.1f} us "
          f"{flops(c) / ours * 1e-6:5.0f} TFLOP/s, cuDNN {baseline:9.1f} us, ratio {baseline / ours:.3f}, "
          f"error {error:.1e}", flush=True)
    del graphs
    bench.close()
    return result


def ring(lib, args, tokens, heads, causal, gigabytes_per_s):
    """tokens: per rank, in a cluster of 2 x 4."""
    def measure(rate):
        c = Case(2, 4, 16, heads, heads, 128, 8 * tokens, 8 * tokens, causal, causal, 0, 0, rate, 5 if rate else 0)
        bench = Bench(lib, c)
        for _ in range(2):
            bench.run()
        runs = [bench.run() for _ in range(args.rounds)]
        bench.close()
        return c, statistics.median(us for us, _ in runs), runs[0][1]

    _, fast, _ = measure(0)
    c, ours, sent = measure(gigabytes_per_s)
    wire = sent / 8 / gigabytes_per_s * 1e-3
    floor = max(fast, wire)
    print(f"ring 2x4, {tokens} tokens a rank, {heads} heads {'causal zigzag' if causal else 'full'}, "
          f"{gigabytes_per_s} GB/s: {ours:.0f} us, {ours / floor:.3f} x max(alone {fast:.0f}, wire {wire:.0f}), "
          f"{flops(c) / ours * 1e-6:.0f} TFLOP/s", flush=True)
    return row(args, "attention_ring", c, ours, None, [],
               dict(floor=round(floor, 1), detail=dict(fast_link_us=round(fast, 1), wire_us=round(wire, 1),
                                                       over_floor=round(ours / floor, 4), link=gigabytes_per_s)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", default="build/cpu/libmkernel_attention.so")
    parser.add_argument("--json", help="adds rows to the JSON array in this file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block-ms", type=float, default=3)
    parser.add_argument("--suite", choices=("core", "ring", "all"), default="all")
    parser.add_argument("--few", action="store_true", help="a third of the cases")
    parser.add_argument("--commit", default=os.environ.get("MKERNEL_COMMIT", "unknown"))
    args = parser.parse_args()
    lib = C.CDLL(os.path.abspath(args.lib))
    lib.mk_create.restype, lib.mk_error.restype = C.c_void_p, C.c_char_p
    lib.mk_tokens.restype, lib.mk_run.restype = C.c_int64, C.c_double
    lib.mk_destroy.argtypes = [C.c_void_p]
    lib.mk_tokens.argtypes = [C.c_void_p, C.c_int, C.c_int]
    lib.mk_bind.argtypes = [C.c_void_p, C.c_int] + [C.c_void_p] * 5
    lib.mk_launch.argtypes = [C.c_void_p, C.c_int, C.c_void_p]
    lib.mk_run.argtypes = [C.c_void_p, C.c_void_p]
    torch.manual_seed(1)
    rows = []
    if args.suite in ("core", "all"):
        for causal in (0, 1):
            for seq in (4096, 16384) if args.few else (4096, 8192, 16384, 32768):
                rows.append(core(lib, args, 128, seq, 16, 16, causal))
            for dim, heads in ((64, 32), (96, 16), (256, 8)):
                for seq in (8192,) if args.few else (4096, 16384):
                    rows.append(core(lib, args, dim, seq, heads, heads, causal))
            rows.append(core(lib, args, 128, 8192, 16, 2, causal))
    if args.suite in ("ring", "all"):
        for causal in (0, 1):
            for tokens in (2048,) if args.few else (1024, 2048, 4096):
                rows.append(ring(lib, args, tokens, 8, causal, 6.0))
    if args.json:
        old = json.load(open(args.json)) if os.path.exists(args.json) else []
        with open(args.json, "w") as out:
            json.dump(old + rows, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
