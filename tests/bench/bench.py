"""Speed of this library against the machine's own peak and, where it is installed, PyTorch.

    ./run bench                         a quick look
    ./run bench --preset tables         every cell of the tables of tests/bench/CPU.md
    ./run bench --preset masks          what masks save
    ./run bench --case '{"dim": 128}'   one row; each row of the table ends in its own
    ./run bench --baseline old.so       beside another build of the library
    ./run bench --device cuda           on a GPU, beside what is installed of PyTorch's backends and
                                        flash-attn-4: the tables of the papers, and decoding
    ./run bench --device cuda --preset training     or another one; --help names all
    ./run bench --device cuda --preset papers       what the literature reports; also on a CPU
    ./run bench --device cuda --preset serving      decoding, drafts, chunks, caches; also on a CPU
    ./run bench --device cuda --preset context-parallel     all GPUs of the host
    ./run bench --device cuda --only 'backward D128 causal'     some rows

All runners of a row take turns in one process, in rotating order, on random normal data; figures
are medians. Rows with a first token (--preset sinks) have a runner "normal": this build on normal
data. Its ratio says how many times as fast ours is with the first token. GFLOP/s count
4 * dim for a visible pair forward, 2.5 times that backward.
"""
from __future__ import annotations

import argparse
import importlib
import pathlib
import sys

from cases import Case
from presets import chosen as chosen_cases, listed


# Presets that are programs of their own, and their usual number of rounds.
ALONE = {"papers": 5, "serving": 8, "context-parallel": 2, "fp8-accuracy": 1}
_ALONE = """
  papers        on either device, alone: training steps, see papers.py; its parts, for --only:
                training, tutorials, densities, traffic, losses
  serving       likewise: what an inference engine asks for, see serving.py
  context-parallel  likewise: all GPUs of the host, see context_parallel.py
  fp8-accuracy  likewise: errors of E4M3 beside other libraries', see fp8_accuracy.py"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="./run bench", description=__doc__,
                                     epilog=listed() + _ALONE,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", action="append", metavar="NAME")
    parser.add_argument("--only", default="", metavar="WORDS",
                        help="rows of the presets whose names hold all these words; of papers, "
                        "parts")
    parser.add_argument("--case", action="append", type=Case.from_json, metavar="JSON")
    parser.add_argument("--alone", action="store_true", help="measure no peer")
    parser.add_argument("--baseline", action="append", metavar="[NAME=]LIBRARY",
                        help="another build of the library, to be timed in turns with this one")
    parser.add_argument("--csv", type=pathlib.Path, help="where to write the figures, too")
    parser.add_argument("--plot", type=pathlib.Path, help="where to draw them (PNG); on a GPU they "
                        "are drawn in any case")
    on_cpu = parser.add_argument_group("on the CPU")
    on_cpu.add_argument("--threads", type=int, default=0, help="0: all")
    on_cpu.add_argument("--seconds", type=float, default=0.4, help="for each figure")
    on_gpu = parser.add_argument_group("on a GPU")
    on_gpu.add_argument("--without", action="append", metavar="PEER", help="leave a peer out")
    on_gpu.add_argument("--rounds", type=int, default=0,
                        help="bursts of each runner a row; 0: 8, of "
                        "the presets papers 5 and context-parallel 2")
    on_gpu.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS",
                        help="also run each kernel alone for so long without pause")
    chosen = parser.parse_args()
    alone = [name for name in ALONE if name in (chosen.preset or ())]
    chosen.rounds = chosen.rounds or ALONE.get(alone[0] if alone else "", 8)
    if alone:
        given = [name for name in ("only", "case", "alone", "baseline", "without", "sustained")
                 if getattr(chosen, name) and (name, alone[0]) != ("only", "papers")]
        if given or len(chosen.preset) > 1:
            parser.error(f"--preset {alone[0]} goes with no other preset and with no --"
                         + (given or ["preset"])[0])
        return int(importlib.import_module(alone[0].replace("-", "_")).main(chosen))
    cases = list(chosen.case or [])
    if chosen.preset or not cases:
        cases += chosen_cases(chosen.device, chosen.preset, chosen.only)
    if not cases:
        parser.error(f"no row's name holds {chosen.only!r}")
    if chosen.device == "cuda":
        import gpu
        return gpu.main(cases, chosen)

    import cpu
    return cpu.main(cases, chosen)


if __name__ == "__main__":
    sys.exit(main())
