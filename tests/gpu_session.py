"""What a GPU is needed for, on a machine without a network: builds, checks and figures in steps.

    python tests/gpu_session.py --out FOLDER [--base TREE] [--jobs N] STEP...

Steps, each with a limit of its own in seconds after a colon, if wanted (numerics:330):
    build      /tmp/flashattn-gpu/new from this tree and, with --base, .../base from another tree
    numerics   tests/numerics --device cuda
    waits      the one test that must run alone: a call does not wait for the GPU
    hopper     the smoke tests with the Hopper backend required (a refusal is a failure)
    memcheck   hostile device data under compute-sanitizer
    torch      tests/pytorch
    accuracy   after numerics: tests/data/accuracy.txt with this GPU's lines
    bench:PRESET[:WORDS]   rows of a preset, beside --base where it is given, without peers
    peers:PRESET[:WORDS]   the same beside the peers that are installed

Python needs cffi, NumPy, ml_dtypes, pytest, pytest-timeout, pytest-xdist, hypothesis, meson and
ninja on PYTHONPATH and PATH. All that a step says lies in FOLDER; names of failed tests in
FOLDER/failed.txt; the last lines are a table: step, seconds, result."""
from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Dict, List, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILDS = pathlib.Path("/tmp/flashattn-gpu")


class Result(NamedTuple):
    step: str
    seconds: float
    text: str


class Session:
    """The arguments, and what was found so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out, self.base = pathlib.Path(arguments.out), arguments.base
        self.jobs, self.device = arguments.jobs, arguments.device
        self.out.mkdir(parents=True, exist_ok=True)
        self.results: List[Result] = []

    def library(self, name: str) -> pathlib.Path:
        return BUILDS / name / "src" / "libflashattn.so"

    def environment(self, **more: str) -> Dict[str, str]:
        paths = [str(ROOT / "bindings" / "python"), os.environ.get("PYTHONPATH", "")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "FLASHATTN_LIBRARY": str(self.library("new")), "OPENBLAS_NUM_THREADS": "1", **more}

    def call(self, name: str, command: List[str], limit: float, env: Dict[str, str]) -> str:
        """Runs a command, its output in FOLDER/NAME.log; what it said."""
        log = self.out / f"{re.sub('[^A-Za-z0-9]+', '-', name)}.log"
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                                       stdout=file, stderr=subprocess.STDOUT,
                                       start_new_session=True)
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 15)
                process.wait()
                file.write(f"\nstopped after {limit:.0f} s\n")
        return log.read_text(encoding="utf-8", errors="replace")

    def build(self, limit: float) -> str:
        trees = {"new": ROOT, **({"base": pathlib.Path(self.base)} if self.base else {})}
        cuda = "disabled" if self.device == "cpu" else "enabled"
        script = " & ".join(
            f"(cd {tree} && ([ -f {BUILDS / name}/build.ninja ] || python3 -m mesonbuild.mesonmain "
            f"setup {BUILDS / name} -Dpython=disabled -Dcuda={cuda} -Dtests=false "
            f"'-Dcpu_isas=[]') && ninja -C {BUILDS / name} -j {self.jobs})"
            for name, tree in trees.items())
        said = self.call("build", ["bash", "-c", f"{script} & wait"], limit, self.environment())
        missing = [name for name in trees if not self.library(name).exists()]
        spills = re.findall(r"[1-9]\d* bytes (?:spill|stack)", said)
        return f"{'missing: ' + ', '.join(missing) if missing else 'built'}, {len(spills)} spills"

    def pytest(self, step: str, limit: float, *arguments: str, command: List[str] = [],
               **env: str) -> str:
        said = self.call(step, [*command, sys.executable, "-m", "pytest", "-q", "-ra",
                                "--timeout=300", *arguments], limit, self.environment(**env))
        failed = re.findall(r"^(?:FAILED|ERROR) .*", said, re.M)
        with open(self.out / "failed.txt", "a", encoding="utf-8") as file:
            file.writelines(f"{step}: {line}\n" for line in failed)
        errors = re.findall(r"ERROR SUMMARY: .*", said)
        last = re.findall(r"^.*\d+ (?:passed|failed|skipped|error).*$|^stopped .*$", said, re.M)
        return "; ".join([last[-1] if last else "no result", *errors[-1:]])

    def bench(self, step: str, limit: float, preset: str, words: str, alone: bool) -> str:
        command = [sys.executable, "tests/bench/bench.py", "--device", self.device,
                   "--preset", preset, "--csv",
                   str(self.out / f"{preset}-{words.replace(' ', '-') or 'all'}.csv")]
        command += ["--only", words] if words else []
        command += ["--alone"] if alone else []
        command += ["--baseline", f"base={self.library('base')}"] if self.base else []
        said = self.call(step, command, limit, self.environment())
        print(said[-3500:], flush=True)
        return said.strip().splitlines()[-1][:100] if said.strip() else "no figures"

    def run(self, step: str) -> str:
        name, *rest = step.split(":")
        limit = float(rest.pop()) if rest and rest[-1].isdigit() else 600
        device, workers = f"--device={self.device}", ("-n", str(self.jobs))
        waits = "tests/numerics/test_gpu_calls.py::test_a_call_does_not_wait"
        if name == "build":
            return self.build(limit)
        if name == "numerics":
            return self.pytest(name, limit, "tests/numerics", device, *workers,
                               f"--deselect={waits}")
        if name == "waits":
            return self.pytest(name, limit, waits, device)
        if name == "hopper":
            return self.pytest(name, limit, "tests/numerics", device, *workers, "-m", "smoke",
                               FLASHATTN_BACKEND="sm90")
        if name == "memcheck":
            return self.pytest(name, limit, "tests/numerics/test_hostile.py", device,
                               command=["compute-sanitizer", "--tool", "memcheck"])
        if name == "torch":
            return self.pytest(name, limit, "tests/pytorch", "-n", str(min(self.jobs, 6)))
        if name == "accuracy":
            self.call(name, [sys.executable, "-m", "tests.numerics.accuracy", "--write"], limit,
                      self.environment())
            shutil.copy(ROOT / "tests" / "data" / "accuracy.txt", self.out)
            return "accuracy.txt lies in the folder"
        if name in ("bench", "peers") and rest:
            return self.bench(step, limit, rest[0], " ".join(rest[1:]), name == "bench")
        raise SystemExit(f"gpu_session.py: no step {step}; --help names them")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--base", help="another tree of this project, to be timed in turns")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"],
                        help="cpu: to try this")
    parser.add_argument("step", nargs="+")
    session = Session(parser.parse_args())
    for step in parser.parse_args().step:
        start = time.monotonic()
        text = session.run(step)
        session.results.append(Result(step, time.monotonic() - start, text))
        print(f"--- {step}: {text} ({session.results[-1].seconds:.0f} s)", flush=True)
    table = [f"{r.step:<28} {r.seconds:>5.0f} s  {r.text}" for r in session.results]
    (session.out / "table.txt").write_text("\n".join(table) + "\n")
    failed = session.out / "failed.txt"
    if failed.exists():
        print("".join(failed.read_text().splitlines(True)[:60]))
    print("\n".join(table))


if __name__ == "__main__":
    main()
