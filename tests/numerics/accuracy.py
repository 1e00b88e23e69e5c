"""How much of their limits the errors take, by backend, in those cases of test_listed.py that every
run has: the worst of a run is logged in build/test, and tests/data/accuracy.txt holds how much each
backend may take.

    python -m tests.numerics.accuracy           shows the logs
    python -m tests.numerics.accuracy --write   puts them into the file, with room

A limit (see tolerance.py) is the worst that anyone may do; the file is what was reached, so that
none becomes less accurate unnoticed. Of backends that the file lacks only the limits hold.
"""
import argparse
import json
import os
import pathlib
import re
import sys
from typing import Dict, Optional

from . import capi, support

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "tests" / "data" / "accuracy.txt"
LOGS = ROOT / "build" / "test"
ROOM = 1.25  # compilers, and the naive evaluation's products, round in another order
HEAD = """\
The part of its limit that an error may take: the worst that was measured, times %g. A line for each
backend, dtype and result. Written by python -m tests.numerics.accuracy --write after a run of the
numerics suite on the backend, and held by tests/numerics/tolerance.py.
""" % ROOM

worst: Dict[str, float] = {}  # by dtype and result, of this process
allowed: Optional[Dict[str, float]] = None  # likewise; None: of cases that only this run has


def backend(kind: int) -> str:
    if kind != 0:
        return support.backend(kind) + (", emulated" if "FLASHATTN_EMULATOR_DEVICE" in os.environ
                                        else "")
    emulated = re.search(r"_amx_on_(\w+)", os.environ["FLASHATTN_LIBRARY"])
    if emulated:
        return "cpu avx512_amx, emulated on " + emulated[1]
    found = capi.device_properties(kind)
    return "cpu " + capi.ffi.string(found.isa).decode()


def committed() -> Dict[str, Dict[str, float]]:
    text = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    found: Dict[str, Dict[str, float]] = {}
    for name, key, value in re.findall(r"^([^:\n]+): (\w+ \w+) ([\d.]+)$", text, re.M):
        found.setdefault(name, {})[key] = float(value)
    return found


def note(key: str, error: float, limit: float) -> float:
    """The part of the limit that may be taken, of which the error's is kept."""
    if allowed is None:
        return 1.0
    if limit > 0:
        worst[key] = max(worst.get(key, 0.0), error / limit)
    return min(allowed.get(key, 1.0), 1.0)


def log(name: str, parts: Dict[str, float]) -> pathlib.Path:
    """Adds to what other suites found on the same backend."""
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / ("accuracy-%s.json" % re.sub(r"\W+", "-", name))
    before = json.loads(path.read_text())["worst"] if path.exists() else {}
    whole = {key: max(before.get(key, 0.0), parts.get(key, 0.0)) for key in {*before, *parts}}
    path.write_text(json.dumps(dict(backend=name, worst=whole), indent=1, sort_keys=True) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--write", action="store_true", help="put the logs into the file")
    write = parser.parse_args().write
    kept = committed()
    for path in sorted(LOGS.glob("accuracy-*.json")):
        read = json.loads(path.read_text())
        print(read["backend"], json.dumps({k: round(v, 3) for k, v in read["worst"].items()}))
        kept[read["backend"]] = {key: min(1.0, value * ROOM) for key, value in
                                 read["worst"].items()}
    if write:
        lines = ["%s: %s %.3f" % (name, key, value) for name in sorted(kept)
                 for key, value in sorted(kept[name].items())]
        FILE.write_text("\n".join([HEAD, *lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
