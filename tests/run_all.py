"""./run test: the suites that take no more than minutes, a line each, and the sum in the last line.
With --cuda every suite.

Builds into build/; what a suite said lies in build/test/SUITE.log.
"""
from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Optional

from suite_run import BUILD, LOGS, ROOT, Count, Failed, Run, Skip, isa_with, runs_here

ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx")
# Tests of bindings that compile a language's packages first.
OTHER_LANGUAGES = ("test_julia", "test_rust", "test_rust_gpu")
# The suite arm runs these files of the numerics.
ARM_NUMERICS = ("listed", "golden", "special", "eightbit", "quantize", "append")
# An emulated processor for each instruction set, on which the library takes it by itself.
ARM_PROCESSORS = {"neon": "cortex-a72", "sve": "a64fx,sve512=off", "neon_bf16": "max"}
# Suites that --cuda runs, or their names: they install or build much before they test.
LONG = ("torch", "jax", "languages", "docs", "wheel", "packaging", "first-results", "mutations",
        "arm", "asan", "tsan", "fuzz")
# For pytest: most of a test is one thread's work, on the emulator, too, which has several.
SIDE_BY_SIDE = ("-n", str(min(os.cpu_count() or 1, 8)))


def style(run: Run) -> Count:
    """Checks of the sources count as one test, and as one for each that fails: they are no tests of
    the library."""
    count = run.pytest("tests/test_style.py", env=run.library(release(run)))
    return Count(1 if count.passed and not count.failed else 0, count.failed, 0)


def mutations(run: Run) -> Count:
    """Wrong formulas in the tests' own reference are noticed: see tests/mutations.py."""
    sys.path.insert(0, str(ROOT / "tests"))
    names = importlib.import_module("mutations").MUTATIONS
    program = str(ROOT / "tests" / "mutations.py")
    return run.commands({name: [sys.executable, program, name] for name in names},
                        run.library(release(run)))


def quick(run: Run) -> Count:
    """Two minutes, between two edits: the C and C++ tests, the smoke tests of the numerics on this
    processor's best instruction set, and Python."""
    folder = release(run)
    env = run.library(folder)
    count = run.meson_test(folder)
    count += run.numerics("-m", "smoke", *SIDE_BY_SIDE, env=env)
    return count + run.pytest(*python_tests(), *SIDE_BY_SIDE, env=env)


def python_tests() -> List[str]:
    return [str(path) for path in sorted((ROOT / "tests" / "bindings").glob("test_*.py"))
            if path.stem not in OTHER_LANGUAGES]


def release(run: Run) -> pathlib.Path:
    """The build that ./run made; for a GPU one with its kernels."""
    if run.device != "cpu":
        return run.compile("cuda-test", "-Dcuda=enabled", env=with_nvcc())
    folder = BUILD / "release"
    run.call(["ninja", "-C", str(folder)])
    return folder


def numerics(run: Run, isa: Optional[str]) -> Count:
    folder = release(run)
    env, some = run.library(folder), []
    if isa:
        env["FLASHATTN_CPU_ISA"] = isa
        if isa == "avx512_amx" and not runs_here(env):
            # Without AVX-512 by the baseline, which takes long.
            wide = runs_here({**env, "FLASHATTN_CPU_ISA": "avx512"})
            env = run.emulated_amx(folder, env, "avx512" if wide else "baseline")
            some = [] if wide else ["-m", "smoke"]
        # avx512_bf16 has the same source, but for products of bf16, and its run has all tests.
        if isa == "avx512" and runs_here({**env, "FLASHATTN_CPU_ISA": "avx512_bf16"}):
            some = ["-m", "smoke"]
        if not runs_here(env):
            raise Skip(f"this processor or compiler has no {isa}")
    workers = SIDE_BY_SIDE if run.device == "cpu" else ()
    return run.numerics(f"--device={run.device}", *workers, *some, env=env)


def jax(run: Run) -> Count:
    """flashattn.jax, whose package ./run has installed where it could."""
    program = "import jax; jax.ffi.include_dir()"  # which old versions lack
    if subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode:
        raise Skip("no JAX of 0.6 or newer: it could not be installed for this Python")
    return run.pytest("tests/xla", *SIDE_BY_SIDE, env=run.library(release(run)))


def best_isas(run: Run) -> str:
    """For a build of the best instruction set of this processor and no more."""
    best = isa_with(run.library(release(run)))
    isas = [isa for isa in ISAS[1:] if isa == best or (isa == "avx512" and best.startswith(isa))]
    return f"-Dcpu_isas={isas}"


def sanitized(run: Run, name: str, *options: str, **how: Any) -> pathlib.Path:
    """A build with checks in every line, with which kernels take three to four times as long to
    compile."""
    return run.compile(name, *options, best_isas(run), "-Db_lundef=false",
                       "-Dbuildtype=debugoptimized", **how)


def runtime_of(name: str) -> str:
    """The file of a sanitizer's run-time library, to be loaded before Python."""
    compiler = os.environ.get("CC", "cc").split()
    path = subprocess.run([*compiler, f"-print-file-name=lib{name}.so"], capture_output=True,
                          text=True, check=False).stdout.strip()
    if not os.path.isabs(path):
        raise Skip(f"the compiler has no lib{name}.so")
    return os.path.realpath(path)


def asan(run: Run) -> Count:
    """Memory errors and undefined behaviour."""
    preload = runtime_of("asan")
    folder = sanitized(run, "asan", "-Db_sanitize=address,undefined")
    # No quarantine: a test looks at the growth of memory.
    common = "allocator_may_return_null=1:quarantine_size_mb=0:thread_local_quarantine_size_kb=0"
    env = {"ASAN_OPTIONS": f"detect_leaks=1:{common}",
           "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    count = run.meson_test(folder, env)
    # Python leaks by design.
    env.update(run.library(folder), LD_PRELOAD=f"{preload} {runtime_of('ubsan')}",
               ASAN_OPTIONS=f"detect_leaks=0:{common}")
    count += run.numerics("-m", "smoke", *SIDE_BY_SIDE, env=env)
    # Loads and stores of tiles, which the sanitizer does not see in assembly.
    if runs_here({**env, "FLASHATTN_CPU_ISA": "avx512"}):
        env = run.emulated_amx(folder, env, "avx512")
        count += run.numerics("-m", "smoke", *SIDE_BY_SIDE, env=env)
    return count


def arm(run: Run) -> Count:
    """AArch64, cross-compiled and emulated: the C and C++ tests, and for each instruction set what
    of the numerics' smoke tests reaches the operations of its vectors. The emulator neither forks a
    process with threads nor gives back the memory of threads that end, and a limit of memory or of
    stacks is its own: the suite native of Meson's holds the tests of these, and of other programs
    of the machine's."""
    setup = subprocess.run(["bash", str(ROOT / "tests" / "arm_setup.sh")], capture_output=True,
                           text=True, check=False)
    if setup.returncode:
        raise Skip((setup.stderr.strip().splitlines() or ["tests/arm_setup.sh failed"])[-1])
    folder = run.compile("arm-test", "-Dcuda=disabled", f"--cross-file={BUILD / 'arm/cross.ini'}")
    count = run.meson_test(folder, without=["native"])
    run.skipped.append("tests that an emulator of processors cannot run: Meson's suite native")
    tests = [f"tests/numerics/test_{name}.py" for name in ARM_NUMERICS]
    python = str(BUILD / "arm" / "python")

    def on(processor: str, wanted: str, **more: str) -> Dict[str, str]:
        env = {**run.library(folder), "QEMU_CPU": processor, **more}
        taken = isa_with(env, python)
        if taken != wanted:
            raise Failed(f"on {processor} the library takes {taken or 'nothing'}, not {wanted}")
        return env

    # Vectors of 512 bits are not what the kernels for sve are compiled for.
    on("a64fx", "neon", FLASHATTN_CPU_ISA="sve")
    for isa, processor in ARM_PROCESSORS.items():
        env = on(processor, isa)  # by itself
        count += run.pytest(*tests, "-m", "smoke", "-p", "no:faulthandler",
                            f"--random-seed={run.seed}", env=env, python=python)
    return count


def fuzz(run: Run) -> Count:
    """The seed corpus, one of it as AFL gives it, and a minute of random and of libFuzzer's inputs.
    Half of it begins with a constant seed, so that a change is judged by what it did, half with
    that of the run."""
    sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
    fuzzer = importlib.import_module("fuzz").Fuzzer(run)
    commands = fuzzer.suite(["42", str(run.seed)])
    run.skipped += [] if fuzzer.libfuzzer else [fuzzer.without_libfuzzer]
    count = run.commands({" ".join(command): command for command in commands}, fuzzer.env)
    return count + Count(skipped=len(run.skipped))


def tsan(run: Run) -> Count:
    """Data races."""
    preload = runtime_of("tsan")
    folder = sanitized(run, "tsan", "-Db_sanitize=thread")
    # A child made by fork starts threads of its own.
    env = {"TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0"}
    count = run.meson_test(folder, env)
    env.update(run.library(folder), LD_PRELOAD=preload,
               TSAN_OPTIONS="halt_on_error=1:die_after_fork=0:report_signal_unsafe=0")
    return count + run.numerics("-m", "smoke", "-k", "listed or threads or one_plan or append",
                                *SIDE_BY_SIDE, env=env)


def cuda_build(run: Run) -> pathlib.Path:
    """The build with all GPU kernels, and with their emulator."""
    if run.ahead:
        run.ahead.wait()
    return configure_cuda(run)


def with_nvcc() -> Dict[str, str]:
    """An environment: most suites build as on a machine without nvcc."""
    return {"PATH": os.pathsep.join(
        filter(None, (os.environ["PATH"], os.environ.get("NVCC_FOLDER"))))}


def configure_cuda(run: Run, *targets: str) -> pathlib.Path:
    return run.compile("cuda-test", "-Dcuda=enabled", "-Dgpu_archs=['80', '90', '120', '90a']",
                       "-Demulator=true", best_isas(run), env=with_nvcc(), targets=targets)


def build_ahead(run: Run) -> None:
    """Compiles the GPU kernels, some 180 files of 8 s of a core each, whenever the suites before
    need fewer cores. A build that fails does so again in the suite cuda."""
    run.log = LOGS / "ahead.log"
    folder = configure_cuda(run, "build.ninja")
    with open(run.log, "a", encoding="utf-8") as log:
        run.ahead = subprocess.Popen(
            ["nice", "-n", "19", "ninja", "-C", str(folder), "-j", str(os.cpu_count() or 1)],
            env={**os.environ, **with_nvcc()}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True)


def cuda(run: Run) -> Count:
    """The GPU kernels compile without faults, the library still does all its work on a CPU where no
    driver is installed, and so does the wheel that has these kernels."""
    folder = cuda_build(run)
    smoke = run.numerics("-m", "smoke", *SIDE_BY_SIDE, env=run.library(folder))
    wheel = run.pytest("tests/test_wheel.py", "-k", "not source and not label and not sdist",
                       env={**with_nvcc(), "FLASHATTN_KERNELS": str(folder)})
    return run.meson_test(folder) + smoke + wheel + run.pytest(
        "tests/test_compile.py", "tests/test_same_code.py", "tests/test_gpu_code.py",
        env=with_nvcc())


def emulator(run: Run, backend: str, capability: str = "90", *some: str,
             races: bool = False) -> Count:
    """The GPU kernels of a backend, on the emulator of tests/emulator as a device of a compute
    capability. races: it fails where nothing puts accesses to memory in an order, and goes in
    another order each time, but for FLASHATTN_EMULATOR_SEED, which a failure names."""
    folder = cuda_build(run) / "tests" / "emulator"
    library = "libflashattn_races.so.0" if races else "libflashattn.so.0"
    env = {"FLASHATTN_LIBRARY": str(folder / library), "FLASHATTN_BACKEND": backend,
           "FLASHATTN_EMULATOR_DEVICE": capability, "LD_LIBRARY_PATH": str(folder),
           "FLASHATTN_EMULATOR_RACES": "1" if races else "0"}
    if races:
        seed = os.environ.get("FLASHATTN_EMULATOR_SEED") or str(secrets.randbits(32))
        env["FLASHATTN_EMULATOR_SEED"] = seed
        with open(run.log, "a", encoding="utf-8") as log:
            log.write(f"FLASHATTN_EMULATOR_SEED={seed}\n")
    # What needs a GPU's size, speed or streams.
    left_out = [f"--ignore=tests/numerics/test_gpu_{what}.py"
                for what in ("early", "random", "sizes", "streams")]
    left_out += [f"--deselect=tests/numerics/test_gpu_graphs.py::test_{what}[large]"
                 for what in ("forward", "backward")]
    # A third of the two longest lists; of the portable kernels also half of the next two, and what
    # many rows or keys ask of the Hopper kernels.
    two_thirds = [n for n in range(200) if n % 3]
    few = {"starts": two_thirds, "trees": two_thirds}
    if backend == "sm80":
        half = range(1, 200, 2)
        few.update(gradients=half, dropouts=half, many_keys=half, many_queries=range(1, 10),
                   many_heads=range(1, 10))
        left_out += ["--deselect=tests/numerics/test_properties.py::test_full_tiles_of_keys_after_"
                     f"one_with_a_tail[{keys}]" for keys in (4100, 4160)]
    left_out += [f"--deselect=tests/numerics/test_listed.py::test_listed[{name}-{n}]"
                 for name, numbers in few.items() for n in numbers]
    return run.numerics("--device=cuda", *SIDE_BY_SIDE, *left_out, *some, env=env)


def emulator_races(run: Run) -> Count:
    """Where several tiles follow each other in the same buffers; of the portable kernels less."""
    some = {"sm90": "(listed and smoke) or gradients-1 or gradients-4 or dropouts-1 or "
                    "many_queries-3 or many_heads or (gpu_latent and (features or outgrown)) "
                    "or (gpu_packed and (replays or change8 or change27))",
            # The library of this suite lacks change3's kernel, which is of f16.
            "sm80": "(listed and smoke) or gradients-5 or gradients-10 or (gpu_decode and (replays "
                    "or (merges and not change3))) or (gpu_cache and case3)"}
    count = Count()
    for backend, names in some.items():
        count += emulator(run, backend, "90", "-k", names, races=True)
    return count


def kernel_mutations(run: Run) -> Count:
    """Faults put into the GPU kernels are noticed: see tests/kernel_mutations.py."""
    run.call([sys.executable, str(ROOT / "tests" / "kernel_mutations.py")], with_nvcc(),
             check=False)
    found = re.findall(r"^(\d+) passed, (\d+) failed, 0 skipped$", run.log.read_text(), re.M)
    if not found:
        raise Failed("tests/kernel_mutations.py came to no result")
    return Count(*map(int, found[-1]))


def suites(run: Run, with_cuda: bool) -> Dict[str, Callable[[], Count]]:
    """In the order in which they run: what fails soonest comes first."""
    def python(*paths: str) -> Callable[[], Count]:
        return lambda: run.pytest(*paths, env=run.library(release(run)))

    if run.device != "cpu":
        return {"numerics": lambda: numerics(run, None),
                "graphs": lambda: run.numerics("-m", "smoke", "--device=cuda", "--graphs",
                                               env=run.library(release(run))),
                "tensors": python("tests/bindings/test_gpu_arrays.py",
                                  "tests/bindings/test_gpu_torch.py"),
                "torch": python("tests/pytorch")}
    table: Dict[str, Callable[[], Count]] = {
        "style": lambda: style(run),
        "run": python("tests/test_run.py", "tests/test_bench.py", "tests/test_randomcases.py",
                      "tests/test_same_code.py", "tests/test_mutations.py"),
        "c": lambda: run.meson_test(release(run)),
        "bindings": python(*python_tests()),
        "consumer": python("tests/abi"),
        "demo": python("tests/test_demo.py"),
        "torch": lambda: run.torch(*SIDE_BY_SIDE, env=run.library(release(run))),
        "jax": lambda: jax(run),
        "languages": python(*(f"tests/bindings/{name}.py" for name in OTHER_LANGUAGES)),
        "docs": python("tests/test_docs.py"),
        "wheel": python("tests/test_wheel.py"),
        "packaging": python("tests/packaging"),
        "first-results": python("tests/test_first_results.py"),
    }
    for isa in ISAS:
        table[f"numerics-{isa}"] = lambda isa=isa: numerics(run, isa)  # type: ignore[misc]
    table["mutations"] = lambda: mutations(run)
    table["arm"] = lambda: arm(run)
    table["asan"] = lambda: asan(run)
    table["tsan"] = lambda: tsan(run)
    table["fuzz"] = lambda: fuzz(run)
    if with_cuda:
        table["cuda"] = lambda: cuda(run)
        table["languages-cuda"] = python("tests/bindings/test_rust_gpu.py")
        for backend in ("sm80", "sm90"):
            table[f"emulator-{backend}"] = (
                lambda backend=backend: emulator(run, backend))  # type: ignore[misc]
        # Less shared memory: the same code with other tiles, by the head's size. 8.6 and 8.9 have
        # as much as 12.0.
        table["emulator-a100"] = lambda: emulator(run, "sm80", "80", "-k", "dims or each_code")
        table["emulator-sm120"] = lambda: emulator(run, "sm80", "120", "-k",
                                                   "dims or gradients or (listed and smoke)")
        table["emulator-races"] = lambda: emulator_races(run)
        table["kernel-mutations"] = lambda: kernel_mutations(run)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="./run test", description=__doc__)
    parser.add_argument("suite", nargs="*", help="only these; numerics stands for all numerics-*; "
                        "quick: a choice of two minutes, for the inner loop. Without names and "
                        f"without --cuda all but {', '.join(LONG)}")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cuda", action="store_true", help="every suite, and the GPU kernels, "
                        "compiled and run on an emulator")
    parser.add_argument("--list", action="store_true", help="names the suites")
    parser.add_argument("--random-seed", type=int, metavar="SEED",
                        help="draws what an earlier run drew, which printed it; without it the "
                             "half of the randomised configurations, and of the fuzzer's inputs, "
                             "that is not the same in every run is new. Faults that earlier runs "
                             "found lie in build/hypothesis and are tried first")
    arguments = parser.parse_args()

    seed = arguments.random_seed
    run = Run(arguments.device, secrets.randbelow(1 << 32) if seed is None else seed)
    table = suites(run, arguments.cuda)
    if arguments.suite == ["quick"] and arguments.device == "cpu":
        table = {"style": table["style"], "quick": lambda: quick(run)}
    elif not arguments.suite:
        table.pop("kernel-mutations", None)  # only by name: it builds the kernels 20 times
        if not arguments.cuda:
            table = {name: suite for name, suite in table.items() if name not in LONG}
    else:
        def chosen(name: str, suite: str) -> bool:
            return name == suite or name.startswith(suite + "-")

        unknown = [s for s in arguments.suite if not any(chosen(name, s) for name in table)]
        if unknown:
            parser.error(f"no suite {unknown[0]}; there are {', '.join(table)}")
        table = {name: suite for name, suite in table.items()
                 if any(chosen(name, s) for s in arguments.suite)}
    if arguments.list:
        print("\n".join(table))
        return 0

    LOGS.mkdir(parents=True, exist_ok=True)
    for path in LOGS.glob("accuracy-*.json"):  # of tests/numerics/accuracy.py, which adds to them
        path.unlink()
    with tempfile.TemporaryDirectory(prefix="truths-", dir=LOGS) as truths:
        if shutil.disk_usage(truths).free > 16e9:  # they take 4 GB
            os.environ["FLASHATTN_TEST_TRUTHS"] = truths  # of tests/numerics/recall.py
        try:
            return run_suites(run, table)
        finally:
            if run.ahead and run.ahead.poll() is None:
                os.killpg(run.ahead.pid, signal.SIGTERM)


def run_suites(run: Run, table: Dict[str, Callable[[], Count]]) -> int:
    total, failures = Count(), []
    print(f"what is drawn at random: --random-seed={run.seed}", flush=True)
    if run.device == "cpu" and "cuda" in table:
        build_ahead(run)
    for name, suite in table.items():
        run.log = LOGS / f"{name}.log"
        run.log.unlink(missing_ok=True)
        run.skipped.clear()
        run.failed.clear()
        print(f"{name:<22}", end="", flush=True)
        start, why = time.monotonic(), ""
        try:
            count = suite()
            if not any(count):
                raise Failed("no test ran")
        except Skip as reason:
            count, why = Count(skipped=1), f": {reason}"
        except Failed as reason:
            count, why = Count(failed=1), f": {reason}"
        print(f"{count}{why}  ({time.monotonic() - start:.0f} s)", flush=True)
        for reason in sorted(set(run.skipped)):
            print(f"  skipped: {reason}", flush=True)
        for test in run.failed:
            print(f"  failed: {test}", flush=True)
        if count.failed:
            print(f"--- the end of {run.log.relative_to(ROOT)}")
            print("\n".join(run.log.read_text(errors="replace").splitlines()[-60:]), flush=True)
            print("---")
            named = [*run.failed, *filter(None, [why[2:]])] or ["see above"]
            failures += [f"failed in {name}: {what}" for what in named]
        total += count
    # Once more: of a long output, often only the end is at hand.
    if failures:
        print("\n".join([*failures, f"drawn at random: --random-seed={run.seed}"]))
    print(total)
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
