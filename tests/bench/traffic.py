"""Bytes between a GPU and its memory, by Nsight Compute: those of attention with stored scores grow
with tokens / dim beside those of attention without (Dao et al. 2022, theorem 2).

python tests/bench/traffic.py --device cuda    what ncu looks at: the calls, one after another
"""
from __future__ import annotations

import argparse
import csv
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch

METRIC = "dram__bytes.sum"
MARK = "spin_kernel"  # torch.cuda._sleep()'s; it follows each call
# Tensors of 128 MiB: what a kernel leaves in an L2 of 50 MB, to be written later, is not counted.
TOKENS, WIDTH = 32768, 2048
SHAPES = tuple((n, dim) for dim in (64, 128) for n in (512, 1024, 2048, 4096))
WITHOUT_MEMORY = "without the memory: call"
SECONDS = 300  # of ncu
# How often q or one of its size is read or written at least, forward and backward.
LEAST = {"forward": 4, "backward": 8}
Call = Tuple[int, int, str, str]  # tokens of a sequence, dim, runner, pass


def calls(runners: Sequence[str], shapes: Sequence[Tuple[int, int]]) -> List[Call]:
    return [(n, dim, runner, which) for n, dim in shapes for runner in runners
            for which in LEAST]


def program() -> str:
    """ncu's path; nothing where there is none."""
    found = [shutil.which("ncu"), *sorted(glob.glob("/usr/local/cuda*/bin/ncu"), reverse=True),
             *sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu"), reverse=True)]
    return next(filter(None, found), "")


def measure(device: str, runners: Sequence[str],
            shapes: Sequence[Tuple[int, int]] = SHAPES) -> Dict[Call, float]:
    """Bytes of each call, 0 of one for which the memory did not suffice. RuntimeError: why there
    are none."""
    ncu = program()
    if not ncu:
        raise RuntimeError("no ncu: neither on PATH nor where CUDA and Nsight Compute put it")
    command = [ncu, "--profile-from-start", "off", "--metrics", METRIC, "--csv", "--page", "raw",
               "--print-units", "base", sys.executable, str(pathlib.Path(__file__).resolve()),
               "--device", device, "--runners", *runners,
               "--shapes", *[f"{n},{dim}" for n, dim in shapes]]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              env=environment, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"ncu took more than {SECONDS} s") from None
    said = done.stdout + done.stderr
    errors = [line for line in said.splitlines() if "ERR_NVGPUCTRPERM" in line or
              line.startswith("==ERROR==")]
    if errors or done.returncode:
        raise RuntimeError(f"ncu ended with status {done.returncode}: "
                           + (errors[0] if errors else said.strip()[-300:]))
    expected = calls(runners, shapes)
    found = read(done.stdout, expected)
    for number in re.findall(rf"^{WITHOUT_MEMORY} (\d+)$", done.stdout, re.M):
        found[expected[int(number)]] = 0.0
    return found


def read(text: str, expected: Sequence[Call]) -> Dict[Call, float]:
    """What ncu --csv --page raw printed, whose second line says the units."""
    rows = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))
    if not rows or rows[0].get(METRIC) != "byte":
        raise RuntimeError(f"ncu did not say {METRIC} in bytes: {text.strip()[-300:]}")
    sums, each = [], 0.0
    for row in rows[1:]:
        if MARK in row["Kernel Name"]:
            sums.append(each)
            each = 0.0
        else:
            each += float(row[METRIC].replace(",", ""))
    if len(sums) != len(expected):
        raise RuntimeError(f"ncu saw {len(sums)} calls, and there are {len(expected)}")
    return dict(zip(expected, sums))


def lines(found: Dict[Call, float], runners: Sequence[str]) -> Iterator[Dict[str, Any]]:
    """A row for each shape and pass."""
    for n, dim, which in dict.fromkeys((n, dim, which) for n, dim, _, which in found):
        given = {runner: found[n, dim, runner, which] for runner in runners}
        yield {"table": "traffic", "row": f"{which}, N {n}, d {dim}", "tokens_over_dim": n / dim,
               "least_bytes": LEAST[which] * TOKENS * WIDTH * 2,
               **{f"{runner}_bytes": value or None for runner, value in given.items()}}


def _main() -> None:
    import papers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--runners", nargs="+", default=list(papers.RUNNERS))
    parser.add_argument("--shapes", nargs="+", default=[f"{n},{dim}" for n, dim in SHAPES])
    options = parser.parse_args()
    runs = Runs(options.device == "cuda")
    total = TOKENS if runs.on_gpu else 512
    dtype = torch.bfloat16 if runs.on_gpu else torch.float32
    for n, dim in (map(int, shape.split(",")) for shape in options.shapes):
        q, k, v, dout = (torch.randn(max(total // n, 1), n, WIDTH // dim, dim, dtype=dtype,
                                     device=options.device) for _ in range(4))
        for runner in options.runners:
            attention = papers.RUNNERS[runner]
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            for counted in (False, True):
                o = runs.run(lambda: attention(*leaves, False), counted)
                runs.run(lambda: None if o is None else torch.autograd.grad(o, leaves, dout),
                         counted)


class Runs:
    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.counted = on_gpu, 0

    def run(self, work: Callable[[], Any], counted: bool) -> Any:
        """What work returns, or None without the memory for it. counted: a mark follows."""
        counts = counted and self.on_gpu
        if counts:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
        try:
            found = work()
        except torch.OutOfMemoryError:
            found = None
        if found is None:
            print(f"{WITHOUT_MEMORY} {self.counted}")
        if counts:
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
        self.counted += counted
        return found


if __name__ == "__main__":
    _main()
