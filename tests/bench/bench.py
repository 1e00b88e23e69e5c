"""Speed of this library against the machine's own peak and, where it is installed, PyTorch.

    ./run bench                         a quick look
    ./run bench --preset tables         every cell of README's tables
    ./run bench --preset masks          what masks save
    ./run bench --case '{"dim": 128}'   one row; each row of the table ends in its own
    ./run bench --device cuda           on a GPU, beside what is installed of PyTorch's backends and
                                        flash-attn-4: the tables of the papers, and decoding
    ./run bench --device cuda --preset training     or prefill, decode, long-context, features, fp32
    ./run bench --device cuda --only 'backward D128 causal' --baseline old.so
                                        some rows, beside another build of the library

All runners of a row take turns in one process, in rotating order, on random normal data; figures
are medians. GFLOP/s count 4 * dim for a visible pair forward, 2.5 times that backward.
"""
from __future__ import annotations

import argparse
import csv
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

import flashattn
from cases import Case, chosen as chosen_cases
from runners import available, keep_memory

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Peak:
    """GFLOP/s of register-only loops on as many threads, by the arithmetic that suits a type."""

    def __init__(self, threads: int, isa: str) -> None:
        self.program = ROOT / "build" / "release" / "tests" / "bench" / f"peak_{isa}"
        self.threads = threads
        self.running: Dict[str, Any] = {}

    def now(self, dtype: str) -> Optional[float]:
        if not self.program.exists():
            return None
        arithmetic = "bf16" if dtype == "bf16" else "f32"
        if arithmetic not in self.running:
            self.running[arithmetic] = subprocess.Popen(
                [str(self.program), str(self.threads), arithmetic], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True, bufsize=1)
        process = self.running[arithmetic]
        process.stdin.write("\n")
        return float(process.stdout.readline())


def measure(case: Case, runners: Dict[str, Any], seconds: float,
            peak: Peak) -> Tuple[Dict[str, float], Optional[float]]:
    """Median seconds of each runner that computes the case, taking turns for about so long each,
    and which part of the machine's peak ours reaches, beside each of its turns."""
    work = {name: runner.prepare(case) for name, runner in runners.items()}
    work = {name: run for name, run in work.items() if run}
    times: Dict[str, List[float]] = {name: [] for name in work}
    parts: List[float] = []
    order = list(work)
    for run in work.values():
        run()
    end = time.perf_counter() + seconds * len(work)
    while min(len(t) for t in times.values()) < 5 or time.perf_counter() < end:
        for name in order:
            start = time.perf_counter()
            work[name]()
            times[name].append(time.perf_counter() - start)
        order.append(order.pop(0))
        rate = peak.now(case.dtype)
        if rate:
            parts.append(case.flops() / times["flashattn"][-1] * 1e-9 / rate)
    return ({name: statistics.median(t) for name, t in times.items()},
            statistics.median(parts) if parts else None)


def write(rows: List[Dict[str, Any]], table: Optional[pathlib.Path]) -> None:
    if not table or not rows:
        return
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", action="append", metavar="NAME")
    parser.add_argument("--only", default="", metavar="WORDS",
                        help="rows of the presets whose names hold all these words")
    parser.add_argument("--case", action="append", type=Case.from_json, metavar="JSON")
    parser.add_argument("--alone", action="store_true", help="measure no peer")
    parser.add_argument("--csv", type=pathlib.Path, help="where to write the figures, too")
    cpu = parser.add_argument_group("on the CPU")
    cpu.add_argument("--threads", type=int, default=0, help="0: all")
    cpu.add_argument("--seconds", type=float, default=0.4, help="for each figure")
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--baseline", action="append", metavar="[NAME=]LIBRARY",
                     help="another build of the library, to be timed in turns with this one")
    gpu.add_argument("--without", action="append", metavar="PEER", help="leave a peer out")
    gpu.add_argument("--rounds", type=int, default=8, help="bursts of each runner a row")
    gpu.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS",
                     help="also run each kernel alone for so long without pause")
    gpu.add_argument("--plot", type=pathlib.Path, help="where to draw the table")
    chosen = parser.parse_args()
    cases = list(chosen.case or [])
    if chosen.preset or not cases:
        cases += chosen_cases(chosen.device, chosen.preset, chosen.only)
    if not cases:
        parser.error(f"no row's name holds {chosen.only!r}")
    if chosen.device == "cuda":
        import gpu
        return gpu.main(cases, chosen)

    if any(case.page_size or case.repeatable or case.uneven or case.parts for case in cases):
        parser.error("pages, repeatable bits, uneven lengths and merges are measured on a GPU only")
    device = flashattn.devices()[0]
    threads = chosen.threads or device.units
    keep_memory()
    runners = available(threads)
    if chosen.alone:
        runners.pop("torch", None)
    peak = Peak(threads, device.isa)
    print(f"{device.name}, {device.isa}, {threads} threads")
    if "torch" in runners:
        print(f"peer: PyTorch {runners['torch'].torch.__version__}, scaled_dot_product_attention")
    else:
        print("no peer: PyTorch is not measured")
    rows = []
    print(f"{'':44}{'ms':>9}{'GF/s':>8}{'of peak':>9}{'torch':>8}{'ratio':>7}")
    for case in cases:
        seconds, part = measure(case, runners, chosen.seconds, peak)
        rate = {name: case.flops() / t * 1e-9 for name, t in seconds.items()}
        ours, peer = rate["flashattn"], rate.get("torch")
        row = f"{case.name():44}{seconds['flashattn'] * 1e3:9.2f}{ours:8.1f}"
        row += f"{part:8.0%} " if part else f"{'':9}"
        row += f"{peer:8.1f}{ours / peer:7.2f}" if peer else f"{'':15}"
        if case.seqlen_q == 1:
            row += f"  {case.least_bytes() / seconds['flashattn'] * 1e-9:.1f} GB/s of K and V"
        print(f"{row}  {case.to_json()}", flush=True)
        rows.append({"case": case.to_json(), "seconds": seconds["flashattn"], "gflops": ours,
                     "of_peak": part, "torch_seconds": seconds.get("torch"),
                     "torch_gflops": peer})
    write(rows, chosen.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
