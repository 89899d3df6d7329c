#!/usr/bin/env python3
"""Makes docs/performance.md from bench/results/*.json, so that no figure there is typed by hand.

    scripts/performance_table.py            writes docs/performance.md
    scripts/performance_table.py --check    exit code 1 when the file is not what the results say
    scripts/performance_table.py --results DIR --output FILE   other places
"""
import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEAK_FLOPS = 990e12      # H200 data sheet: dense bf16 at boost clock
MEMORY_BYTES = 4.8e12    # H200 data sheet: HBM3e, bytes per second
GPU_SMS = 132
ELEMENT = 2              # bytes of bf16 and fp16

SUITES = ["gemm_core", "virtual_cluster", "small", "hierarchical", "command_ring", "sim_vs_measured", "sim_hierarchical"]
OPS = ["gemm", "gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm"]

HEAD = """# Performance

Made by `scripts/performance_table.py` from `bench/results/*.json`, which `mkernel bench` writes; edit the script, not
this file. *Ratio* is baseline / ours, above 1 we are faster: the median over rounds of times taken in pairs, because
the card is power limited and its clock moves by a third (absolute times of different rows do not compare). *Spread* is
(largest − smallest) / median of the ratio over the rounds. *Floor* is the larger of FLOPs / 990 TFLOP/s (of the SMs in
use) and bytes / 4.8 TB/s, inputs and outputs counted once: the data sheet, which no kernel reaches under the power cap.
On virtual clusters a contestant has the same one before it in every second round, whose power moves its clock: up to 6 % was
seen (docs/decisions/0017).
"""

TITLES = {
    "gemm_core": "The kernel alone: one rank on a whole GPU",
    "virtual_cluster": "Fused operators on a virtual cluster",
    "small": "Small M on a virtual cluster",
    "hierarchical": "Hierarchical against flat movement",
    "command_ring": "Command ring",
    "sim_vs_measured": "Simulator against measurement",
    "sim_hierarchical": "Hierarchical against flat movement, simulated",
}

EXPLANATIONS = {
    "gemm_core": """C (M × N) = A (M × K) · B (K × N) against cublasGemmEx and against the best of the algorithms that
cublasLt's heuristic names, which are compared first. Blocks of at least 10 ms of back-to-back launches in CUDA graphs,
paired rounds, inputs in turns so that the L2 cache does not hold them. Every product is compared with cuBLAS' before and
after it is timed.

What is between us and the floor. At K ≥ 4096 the card's power decides the clock (1.24 to 1.40 GHz instead of 1.98), so
that energy per FLOP is what is left. With few tiles it is the fixed time of a launch:
until the first load, the last tile's way out, and the gap between launches (not taken apart since it was shortened). Where K is cut over CTAs the last one adds
the others' sums up alone. Tiles of 64 rows read more bytes per product. Where N or K is no multiple of 8, or rows are off
128-byte lines and it pays, that matrix is copied first, which is part of our time. cuBLAS hides rows off those lines by
multicast within a cluster, which is not built here (docs/decisions/0012).""",
    "virtual_cluster": """All ranks on one GPU, each in a green context with SMs of its own, the network by a wire behind a link model.
*Sequential* is cuBLAS, then the same communication without GEMM; *chunked* is cuBLAS on four row chunks, each followed
by its communication on a second stream beside the next chunk, the better of 2 and 4 SMs for it. Same contexts, same
wire, one process; mean over the ranks of back-to-back calls. *Alone* is the larger of the faster GEMM alone and of
communication alone: what perfect overlap would take. *Wire* is bytes / rate + latency. The network is scaled (50 GB/s
times the rank's share of the SMs) or balanced (as slow as the GEMM alone).

What is between us and *alone*: SMs that move do not multiply (2 of 16 are 12 %), the first tile before which nothing can
be sent, the last tile whose way through reduction and network nothing hides, and the power that
communication takes from the GEMM's clock. AllGather + GEMM loses more: beside the copies a tile took 6 to 27 % more
cycles than alone in three runs, and why is not known. The memory of one GPU stands for that of all ranks.

Worlds of three and more nodes have no rows: they were measured before the link model
([decision 0011](decisions/0011-link-booked-at-departure.md)) and the order of tiles and puts
([decision 0004](decisions/0004-all-gather-order.md)) changed there, and not since.""",
    "small": """As above with the sizes of decoding: M = 1 to 2048. Launches, flags and latencies decide here, not FLOPs. Calls are
launched ahead behind other work, so that the host's launch times stay outside; where launching one call takes as long
as the call, the row says nothing (`host_us` in the detail).

Shards of few rows share tiles (docs/decisions/0009): before that GEMM + ReduceScatter was at 0.65 to 0.85 and AllGather +
GEMM at 0.46 to 0.88 of cuBLAS and communication in turn at M ≤ 128.""",
}

EXPLANATIONS["sim_vs_measured"] = """`mkernel bench suite sim_vs_measured` simulates the cases above with the cost preset `h200-virtual`, whose seven unknown
figures (GEMM rate, fixed cost of a tile, memory bandwidth, rate and fixed cost of a move, rate and fixed cost of a rank's
wire) were fitted to every second case, in the order of their names (`--calibrate`), and are asked about the others: the
bar is 15 %. Ratio is simulated / measured. The simulator knows nothing of clocks. What the former model (gemm_reduce_scatter
2x2, all_gather_gemm 2x2, 3x2, 4x2 at balance: 18 to 47 % off) had wrong: the wire's rate is each rank's, not that of all
together, and has a cost per write; movers take no tiles while moves are left; and tiles of gathered rows lose time that depends on the shape, not a
constant factor. That it is what the L2 cannot hold fits the rows; no counter has shown it. The figures were
fitted when there were rows of three and four nodes too, of which every second one counted. They know only the calibration
half. The form of the model does not: some six were tried, and the one kept was found by looking at rows of both halves, so
the prediction half is no blind test of it. New measurements are, as far as they are of the same cases."""

EXPLANATIONS["hierarchical"] = """The same operator, sizes and SMs in two worlds that exist at the same time: N nodes of G GPUs, and N × G nodes of one
GPU, where every GPU sends to every other over its own link of the same rate. Both fused, in paired rounds. Bytes are what
the proxies counted per GPU and call. Above 1 hierarchical movement is better."""

EXPLANATIONS["sim_hierarchical"] = """What `mkernel bench suite sim_hierarchical` says of the same pairs, with the preset `h200-virtual`, and of two nodes of eight
H200 on InfiniBand against sixteen nodes of one, with `h200x8-ib`. Predictions: nothing was measured."""

COLUMNS = {
    "core": ["shape", "B", "baseline", "ours µs", "baseline µs", "ratio", "rounds", "spread", "floor µs", "ours / floor", "tile"],
    "cluster": ["operator", "topology", "shape", "link", "baseline", "fused µs", "baseline µs", "ratio", "rounds", "spread",
                "alone µs", "fused / alone", "wire µs", "floor µs", "SMs (compute, other)"],
    "simulated": ["operator", "topology", "shape", "link", "measured µs", "simulated µs", "simulated / measured", "half"],
    "movement": ["operator", "topology", "shape", "against", "unit", "hierarchical", "flat", "flat / hierarchical", "spread",
                 "link GB/s", "on"],
    "other": ["operator", "topology", "shape", "baseline", "ours", "baseline value", "unit", "ratio", "spread", "floor"],
}


def rows_of(folder):
    """All rows in the folder, in the order of file names; what is no array of rows is no result of a bench."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, list):
            rows += content
    return rows


def sizes(row):
    parts = row["shape"].split("x")
    return tuple(int(part) for part in parts) if len(parts) == 3 and all(p.isdigit() for p in parts) else None


def detail(row, *names, default=None):
    value = row.get("detail") or {}
    for name in names:
        if not isinstance(value, dict) or name not in value:
            return default
        value = value[name]
    return value


def baseline_kind(row):
    """Algorithm numbers and the like differ from run to run; what is compared with does not."""
    return row["baseline_name"].split(" (")[0].split(",")[0]


def identity(row):
    return (row["suite"], row["op"], row["topology"], row["shape"], baseline_kind(row), row["unit"],
            detail(row, "preset", default=""),
            detail(row, "link", "rule", default=""), detail(row, "dtype", default=""), detail(row, "b", default=""))


def newest(rows):
    """Of repeated measurements the newest; among equal dates the last."""
    chosen = {}
    for row in rows:
        key = identity(row)
        if key not in chosen or row["date"] >= chosen[key]["date"]:
            chosen[key] = row
    return list(chosen.values())


def order(row):
    place = OPS.index(row["op"]) if row["op"] in OPS else len(OPS)
    return (detail(row, "preset", default=""), place, row["op"], row["topology"], sizes(row) or (), row["shape"],
            detail(row, "link", "rule", default=""), detail(row, "b", default=""), row["baseline_name"], row["unit"])


def floor_us(row):
    shape = sizes(row)
    if shape is None:
        return None
    m, n, k = shape
    nodes, gpus = (int(part) for part in row["topology"].split("x"))
    world = nodes * gpus
    outputs = world if row["op"] == "gemm_all_reduce" else 1
    used = min(1.0, world * detail(row, "sms", default=GPU_SMS) / GPU_SMS)
    arithmetic = 2 * m * n * k / (PEAK_FLOPS * used)
    memory = ELEMENT * (m * k + k * n + outputs * m * n) / MEMORY_BYTES
    return 1e6 * max(arithmetic, memory, 1e-6 * (detail(row, "wire_us", default=0) or 0))


def us(value):
    return "" if value is None else f"{value:.1f}"


def quotient(a, b):
    return f"{a / b:.2f}" if a and b else ""


def rounds(row):
    """How many pairs the ratio is the median of: one has no spread."""
    return str(len(detail(row, "ratios", default=[])) or "")


def core_line(row):
    floor = floor_us(row)
    tiling = detail(row, "tiling", default={})
    return [row["shape"].replace("x", " × "), detail(row, "b", default=""), row["baseline_name"], us(row["ours"]),
            us(row["baseline"]), f"{row['ratio']:.3f}", rounds(row), f"{row['spread']:.3f}", us(floor), quotient(row["ours"], floor),
            f"{tiling.get('bm', '')}×{tiling.get('bn', '')}"]


def cluster_line(row):
    partition = detail(row, "partition", default={})
    movers = partition.get("intra", 0) + partition.get("recv", 0)
    link = detail(row, "link", "rule", default="")
    rate = detail(row, "link", "gigabytes_per_s", default=0)
    return [row["op"], row["topology"], row["shape"].replace("x", " × "), f"{link} ({rate:.1f} GB/s)" if rate else link,
            row["baseline_name"], us(row["ours"]), us(row["baseline"]), f"{row['ratio']:.2f}", rounds(row),
            f"{row['spread']:.3f}",
            us(row["floor"]), quotient(row["ours"], row["floor"]), us(detail(row, "wire_us")), us(floor_us(row)),
            f"{partition.get('compute', '')}, {movers}"]


def simulated_line(row):
    return [row["op"], row["topology"], row["shape"].replace("x", " × "), detail(row, "link", "rule", default=""),
            us(row["ours"]), us(row["baseline"]), f"{row['ratio']:.3f}", detail(row, "half", default="")]


def number(value):
    return "" if value is None else f"{value:.4g}"


def movement_line(row):
    bytes_row = row["unit"] == "bytes"
    value = (lambda v: f"{v / 1e6:.3f}") if bytes_row else us
    return [row["op"], row["topology"], row["shape"].replace("x", " × "), row["baseline_name"],
            "MB per GPU" if bytes_row else "µs", value(row["ours"]), value(row["baseline"]), f"{row['ratio']:.2f}",
            f"{row['spread']:.3f}", f"{detail(row, 'link', 'gigabytes_per_s', default=0):.1f}",
            detail(row, "preset", default=row["gpu"])]


def other_line(row):
    return [row["op"], row["topology"], row["shape"], row["baseline_name"], number(row["ours"]),
            number(row["baseline"]), row["unit"], number(row["ratio"]), number(row["spread"]), number(row["floor"])]


def summary(suite, rows):
    """One sentence of what the table below shows, per baseline."""
    if suite == "sim_vs_measured":
        worst = {}
        for row in rows:
            half = detail(row, "half", default="")
            worst[half] = max(worst.get(half, 0), abs(row["ratio"] - 1))
        return "largest error " + ", ".join(f"{100 * worst[half]:.1f} % in the {half} half" for half in sorted(worst)) + "."
    kinds = {}
    for row in rows:
        unit = f" in {row['unit']}" if suite in ("hierarchical", "sim_hierarchical") else ""
        kinds.setdefault(baseline_kind(row) + unit, []).append(row["ratio"])
    parts = []
    for kind in sorted(kinds):
        ratios = sorted(kinds[kind])
        parts.append(f"against {kind} {len(ratios)} row{'s' if len(ratios) > 1 else ''}, ratio {ratios[0]:.3f} to {ratios[-1]:.3f}, "
                     f"median {ratios[len(ratios) // 2]:.3f}")
    return "; ".join(parts) + "."


def provenance(rows):
    """What the rows were measured on and from which commits."""
    seen = sorted({(r["gpu"], r["driver"], r["cuda"], r["commit"][:12], r["date"][:10]) for r in rows})
    return "; ".join(f"{gpu}, driver {driver}, CUDA {cuda}, commit {commit}, {date}"
                     for gpu, driver, cuda, commit, date in seen)


def table(suite, rows):
    kind = {"gemm_core": "core", "virtual_cluster": "cluster", "small": "cluster",
            "sim_vs_measured": "simulated", "hierarchical": "movement", "sim_hierarchical": "movement"}.get(suite, "other")
    line = {"core": core_line, "cluster": cluster_line, "simulated": simulated_line, "movement": movement_line, "other": other_line}[kind]
    columns = COLUMNS[kind]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(line(row)) + " |" for row in sorted(rows, key=order)]
    return "\n".join(lines)


def document(rows):
    text = [HEAD]
    rows = [row for row in newest(rows) if row["suite"] != "single"]  # measured by hand
    suites = [s for s in SUITES if any(r["suite"] == s for r in rows)]
    suites += sorted({r["suite"] for r in rows} - set(SUITES))
    if not suites:
        text.append("There are no results yet.\n")
    for suite in suites:
        mine = [row for row in rows if row["suite"] == suite]
        text.append(f"## {TITLES.get(suite, suite)}\n")
        if suite in EXPLANATIONS:
            text.append(EXPLANATIONS[suite] + "\n")
        origin = "Simulated" if suite == "sim_hierarchical" else f"Measured on {provenance(mine)}"
        text.append(f"{origin}.\nIn short: {summary(suite, mine)}\n")
        text.append(table(suite, mine) + "\n")
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether the file is up to date")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs" / "performance.md")
    args = parser.parse_args()
    text = document(rows_of(args.results))
    if not args.check:
        args.output.write_text(text)
        return 0
    if args.output.exists() and args.output.read_text() == text:
        return 0
    print(f"{args.output} is not what {args.results}/*.json says: run scripts/performance_table.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
