#!/usr/bin/env python3
"""Writes docs/simulated-times.md: fused against unfused in virtual time, 2 nodes x 8 H200.

    scripts/simulated_times.py build/cpu/mkernel > docs/simulated-times.md
"""
import json
import subprocess
import sys

SIZES = {
    "all_gather_gemm": [2048, 4096, 8192, 16384, 24576, 32768],
    "gemm_reduce_scatter": [2048, 4096, 8192, 16384, 32768],
    "gemm_all_reduce": [2048, 4096, 8192, 16384, 32768],
}
# As published for two nodes x 8 H200 on EFA, ms: fused by others, cuBLAS + NCCL.
PUBLISHED = {
    ("all_gather_gemm", 4096): (0.356, 0.335), ("all_gather_gemm", 8192): (0.741, 0.728),
    ("all_gather_gemm", 16384): (2.02, 2.68), ("all_gather_gemm", 24576): (5.03, 6.91),
    ("all_gather_gemm", 32768): (9.77, 11.8),
    ("gemm_all_reduce", 2048): (0.208, 0.306), ("gemm_all_reduce", 4096): (0.286, 0.583),
    ("gemm_all_reduce", 8192): (0.800, 0.971), ("gemm_all_reduce", 16384): (2.71, 3.33),
    ("gemm_all_reduce", 32768): (11.4, 14.9),
    ("gemm_reduce_scatter", 2048): (0.293, 0.351), ("gemm_reduce_scatter", 4096): (0.362, 0.395),
    ("gemm_reduce_scatter", 8192): (0.846, 0.737), ("gemm_reduce_scatter", 16384): (2.27, 2.76),
    ("gemm_reduce_scatter", 32768): (9.47, 12.4),
}
NODES, GPUS = 2, 8


def floor_us(op, size, wire_bytes):
    """The largest of what arithmetic, network and NVLink take alone (figures of docs/cost-model.md), and its name."""
    gemm = 2 * size**3 / (NODES * GPUS) / (990e3 * 0.68)
    matrix = size * size * 2
    nvlink_bytes = matrix * (GPUS - 1) / GPUS * (2 if op == "gemm_all_reduce" else 1)
    parts = {"GEMM": gemm / 1e3, "wire": wire_bytes / 50 / 1e3, "NVLink": nvlink_bytes / 450 / 1e3}
    name = max(parts, key=parts.get)
    return parts[name], name


def simulate(mkernel, op, size, preset):
    command = [mkernel, "sim", op, "--nodes", str(NODES), "--gpus", str(GPUS), "--preset", preset, "--compare", "--json"]
    command += [part for name in "mnk" for part in (f"--{name}", str(size))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    mkernel = sys.argv[1]
    print("# Simulated times\n")
    print("Virtual time, 2 nodes × 8 GPUs, bf16, global m = n = k = M, default tiling and partition. Made by "
          "`scripts/simulated_times.py`;\nthe model and what it leaves out: [cost-model.md](cost-model.md). These are "
          "predictions, nothing was measured on a\nGPU. *Floor* is the largest of what arithmetic, network and NVLink "
          "would take alone. *Published* are the figures of the\nsystem in the field that comes closest, and of cuBLAS + "
          "NCCL, on real H200 with EFA: not comparable in kind, here for\nscale.\n")
    for preset in ("h200x8-ib", "h200x8-efa"):
        print(f"## {preset}\n")
        print("| operator | M | fused µs | unfused µs | unfused / fused | floor µs | limit | fused / floor | "
              "published fused / NCCL ms |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for op, sizes in SIZES.items():
            for size in sizes:
                result = simulate(mkernel, op, size, preset)
                fused, unfused = result["fused"]["time_us"], result["unfused"]["time_us"]
                floor, limit = floor_us(op, size, result["network"]["bytes_per_gpu"])
                published = PUBLISHED.get((op, size))
                text = f"{published[0]} / {published[1]}" if published else ""
                print(f"| {op} | {size} | {fused:.1f} | {unfused:.1f} | {unfused / fused:.2f} | {floor:.1f} | {limit} | "
                      f"{fused / floor:.2f} | {text} |")
        print()


if __name__ == "__main__":
    main()
