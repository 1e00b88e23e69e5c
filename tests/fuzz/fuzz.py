"""./run fuzz: the fuzzer, for as long as one wants. With the machine's clang or Debian's, whose
libFuzzer follows the branches that an input takes; else inputs at random, and changed ones of the
corpus.

An input that makes the library fail is saved in build/fuzz-found; ./run fuzz FILE repeats it.
The seed corpus, tests/fuzz/corpus, is written anew by ./run fuzz --make-corpus, which is needed
when the meaning of the bytes has changed.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
from typing import List, Tuple

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
import run_all  # noqa: E402  pylint: disable=wrong-import-position

def find_clang() -> Tuple[str, str]:
    """The folder of a clang with libFuzzer; or nothing, and why there is none."""
    found = subprocess.run(["bash", str(TESTS / "clang_setup.sh")], stdin=subprocess.DEVNULL,
                           capture_output=True, text=True, check=False)
    why = found.stderr.strip() or "tests/clang_setup.sh failed"
    return (found.stdout.strip(), "") if found.returncode == 0 else ("", why.splitlines()[-1])


class Fuzzer:
    """The build, and how it is called."""

    corpus = TESTS / "fuzz" / "corpus"
    found = run_all.BUILD / "fuzz-found"

    def __init__(self, run: run_all.Run) -> None:
        clang, self.without_libfuzzer = find_clang()
        self.libfuzzer = bool(clang)
        self.found.mkdir(parents=True, exist_ok=True)
        targets = ["tests/fuzz/fuzz_alone"]
        options = ["-Db_sanitize=address,undefined"]
        compilers = {}
        if self.libfuzzer:
            targets.append("tests/fuzz/fuzz_libfuzzer")
            options += [f"-D{language}_args=-fsanitize=fuzzer-no-link" for language in ("c", "cpp")]
            compilers = {"CC": f"{clang}/clang", "CXX": f"{clang}/clang++"}
        folder = run_all.sanitized(run, "fuzz", *options, env=compilers, targets=targets)
        self.folder = folder / "tests" / "fuzz"
        self.env = {"UBSAN_OPTIONS": "halt_on_error=1:abort_on_error=1:print_stacktrace=1"}

    def command(self, *arguments: str) -> List[str]:
        """Of main.cpp's arguments, for either program."""
        if "--seconds" not in arguments:
            return [str(self.folder / "fuzz_alone"), *arguments]
        seconds, seed = (arguments[arguments.index(name) + 1] for name in ("--seconds", "--seed"))
        if not self.libfuzzer:
            return self.random(seconds, seed)
        grown = run_all.BUILD / "fuzz-corpus"  # what the fuzzer keeps for the next time
        grown.mkdir(exist_ok=True)
        return [str(self.folder / "fuzz_libfuzzer"), f"-max_total_time={seconds}", f"-seed={seed}",
                "-max_len=1024", "-timeout=60", "-print_final_stats=1",
                f"-artifact_prefix={self.found}/", str(grown), str(self.corpus)]

    def random(self, seconds: str, seed: str) -> List[str]:
        """Inputs at random, the same for a seed."""
        return [str(self.folder / "fuzz_alone"), "--seconds", seconds, "--seed", seed, "--save",
                str(self.found), str(self.corpus)]

    def suite(self, seeds: List[str]) -> List[List[str]]:
        """The commands of ./run test fuzz: a minute, shared by the seeds and kinds of inputs."""
        inputs = [str(path) for path in sorted(self.corpus.iterdir())]
        by_stdin = ["sh", "-c", 'exec "$0" <"$1"', *self.command(), inputs[0]]
        commands = [*map(self.command, inputs), by_stdin]
        seconds = str(60 // (len(seeds) * (2 if self.libfuzzer else 1)))
        for seed in seeds:
            commands.append(self.random(seconds, seed))
            if self.libfuzzer:
                commands.append(self.command("--seconds", seconds, "--seed", seed))
        return commands


def main() -> int:
    parser = argparse.ArgumentParser(prog="./run fuzz", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", default="0", help="0, the default: until an input fails")
    parser.add_argument("--seed", help="of the random numbers, as an earlier run printed it")
    parser.add_argument("--make-corpus", action="store_true")
    parser.add_argument("file", nargs="*", help="only these inputs, or folders of inputs")
    arguments = parser.parse_args()

    run_all.LOGS.mkdir(parents=True, exist_ok=True)
    run = run_all.Run("cpu", 0)
    run.log = run_all.LOGS / "fuzz-build.log"
    run.log.unlink(missing_ok=True)
    print("building the fuzzer, which takes minutes the first time", flush=True)
    try:
        fuzzer = Fuzzer(run)
        if not fuzzer.libfuzzer:
            print(f"inputs at random: {fuzzer.without_libfuzzer}", flush=True)
    except run_all.Failed as reason:
        print(f"{reason}; see {run.log.relative_to(run_all.ROOT)}", file=sys.stderr)
        return 1
    if arguments.make_corpus:
        command = fuzzer.command("--make-corpus", str(fuzzer.corpus))
    elif arguments.file:
        command = fuzzer.command(*arguments.file)
    else:
        seed = arguments.seed or str(int.from_bytes(os.urandom(4), "little"))
        command = fuzzer.command("--seconds", arguments.seconds, "--seed", seed)
        print(f"--seed {seed}", flush=True)
    return subprocess.run(command, env={**os.environ, **fuzzer.env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
