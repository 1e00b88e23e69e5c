"""What small calls take on the CPU, microseconds: how soon threads that wait begin, and what they
do to the calls of a busy machine.

    FLASHATTN_LIBRARY=new.so PYTHONPATH=bindings/python python tests/bench/small_calls.py \\
        [--threads N] [--rounds N] [--sizes N,...] NAME=LIBRARY...

Each library has processes of its own, in turns: threads of one that spin would disturb another's.
Columns, medians over the rounds: the first call of a burst after a pause of 10 ms; the others of
the burst; calls back to back, their median and 90th percentile. Then the last two once more beside
two busy processes a core. fp32, 16 heads of 64."""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any, Dict, List

PAUSE, BURST = 10e-3, 4e-3  # seconds
COLUMNS = ("first", "others", "back to back", "p90")
Rows = Dict[str, List[float]]  # by number of queries and keys, a number a column


def seconds(work: Any) -> float:
    start = time.perf_counter()
    work(0)
    return time.perf_counter() - start


def measure(path: str, threads: int, sizes: List[int]) -> Rows:
    """Of one library, in this process, which loads it here: the parent has none."""
    from flashattn import Device

    import ours
    from cases import Case
    from data import draw
    from memory import Memory
    memory = Memory(Device.CPU)
    build = ours.builds([f"it={path}"], memory, threads)[1]
    rows = {}
    for size in sizes:
        case = Case(heads=16, seqlen_q=size, dim=64)
        work = build.prepare(case, draw(memory, case)).work
        for _ in range(5):
            work(0)
        count = max(2, round(BURST / seconds(work)))
        first, others = [], []
        for _ in range(60 if size < 512 else 30):
            time.sleep(PAUSE)
            first.append(seconds(work))
            others.append(sum(seconds(work) for _ in range(count - 1)) / (count - 1))
        every = sorted(seconds(work) for _ in range(400 if size <= 256 else 50))
        rows[str(size)] = [1e6 * x for x in (statistics.median(first), statistics.median(others),
                                             statistics.median(every), every[len(every) * 9 // 10])]
    return rows


def in_turns(arguments: argparse.Namespace, rounds: int) -> Dict[str, List[Rows]]:
    found: Dict[str, List[Rows]] = {}
    for _ in range(rounds):
        for each in arguments.libraries:
            name, _, path = each.rpartition("=")
            child = subprocess.run(
                [sys.executable, __file__, "--child", "--threads", str(arguments.threads),
                 "--sizes", arguments.sizes, os.path.abspath(path)],
                stdout=subprocess.PIPE, text=True, check=True)
            found.setdefault(name or path, []).append(json.loads(child.stdout.splitlines()[-1]))
    return found


def show(title: str, found: Dict[str, List[Rows]], columns: range) -> None:
    print(title)
    for size in next(iter(found.values()))[0]:
        print(f"{size:>6}  " + "   ".join(
            f"{name}: " + ", ".join(
                f"{COLUMNS[n]} {statistics.median(rows[size][n] for rows in of_one):.0f}"
                for n in columns) for name, of_one in found.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0, the default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="32,64,128,256,512,1024")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("libraries", nargs="+", metavar="NAME=LIBRARY")
    arguments = parser.parse_args()
    if arguments.child:
        sizes = [int(size) for size in arguments.sizes.split(",")]
        print(json.dumps(measure(arguments.libraries[0], arguments.threads, sizes)))
        return
    show("by itself", in_turns(arguments, arguments.rounds), range(4))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(2 * (os.cpu_count() or 1))]
    try:
        show("beside two busy processes a core", in_turns(arguments, 1), range(2, 4))
    finally:
        for process in busy:
            process.kill()


if __name__ == "__main__":
    main()
