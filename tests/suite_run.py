"""What the suites of run_all.py share: the arguments, the log of the suite at work, and how the
programs that test are called and counted."""
from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Dict, List, NamedTuple, Optional, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
LOGS = BUILD / "test"


class Count(NamedTuple):
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Count") -> "Count":  # type: ignore[override]
        return Count(*(a + b for a, b in zip(self, other)))

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


class Skip(Exception):
    """A suite that this machine cannot run; the text says why."""


class Failed(Exception):
    """A suite that came to no result; the text says where."""


def isa_with(env: Dict[str, str], python: str = sys.executable) -> str:
    """The instruction set that a library takes here; nothing where it cannot be loaded."""
    program = "import flashattn; print(flashattn.devices()[0].isa)"
    seen = subprocess.run([python, "-c", program], env={**os.environ, **env},
                          capture_output=True, text=True, check=False)
    return seen.stdout.strip()


def runs_here(env: Dict[str, str]) -> bool:
    """Whether the library finds the instruction set that it is asked for."""
    return isa_with(env) == env["FLASHATTN_CPU_ISA"]


def failed_tests(log: bytes) -> List[str]:
    """The tests that pytest's log says have failed so far: see tests/conftest.py."""
    return re.findall(r"^(?:FAILED|ERROR) (.*)\n", log.decode(errors="replace"), re.M)


class Run:
    """What the suites share: the arguments, the log of the suite at work."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.seed = device, seed
        self.log = LOGS / "none.log"
        self.skipped: List[str] = []  # why, of the suite at work
        self.failed: List[str] = []  # which tests, of that suite
        self.ahead: Optional[subprocess.Popen[bytes]] = None  # a build for later suites

    def call(self, command: List[str], env: Optional[Dict[str, str]] = None, timeout: int = 1800,
             check: bool = True) -> int:
        """Runs a command with its output in the suite's log."""
        environment = {**os.environ, **(env or {})}
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            try:
                status = subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout,
                                        stdin=subprocess.DEVNULL, stdout=log,
                                        stderr=subprocess.STDOUT).returncode
            except subprocess.TimeoutExpired:
                raise Failed(f"{command[0]} took more than {timeout} s") from None
        if check and status:
            raise Failed(f"{pathlib.Path(command[0]).name} failed with status {status}")
        return status

    def commands(self, commands: Dict[str, List[str]], env: Dict[str, str]) -> Count:
        """Commands by what they are called, each of which is a test."""
        bad = [name for name, command in commands.items() if self.call(command, env, check=False)]
        self.failed += bad
        return Count(len(commands) - len(bad), len(bad))

    def compile(self, name: str, *options: str, env: Optional[Dict[str, str]] = None,
                targets: Sequence[str] = ()) -> pathlib.Path:
        """Configures, unless that was done with the same options, and builds build/NAME."""
        folder = BUILD / name
        stamp = folder / ".options"
        # Meson keeps the paths of the tools that it found: another PATH changes no build.
        how = [value for name, value in (env or {}).items() if name != "PATH"]
        wanted = "\n".join((str(ROOT), *options, *how))
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            self.call(["meson", "setup", str(folder), "-Dpython=disabled", "-Dtests=true",
                       *options], env)
            stamp.write_text(wanted)
        # Ninja runs Meson again where its files have changed.
        self.call(["ninja", "-C", str(folder), *targets], env)
        return folder

    def meson_test(self, folder: pathlib.Path, env: Optional[Dict[str, str]] = None,
                   without: Sequence[str] = ()) -> Count:
        """The C and C++ tests of a build. without: suites of Meson's that are left out."""
        results = folder / "meson-logs" / "testlog.json"
        results.unlink(missing_ok=True)
        self.call(["meson", "test", "-C", str(folder), "--no-rebuild", "--print-errorlogs",
                   *(f"--no-suite={suite}" for suite in ("python", *without))], env, check=False)
        if not results.exists():
            raise Failed("meson test gave no results")
        tests = [json.loads(line) for line in results.read_text().splitlines()]
        skipped = [test["name"] for test in tests if test["result"] == "SKIP"]
        bad = [test["name"] for test in tests
               if test["result"] not in ("OK", "EXPECTEDFAIL", "SKIP")]
        self.skipped += skipped
        self.failed += bad
        return Count(len(tests) - len(bad) - len(skipped), len(bad), len(skipped))

    def pytest(self, *arguments: str, env: Optional[Dict[str, str]] = None,
               python: str = sys.executable, under: Sequence[str] = (),
               timeout: int = 1800) -> Count:
        """under: a program that runs Python, such as a sanitizer, and its options."""
        # Threads of NumPy's products would mostly wait for each other.
        env = {"OPENBLAS_NUM_THREADS": "1", **(env or {})}
        results = self.log.with_suffix(".xml")
        results.unlink(missing_ok=True)
        start = self.log.stat().st_size if self.log.exists() else 0
        try:
            status = self.call([*under, python, "-m", "pytest", "-q", "-ra", "--timeout=600",
                                f"--junitxml={results}", *arguments], env, timeout, check=False)
        except Failed:
            self.failed += failed_tests(self.log.read_bytes()[start:])
            raise
        if not results.exists():
            raise Failed(f"pytest ended with status {status} and gave no results")
        count = Count()
        root = ElementTree.parse(results).getroot()
        for skip in root.iter("skipped"):
            reason = skip.get("message", "")
            if reason == "collection skipped":  # a whole file: the reason is in the text
                reason = (skip.text or reason).rpartition("Skipped: ")[2].rstrip("\"')")
            self.skipped.append(reason)
        for case in root.iter("testcase"):
            for bad in [*case.findall("failure"), *case.findall("error")]:
                what = bad.get("message", "").partition("\n")[0]
                self.failed.append(f"{case.get('classname')}::{case.get('name')}: {what[:200]}")
        for suite in root.iter("testsuite"):
            total, failures, errors, skipped = (
                int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
            bad = failures + errors
            count += Count(total - bad - skipped, bad, skipped)
        if status not in (0, 1, 5) and not count.failed:
            raise Failed(f"pytest ended with status {status}")
        return count

    @staticmethod
    def set_up(name: str) -> List[str]:
        """The lines that a program of tests/ prints. It says on stderr what it installs, which is
        printed at once, and last, where it fails, why."""
        why = ""
        with subprocess.Popen([sys.executable, str(ROOT / "tests" / name)], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
            assert program.stdout is not None and program.stderr is not None
            for line in program.stderr:
                why = line.strip()
                if not why.startswith("no "):
                    print(why, flush=True)
            lines = program.stdout.read().splitlines()
        if program.returncode:
            raise Skip(why or f"tests/{name} failed")
        return lines

    def torch(self, *arguments: str, env: Dict[str, str]) -> Count:
        """By a Python of its own, which has PyTorch, and is made at the first call."""
        python, *transformers = self.set_up("torch_setup.py")
        newest, *older = [{**env, "PYTHONPATH": folder} for folder in transformers]
        count = self.pytest("tests/pytorch", *arguments, env=newest, python=python)
        for other in older:
            count += self.pytest("tests/pytorch/test_torch_transformers.py", *arguments, env=other,
                                 python=python)
        return count

    def numerics(self, *arguments: str, env: Dict[str, str]) -> Count:
        """All suites have the same randomised configurations, whose truths they share."""
        return self.pytest("tests/numerics", f"--random-seed={self.seed}", *arguments, env=env)

    def library(self, folder: pathlib.Path) -> Dict[str, str]:
        return {"FLASHATTN_LIBRARY": str(folder / "src" / "libflashattn.so")}

    def emulated_amx(self, folder: pathlib.Path, env: Dict[str, str], isa: str) -> Dict[str, str]:
        """env, with the kernels for AMX, tile registers in software, in the place of those of an
        instruction set."""
        self.call(["ninja", "-C", str(folder), f"emulated_amx_on_{isa}"])
        library = folder / "tests" / "amx" / f"libflashattn_amx_on_{isa}.so"
        return {**env, "FLASHATTN_LIBRARY": str(library), "FLASHATTN_CPU_ISA": isa}
