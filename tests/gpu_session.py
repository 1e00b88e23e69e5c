"""What a GPU is needed for, on a machine without a network: builds, checks and figures in steps.

    python tests/gpu_session.py --out FOLDER [--base TREE] [--jobs N] STEP...

Steps, each with a limit of its own in seconds after a colon, if wanted (numerics:420):
    build      /tmp/flashattn-gpu/new from this tree and, with --base, .../base from another tree
    numerics   tests/numerics
    waits      the one test that must run alone: a call does not wait for the GPU
    hopper     the smoke tests with the Hopper backend required (a refusal is a failure)
    memcheck   hostile device data under compute-sanitizer
    torch[:NAME]   tests/pytorch, or test_torch_NAME.py of it, on the GPU alone
    jax        tests/xla with JAX's arrays on the GPU
    programs:FOLDER   every program NN_*.py of a folder, each with --device
    papers, context-parallel   the bench's presets of these names; the latter on all GPUs
    cost       what an eager call from PyTorch takes beside its kernel, and the tests of its limits
    accuracy   after numerics: tests/data/accuracy.txt with this GPU's lines
    bench:PRESET[:WORDS]   rows of a preset, beside --base where it is given, without peers
    peers:PRESET[:WORDS]   the same beside the peers that are installed

Python needs cffi, NumPy, ml_dtypes, pytest, pytest-timeout, pytest-xdist and hypothesis on
PYTHONPATH; build needs meson and ninja on PATH, torch and cost a PyTorch that sees the GPU. Tests
find the package of this tree themselves, and the library by FLASHATTN_LIBRARY, which each step
sets. By hand, one file of tests on the GPU:

    FLASHATTN_LIBRARY=/tmp/flashattn-gpu/new/src/libflashattn.so \\
        python -m pytest tests/pytorch/test_torch_cost.py --device=cuda

All that a step says lies in FOLDER. The name of a test that fails is printed as it comes, also
where the step is cut by its limit; the last lines are a table: step, seconds, result, and the names
of the tests that failed."""
from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import sys
import threading
import time
from typing import Dict, List

from suite_run import ROOT, Failed, Run, failed_tests

BUILDS = pathlib.Path("/tmp/flashattn-gpu")
WAITS = "tests/numerics/test_gpu_streams.py::test_a_call_does_not_wait"


def library(name: str) -> str:
    return str(BUILDS / name / "src" / "libflashattn.so")


def environment() -> Dict[str, str]:
    paths = [str(ROOT / "bindings" / "python"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "FLASHATTN_LIBRARY": library("new")}


def build(run: Run, arguments: argparse.Namespace, limit: int) -> str:
    """Both trees side by side: much of a build is one long compilation."""
    trees = {"new": str(ROOT), **({"base": arguments.base} if arguments.base else {})}
    cuda = "disabled" if arguments.device == "cpu" else "enabled"
    run.call(["sh", "-c", " ".join(
        f"(cd {tree} && {{ [ -f {BUILDS / name}/build.ninja ] || {sys.executable} -m "
        f"mesonbuild.mesonmain setup {BUILDS / name} -Dpython=disabled -Dcuda={cuda} "
        f"-Dtests=false '-Dcpu_isas=[]'; }} && ninja -C {BUILDS / name} -j {arguments.jobs}) &"
        for name, tree in trees.items()) + " wait"], environment(), limit)
    missing = [name for name in trees if not os.path.exists(library(name))]
    if missing:
        raise Failed(f"no library of {', '.join(missing)}")
    return "built"


def bench(run: Run, arguments: argparse.Namespace, preset: str, limit: int, *options: str) -> str:
    run.call([sys.executable, "tests/bench/bench.py", "--device", arguments.device, "--preset",
              preset, "--csv", str(run.log.with_suffix(".csv")), *options], environment(), limit)
    return show(run)


def rows(run: Run, arguments: argparse.Namespace, words: List[str], limit: int,
         *options: str) -> str:
    """The rows of a preset, words[0], whose names hold the other words; beside --base."""
    only = ["--only", " ".join(words[1:])] if words[1:] else []
    base = ["--baseline", f"base={library('base')}"] if arguments.base else []
    return bench(run, arguments, words[0], limit, *only, *base, *options)


def cost(run: Run, arguments: argparse.Namespace, limit: int) -> str:
    run.call([sys.executable, "tests/bench/torch_cost.py", "--device", arguments.device],
             environment(), limit)
    return show(run)


def show(run: Run) -> str:
    print(run.log.read_text(encoding="utf-8")[-3500:], flush=True)
    return "see the log"


def follow(run: Run) -> None:
    """Prints the names of failed tests as they come to the log of the step at work."""
    log, seen = run.log, set()
    while True:
        if run.log != log:
            log, seen = run.log, set()
        for name in failed_tests(log.read_bytes()) if log.exists() else ():
            if name not in seen:  # a summary repeats it
                print(f"  failed: {name}", flush=True)
                seen.add(name)
        time.sleep(1)


def programs(run: Run, arguments: argparse.Namespace, folder: str, limit: int) -> str:
    for path in sorted(pathlib.Path(folder).glob("[0-9][0-9]_*.py")):
        if run.call([sys.executable, str(path), "--device", arguments.device], environment(), limit,
                    check=False):
            run.failed.append(path.name)
    return f"{len(run.failed)} failed"


def step(run: Run, arguments: argparse.Namespace, name: str, words: List[str], limit: int) -> str:
    def tests(*paths: str, jobs: int = arguments.jobs, under: str = "", **env: str) -> str:
        beside = ["-n", str(jobs)] if jobs > 1 else []
        return str(run.pytest(*paths, *beside, env={**environment(), **env}, under=under.split(),
                              timeout=limit))

    numerics, device = "tests/numerics", f"--device={arguments.device}"
    steps = {
        "build": lambda: build(run, arguments, limit),
        "numerics": lambda: tests(numerics, device, f"--deselect={WAITS}"),
        "waits": lambda: tests(WAITS, device, jobs=1),
        "hopper": lambda: tests(numerics, device, "-m", "smoke", FLASHATTN_BACKEND="sm90"),
        "memcheck": lambda: tests(*(f"{numerics}/test_{name}.py" for name in (
            "hostile", "append", "quantize", "gpu_cache")), device, "-k", "hostile", jobs=1,
                                  under="compute-sanitizer --error-exitcode 9"),
        "torch": lambda: tests(
            "/".join(["tests/pytorch", *(f"test_torch_{word}.py" for word in words)]), device,
            jobs=min(arguments.jobs, 6)),
        "jax": lambda: tests("tests/xla", jobs=min(arguments.jobs, 4),
                             JAX_PLATFORMS=f"{arguments.device},cpu",
                             XLA_PYTHON_CLIENT_PREALLOCATE="false"),
        "programs": lambda: programs(run, arguments, ":".join(words), limit),
        "papers": lambda: bench(run, arguments, name, limit),
        "context-parallel": lambda: bench(run, arguments, name, limit),
        "cost": lambda: cost(run, arguments, limit) + "; limits: " + tests(
            "tests/pytorch/test_torch_cost.py", device, jobs=1),
        "bench": lambda: rows(run, arguments, words, limit, "--alone"),
        "peers": lambda: rows(run, arguments, words, limit),
    }
    if name == "accuracy":
        run.call([sys.executable, "-m", "tests.numerics.accuracy", "--write"], environment(), limit)
        return str(shutil.copy(ROOT / "tests" / "data" / "accuracy.txt", arguments.out))
    least, most = {"bench": (1, 9), "peers": (1, 9), "programs": (1, 9), "torch": (0, 1)}.get(
        name, (0, 0))
    if name not in steps or not least <= len(words) <= most:
        raise Failed("no such step; --help names them")
    return steps[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--base", help="another tree of this project, to be timed in turns")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"],
                        help="cpu: to try this")
    parser.add_argument("step", nargs="+")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.device, 0)
    threading.Thread(target=follow, args=(run,), daemon=True).start()
    table = []
    for text in arguments.step:
        name, *words = text.split(":")
        limit = int(words.pop()) if words and words[-1].isdigit() else 600
        run.log = arguments.out / (re.sub("[^A-Za-z0-9]+", "-", text) + ".log")
        run.log.unlink(missing_ok=True)
        run.failed.clear()
        start = time.monotonic()
        try:
            result = step(run, arguments, name, words, limit)
        except Failed as why:
            result = f"failed: {why}"
        line = f"{text:<28} {time.monotonic() - start:>5.0f} s  {result}"
        table += [line, *(f"  failed: {test}" for test in run.failed)]
        print(line, flush=True)
        (arguments.out / "table.txt").write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n".join(table[:100]))


if __name__ == "__main__":
    main()
