"""A check of the tests themselves: wrong formulas, put into a copy of the numerics suite's
reference one by one. The comparison of the library with each must fail, or a library that is wrong
in the same way would pass. python tests/mutations.py [NAME...]; needs FLASHATTN_LIBRARY."""
from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Dict, List, NamedTuple, Optional

ROOT = pathlib.Path(__file__).resolve().parents[1]
REFERENCE = pathlib.Path("tests") / "numerics" / "reference.py"


class Mutation(NamedTuple):
    old: str
    new: str


# Faults that attention libraries have had.
MUTATIONS: Dict[str, Mutation] = {
    "causal counts from the top left": Mutation(
        "(0 if case.top_left else keys - rows)\n    j", "0\n    j"),
    "a causal row sees one key too many": Mutation("see &= j <= i\n", "see &= j <= i + 1\n"),
    "a window is one key short": Mutation("see &= j >= i - left", "see &= j > i - left"),
    "a window has no right side": Mutation("see &= j <= i + right", "see &= j <= i"),
    "chunks count from the query": Mutation("see &= i // case.chunk == j // case.chunk",
                                            "see &= i - j < case.chunk"),
    "the softcap is left out": Mutation("t = store(xp.tanh(store(s / ", "t = store((store(s / "),
    "the softcap's derivative is left out": Mutation(
        "slope = arithmetic.load(1 if fwd.cap_slope is None else fwd.cap_slope)",
        "slope = arithmetic.load(1)"),
    "ALiBi is not symmetric": Mutation("distance = np.abs(i - np.arange(keys)[None, :])",
                                       "distance = i - np.arange(keys)[None, :]"),
    "a bias comes with the wrong sign": Mutation("s = store(s + arithmetic.load(pick(data.bias",
                                                 "s = store(s - arithmetic.load(pick(data.bias"),
    "the lse leaves out the sink": Mutation(".sum(-1) + xp.exp(sink - m))", ".sum(-1))"),
    "query heads of a group are interleaved": Mutation(
        "return arithmetic.engine.repeat(x, case.heads_q // len(x))",
        "return arithmetic.engine.repeat(x, case.heads_q // len(x))"
        "[np.arange(case.heads_q) % len(x) * (case.heads_q // len(x))]"),
    "kept weights are not scaled": Mutation("np.stack(masks) * (65536.0 / (65536 - t))",
                                            "np.stack(masks) * 1.0"),
    "another sequence's dropout": Mutation("b * case.heads_q + h", "h"),
    "dS leaves out D": Mutation("ds = p * (dp - d[..., None])", "ds = p * dp"),
    "D leaves out the gradient of lse": Mutation("d = d - arithmetic.load(data.dlse[b])",
                                                 "d = d - 0 * arithmetic.load(data.dlse[b])"),
    "dV of weights before the dropout": Mutation("weights = store(dp * fwd.keep), store(p * "
                                                 "fwd.keep)", "weights = store(dp * fwd.keep), p"),
    "dQ without the scale": Mutation("draw = store(ds * slope * scale)",
                                     "draw = store(ds * slope)"),
    "dsink with the wrong sign": Mutation("dsink = -(share * d).sum(-1)",
                                          "dsink = (share * d).sum(-1)"),
}


def mutated(name: str) -> str:
    """The reference with the mutation."""
    mutation = MUTATIONS[name]
    text = (ROOT / REFERENCE).read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{name}: {REFERENCE} has {text.count(mutation.old)} times "
                         f"{mutation.old!r}; mend tests/mutations.py")
    return text.replace(mutation.old, mutation.new)


def found(name: str, workers: str) -> Optional[str]:
    """What noticed the mutation: a test; None: nothing did."""
    wrong = mutated(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        shutil.copytree(ROOT / "tests" / "numerics", copy / "tests" / "numerics",
                        ignore=shutil.ignore_patterns("__pycache__"))
        # A link would put the tree's own folder, with the right formula, on Python's path.
        shutil.copy(ROOT / "tests" / "conftest.py", copy / "tests")
        for shared in ("tests/data", "include", "bindings", "src"):
            (copy / shared).symlink_to(ROOT / shared)
        (copy / REFERENCE).write_text(wrong, encoding="utf-8")
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
                       "PYTHONPATH": str(ROOT / "bindings" / "python")}
        environment.pop("FLASHATTN_TEST_TRUTHS", None)  # truths of the right formula
        # A part of the tests finds most, and soon.
        for some in (["-m", "smoke"], []):
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-n", workers, "-p",
                 "no:cacheprovider", "--rootdir", folder, "--tb=no", "-rf", "--random=0", *some,
                 str(copy / "tests" / "numerics" / "test_listed.py")],
                cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                break
    if done.returncode == 0:
        return None
    named = [line for line in done.stdout.split("\n") if line.startswith("FAILED")]
    if done.returncode not in (1, 2) or not named:  # 2: workers were stopped
        raise RuntimeError(f"{name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return named[0][:120]


def main(names: List[str]) -> int:
    missed = []
    for name in names or MUTATIONS:
        test = found(name, str(min(os.cpu_count() or 1, 8)))
        print(f"{name}: {test or 'NOT FOUND'}", flush=True)
        if not test:
            missed.append(name)
    count = len(names or MUTATIONS)
    print(f"{count - len(missed)} passed, {len(missed)} failed, 0 skipped")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
