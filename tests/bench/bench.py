"""Speed of this library against the machine's own peak and, where it is installed, PyTorch.

    ./run bench                         a quick look
    ./run bench --preset tables         every cell of README's tables
    ./run bench --preset masks          what masks save
    ./run bench --case '{"dim": 128}'   one row; each row of the table ends in its own
    ./run bench --device cuda           on a GPU, beside PyTorch's backends, which must be installed

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
from typing import Any, Dict, List, Optional

import flashattn
from cases import PRESETS, Case
from runners import available

ROOT = pathlib.Path(__file__).resolve().parents[2]


def peaks(threads: int, isa: str) -> Dict[str, float]:
    """GFLOP/s of register-only loops on as many threads, by arithmetic."""
    program = ROOT / "build" / "release" / "tests" / "bench" / f"peak_{isa}"
    if not program.exists():
        return {}
    lines = subprocess.run([str(program), str(threads)], check=True, capture_output=True,
                           text=True).stdout.split("\n")
    return {name: float(value) for name, value in (line.split() for line in lines if line)}


def measure(case: Case, runners: Dict[str, Any], seconds: float) -> Dict[str, float]:
    """Median seconds of each runner that computes the case, taking turns for about so long each."""
    work = {name: runner.prepare(case) for name, runner in runners.items()}
    work = {name: run for name, run in work.items() if run}
    times: Dict[str, List[float]] = {name: [] for name in work}
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
    return {name: statistics.median(t) for name, t in times.items()}


def peak_of(case: Case, peak: Dict[str, float]) -> Optional[float]:
    return peak.get(case.dtype if case.dtype in peak else "f32")


def on_gpu(cases: List[Case], table: Optional[pathlib.Path]) -> int:
    import gpu  # needs PyTorch

    rows = []
    print(f"{gpu.torch.cuda.get_device_name()}, PyTorch {gpu.torch.__version__}; TFLOP/s "
          "(decoding: TB/s of K and V)")
    print(f"{'':44}{'flashattn':>10}" + "".join(f"{name:>10}" for name in gpu.PEERS) + "   error")
    for case in cases:
        result = gpu.measure(case)
        if not result["seconds"]:
            continue
        amount = case.kv_bytes() if case.seqlen_q == 1 else case.flops()
        rate = {name: amount / t * 1e-12 for name, t in result["seconds"].items()}
        digits = 2 if case.seqlen_q == 1 else 1
        row = "".join(f"{rate[name]:10.{digits}f}" if name in rate else f"{'':10}"
                      for name in ("flashattn", *gpu.PEERS))
        error = f"{result['error']:8.1e}" if result["error"] is not None else f"{'':8}"
        print(f"{case.name():44}{row}{error}  {result['kernel']}  {case.to_json()}", flush=True)
        rows.append({"case": case.to_json(), "kernel": result["kernel"],
                     "error": result["error"], **{f"{n}_seconds": result["seconds"].get(n)
                                                  for n in ("flashattn", *gpu.PEERS)}})
    write(rows, table)
    return 0


def write(rows: List[Dict[str, Any]], table: Optional[pathlib.Path]) -> None:
    if not table or not rows:
        return
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", choices=sorted(PRESETS), action="append")
    parser.add_argument("--case", action="append", type=Case.from_json, metavar="JSON")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each figure")
    parser.add_argument("--alone", action="store_true", help="do not measure PyTorch")
    parser.add_argument("--csv", type=pathlib.Path, help="also write the figures there")
    chosen = parser.parse_args()
    cases = list(chosen.case or [])
    quick = ["quick"] if chosen.device == "cpu" else ["gpu", "gpu-backward", "gpu-decode"]
    for preset in chosen.preset or ([] if cases else quick):
        cases += PRESETS[preset]
    if chosen.device == "cuda":
        return on_gpu(cases, chosen.csv)

    device = flashattn.devices()[0]
    threads = chosen.threads or device.units
    runners = available(threads)
    if chosen.alone:
        runners.pop("torch", None)
    peak = peaks(threads, device.isa)
    print(f"{device.name}, {device.isa}, {threads} threads; peak " +
          ", ".join(f"{name} {value:.0f} GF/s" for name, value in peak.items()))
    if "torch" in runners:
        print(f"peer: PyTorch {runners['torch'].torch.__version__}, scaled_dot_product_attention")
    else:
        print("no peer: PyTorch is not measured")
    rows = []
    print(f"{'':44}{'ms':>9}{'GF/s':>8}{'of peak':>9}{'torch':>8}{'ratio':>7}")
    for case in cases:
        seconds = measure(case, runners, chosen.seconds)
        rate = {name: case.flops() / t * 1e-9 for name, t in seconds.items()}
        ours, best, peer = rate["flashattn"], peak_of(case, peak), rate.get("torch")
        row = f"{case.name():44}{seconds['flashattn'] * 1e3:9.2f}{ours:8.1f}"
        row += f"{ours / best:8.0%} " if best else f"{'':9}"
        row += f"{peer:8.1f}{ours / peer:7.2f}" if peer else f"{'':15}"
        if case.seqlen_q == 1:
            row += f"  {case.kv_bytes() / seconds['flashattn'] * 1e-9:.1f} GB/s of K and V"
        print(f"{row}  {case.to_json()}", flush=True)
        rows.append({"case": case.to_json(), "seconds": seconds["flashattn"], "gflops": ours,
                     "peak_gflops": best, "torch_seconds": seconds.get("torch"),
                     "torch_gflops": peer})
    write(rows, chosen.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
