"""./run bench on the CPU: a row for each case, beside the machine's own peak, PyTorch where it is
installed, and other builds of the library. All take turns in rotating order."""
from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import functools
import pathlib
import statistics
import subprocess
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import flashattn
from cases import Case
from data import NORMAL, draw, on_normal_data
from memory import Memory
import chart
from ours import FlashAttn, Refused, builds
from paired import ratio

try:
    import torch
except ImportError:
    torch = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
Work = Callable[[], Any]
WIDTH = 56  # of a row's name
_BURST = 4e-3  # seconds: a turn of short calls
_PAUSE = 10e-3  # in which threads that spin after one runner's work leave the cores to the next


class Peak:
    """What as many threads reach at the most: GFLOP/s of register-only loops, by the arithmetic
    that suits a type; where a case decodes, GB/s of reading as many bytes."""

    def __init__(self, threads: int, isa: str) -> None:
        self.program = ROOT / "build" / "release" / "tests" / "bench" / f"peak_{isa}"
        self.threads = threads
        self.running: Dict[str, Any] = {}

    def now(self, case: Case) -> Optional[float]:
        if not self.program.exists():
            return None
        kind = ["bf16" if case.dtype == "bf16" else "f32"]
        if case.decodes:
            kind = ["read", str(int(case.least_bytes()))]
        if kind[-1] not in self.running:
            for process in self.running.values():  # their memory is as large as a cache
                process.stdin.close()
            self.running = {kind[-1]: subprocess.Popen(
                [str(self.program), str(self.threads), *kind], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True, bufsize=1)}
        process = self.running[kind[-1]]
        process.stdin.write("\n")
        return float(process.stdout.readline())


def sdpa(case: Case) -> Optional[Work]:
    """torch.nn.functional.scaled_dot_product_attention; None for what it does not compute, and for
    a first token, which its own numbers do not have."""
    if not case.plain or case.first_token or case.dtype_kv:
        return None
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    data = {name: torch.randn(shape).to(dtype).transpose(1, 2).contiguous()
            for name, shape in case.shapes().items()}
    if case.latent:
        data["v"] = data["k"][..., :case.value_dim]
    grouped = {"enable_gqa": True} if case.kv_heads != case.heads else {}

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            data["q"], data["k"], data["v"], is_causal=case.causal,
            dropout_p=case.dropout, **grouped)

    if case.op == "forward":
        return torch.no_grad()(forward)
    inputs = [data[name].requires_grad_() for name in "qkv"]
    out = forward()
    return lambda: torch.autograd.grad(out, inputs, data["dout"], retain_graph=True)


def keep_memory() -> None:
    """Memory that is freed stays with the process, where the C library can be told: PyTorch makes
    its gradients anew in each call, and pages for them are not what is measured."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in ((-1, 1 << 30), (-3, 32 << 20)):  # M_TRIM_, M_MMAP_THRESHOLD
            library.mallopt(option, value)


def works(case: Case, ours: List[FlashAttn], with_torch: bool) -> Dict[str, Work]:
    """What does the case once, by who computes it."""
    memory = ours[0].memory
    arrays = draw(memory, case)
    found: Dict[str, Work] = {}
    for build in ours:
        try:
            found[build.name] = functools.partial(build.prepare(case, arrays).work, 0)
        except Refused as refused:
            print(f"{case.name():{WIDTH}}  {build.name} refused: {refused}")
    if case.first_token and ours[0].name in found:
        usual = on_normal_data(case)
        found[NORMAL] = functools.partial(ours[0].prepare(usual, draw(memory, usual)).work, 0)
    peer = sdpa(case) if with_torch else None
    return {**found, "torch": peer} if peer else found


def measure(case: Case, work: Dict[str, Work], seconds: float,
            peak: Peak) -> Tuple[Dict[str, List[float]], Optional[float]]:
    """Seconds of a call of each by round, taking turns for about so long each, and which part of
    the machine's peak ours reaches, beside each of its turns. Short calls follow each other in
    bursts, as they do in programs, with a pause before each."""
    times: Dict[str, List[float]] = {name: [] for name in work}
    parts: List[float] = []
    order = list(work)
    calls = {}
    for name, run in work.items():
        run()
        start = time.perf_counter()
        run()
        calls[name] = max(1, round(_BURST / (time.perf_counter() - start)))
    end = time.perf_counter() + seconds * len(work)
    while min(len(t) for t in times.values()) < 5 or time.perf_counter() < end:
        for name in order:
            run, count = work[name], calls[name]
            if len(order) > 1:
                time.sleep(_PAUSE)
            if count > 1:
                run()  # wakes threads
            start = time.perf_counter()
            for _ in range(count):
                run()
            times[name].append((time.perf_counter() - start) / count)
        order.append(order.pop(0))
        rate = peak.now(case)
        if rate:
            parts.append(case.amount() / times["flashattn"][-1] * 1e-9 / rate)
    return times, statistics.median(parts) if parts else None


def write(rows: List[Dict[str, Any]], table: Optional[pathlib.Path]) -> None:
    if not table or not rows:
        return
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(cases: List[Case], options: argparse.Namespace) -> int:
    if any(case.parts for case in cases):
        raise SystemExit("bench: merges, which have no GFLOP/s, are measured on a GPU only")
    device = flashattn.devices()[0]
    threads = options.threads or device.threads
    keep_memory()
    ours = builds(options.baseline, Memory(flashattn.Device.CPU), threads)
    with_torch = torch is not None and not options.alone
    peak = Peak(threads, device.isa)
    print(f"{device.name}, {device.isa}, {threads} threads")
    if with_torch:
        torch.set_num_threads(threads)
        print(f"peer: PyTorch {torch.__version__}, scaled_dot_product_attention")
    else:
        print("no peer: PyTorch is not measured")
    columns = ["torch", *(build.name for build in ours[1:])]
    columns += [NORMAL] if any(case.first_token for case in cases) else []
    width = max(8, *(len(name) + 1 for name in columns))
    print("ratios: medians of rounds, with 95 % intervals")
    print(f"{'':{WIDTH}}{'ms':>9}{'GF/s':>8}{'of peak':>9}" +
          "".join(f"{name:>{width}}{'ratio':>20}" for name in columns))
    rows = []
    for case in cases:
        work = works(case, ours, with_torch)
        if "flashattn" not in work:
            continue
        times, part = measure(case, work, options.seconds, peak)
        seconds = {name: statistics.median(t) for name, t in times.items()}
        ratios = {name: ratio(times["flashattn"], t) for name, t in times.items()}
        rate = {name: case.flops() / t * 1e-9 for name, t in seconds.items()}
        mine = rate["flashattn"]
        row = f"{case.name():{WIDTH}}{seconds['flashattn'] * 1e3:9.2f}{mine:8.1f}"
        row += f"{part:8.0%} " if part else f"{'':9}"
        for name in columns:
            row += (f"{rate[name]:{width}.1f}{str(ratios[name]):>20}" if name in rate
                    else f"{'':{width + 20}}")
        if case.seqlen_q == 1:
            row += f"  {case.least_bytes() / seconds['flashattn'] * 1e-9:.1f} GB/s of K and V"
        print(f"{row}  {case.to_json()}", flush=True)
        line = {"group": case.group(), "name": case.name(), "case": case.to_json(),
                "of_peak": part}
        for name in ["flashattn", *columns]:
            line.update({f"{name}_seconds": seconds.get(name), f"{name}_gflops": rate.get(name)})
        for name in columns:
            found = ratios.get(name)
            line.update({f"{name}_ratio": found and found.median, f"{name}_ratio_low":
                         found and found.low, f"{name}_ratio_high": found and found.high})
        rows.append(line)
    table = options.csv or (options.plot and ROOT / "build" / "bench" / "cpu.csv")
    write(rows, table)
    if options.plot and rows:
        print(chart.draw(table, options.plot))
    return 0
