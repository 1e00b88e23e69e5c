"""./run bench --device cuda: the rows, the ratios, and their means.

All runners of a row take turns on the same random normal arrays (see clock.py). What a runner does
not compute is said below the table, not left out.
"""
from __future__ import annotations

import argparse
import csv
import math
import pathlib
import statistics
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import chart
import flashattn
import host_cost
import peers
import state
from cases import Case
from clock import Clock
from data import NORMAL, draw, on_normal_data
from figures import Figures
from flashattn import Device, _library
from memory import Array, Memory, torch
from ours import Refused, builds
from paired import Ratio, ratio

WIDTH = 56
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Row(NamedTuple):
    case: Case
    seconds: Dict[str, float]  # by runner, of this run
    sustained: Dict[str, float]
    table: Dict[str, float]  # of tests/data
    kernel: str
    error: Optional[float]  # of ours, relative to the first peer's result: Frobenius norms
    bytes: int
    workspace: int
    missing: Dict[str, str]  # why a runner did not run
    remarks: Dict[str, str]  # what a runner does less well than it might
    paired: Dict[str, Ratio] = {}  # how many times as fast ours is, by runner
    state: str = ""  # of the GPU's clock, see state.now()

    def rate(self, seconds: float) -> float:
        """TFLOP/s; decoding, merging: TB/s."""
        return self.case.amount() / seconds * 1e-12

    def best(self, ours: List[str]) -> Tuple[str, float]:
        """The fastest peer: of this run, or of the table where it did not run (marked *)."""
        found = {name: t for name, t in self.seconds.items() if name not in ours}
        found.update({name + "*": t for name, t in self.table.items() if name not in found})
        return min(found.items(), key=lambda item: item[1]) if found else ("", 0.0)


class Bench:
    def __init__(self, options: argparse.Namespace, cases: List[Case]) -> None:
        self.options = options
        self.memory = Memory(Device.CUDA)
        self.driver = self.memory.driver
        self.clock = Clock(self.driver)
        self.ours = builds(options.baseline, self.memory)
        self.peers, self.notes = ({}, []) if options.alone else peers.available()
        for name in options.without or []:
            self.peers.pop(name, None)
        self.figures = Figures(self.driver.name)
        self.mine = [ours.name for ours in self.ours]
        self.mine += [NORMAL] if any(case.first_token for case in cases) else []
        self.columns = self.mine + list(self.peers)

    # ---- measuring

    def works(self, case: Case, arrays: Dict[str, Array]) -> Dict[str, Any]:
        """Everything about the runners of a case: see Row."""
        ready: Dict[str, Any] = {}
        missing: Dict[str, str] = {}
        remarks: Dict[str, str] = {}
        prepared = first = None
        kept: List[Any] = []  # graphs do not keep what they work with
        runs = [(ours.name, ours, case, arrays) for ours in self.ours]
        if case.first_token:
            usual = on_normal_data(case)
            runs.append((NORMAL, self.ours[0], usual, draw(self.memory, usual)))
        for name, ours, its, data in runs:
            try:
                made = ours.prepare(its, data)
            except Refused as refused:
                missing[name] = str(refused)
                continue
            prepared = prepared or made
            kept.append(made)
            ready[name] = lambda made=made: made.work(0)
            made.work(0)
            if case.moves:
                graph = self.driver.capture(made.work)
                ready[name] = graph.launch
        mine = prepared and {name: array for name, array in prepared.results.items()}
        error = None
        for name, peer in self.peers.items():
            try:
                work, result = peer.prepare(case, arrays)
            except peers.CannotRun as reason:
                missing[name] = str(reason)
                continue
            if mine and first is None and not case.dropout:
                first = result(work())
                error = relative(list(mine.values()), first)
            ready[name], remark = captured(work) if case.moves else (work, "")
            said = "; ".join(filter(None, [peer.remark, remark]))
            if said:
                remarks[name] = said
        return dict(ready=ready, missing=missing, remarks=remarks, error=error, prepared=prepared,
                    kept=kept)

    def measure(self, case: Case) -> Row:
        if torch is not None:
            torch.manual_seed(0)
            torch.cuda.empty_cache()
        arrays = draw(self.memory, case)
        found = self.works(case, arrays)
        ready = found["ready"]
        clock = self.clock.flushed if case.moves else self.clock.bursts
        times = clock(ready, self.options.rounds) if ready else {}
        sustained = {}
        if self.options.sustained and not case.moves:
            sustained = {name: self.clock.sustained(work, self.options.sustained)
                         for name, work in ready.items()}
        prepared = found["prepared"]
        mine = times.get(self.mine[0])
        others = {name: t for name, t in times.items() if mine and name != self.mine[0]}
        paired = {name: ratio(mine, t) for name, t in others.items()}
        return Row(case, {name: statistics.median(t) for name, t in times.items()}, sustained,
                   self.figures.of(case), prepared.kernel if prepared else "", found["error"],
                   prepared.bytes if prepared else 0, prepared.workspace if prepared else 0,
                   found["missing"], found["remarks"], paired, state.now())

    # ---- showing

    def head(self) -> None:
        driver = self.driver
        self.copy = self.clock.copy()
        version = f", PyTorch {torch.__version__}" if torch is not None else ""
        print(f"{driver.name}{version}; {_library.text(_library.lib.flashattn_build_info())}")
        print(f"TFLOP/s (decoding: TB/s of K and V, merging: of all; caches flushed, graphs); a "
              f"copy on the device: {self.copy * 1e-12:.2f} TB/s read and written")
        for ours in self.ours:
            found = host_cost.measure(ours, self.memory)
            print(f"{ours.name}: {host_cost.line(found)}")
        for note in self.notes:
            print(note)
        print(f"{'':{WIDTH}}" + "".join(f"{name:>9} " for name in self.columns) +
              f"{'/cudnn':>8}{'/best':>7} {'best, interval of /best':25}{'error':>8}  "
              "kernel, repeat with --case")

    def show(self, row: Row) -> None:
        digits = 2 if row.case.moves else 1
        cells = ""
        for name in self.columns:
            refused = "refused" if name in self.mine and name in row.missing else "-"
            cells += (f"{row.rate(row.seconds[name]):9.{digits}f}" if name in row.seconds
                      else f"{refused:>9}") + ("!" if name in row.remarks else " ")
        ratios = self.ratios(row)
        best, seconds = row.best(self.mine)
        text = "".join(f"{ratios[key]:{w}.2f}" if key in ratios else f"{'':{w}}"
                       for key, w in (("/cudnn", 8), ("/best", 7)))
        named = f"{best} {row.rate(seconds):.{digits}f}" if best else ""
        if best in row.paired:
            named += f" [{row.paired[best].low:.2f}, {row.paired[best].high:.2f}]"
        error = f"{row.error:8.1e}" if row.error is not None else f"{'':8}"
        print(f"{row.case.name():{WIDTH}}{cells}{text} {named:25}{error}  {row.kernel} "
              f"'{row.case.to_json()}'", flush=True)
        for name, remark in row.remarks.items():
            print(f"{'':{WIDTH}}  ! {name}: {remark}", flush=True)
        if state.throttled(row.state):
            print(f"{'':{WIDTH}}  ! the GPU's clock was held back: {row.state}", flush=True)
        if row.sustained:
            print(f"{'  sustained':{WIDTH}}" + "".join(
                f"{row.rate(row.sustained[name]):10.1f}" if name in row.sustained else f"{'':10}"
                for name in self.columns), flush=True)
        if row.case.moves and self.mine[0] in row.seconds:
            at_copy = row.bytes / self.copy
            print(f"{'':{WIDTH}}  {row.seconds[self.mine[0]] * 1e6:.1f} us, "
                  f"{at_copy * 1e6:.1f} at the copy's speed: "
                  f"{row.seconds[self.mine[0]] / at_copy:.2f} x")

    def ratios(self, row: Row) -> Dict[str, float]:
        """How many times as fast ours is."""
        if self.mine[0] not in row.seconds:
            return {}
        mine = row.seconds[self.mine[0]]
        found = {"/" + name: row.paired[name].median if name in row.paired else t / mine
                 for name, t in row.seconds.items() if name != self.mine[0]}
        best, seconds = row.best(self.mine)
        return {**found, **({"/best": found.get("/" + best, seconds / mine)} if best else {})}

    def summary(self, rows: List[Row]) -> None:
        """Geometric means by group, and what did not run."""
        groups: Dict[str, List[Row]] = {}
        for row in rows:
            groups.setdefault(row.case.group(), []).append(row)
        names = ["/" + name for name in self.columns[1:]] + ["/best"]
        print(f"\ngeometric means of how many times as fast as each\n{'':{WIDTH}}{'rows':>6}" +
              "".join(f"{name:>11}" for name in names))
        for group, members in groups.items():
            self.mean_line(group, members, names)
        if len(groups) > 1:
            for op in sorted({row.case.op for row in rows}):
                self.mean_line(f"all {op}", [row for row in rows if row.case.op == op], names)
        reasons: Dict[Tuple[str, str], int] = {}
        for row in rows:
            for name, why in row.missing.items():
                reasons[name, why] = reasons.get((name, why), 0) + 1
        for (name, why), count in reasons.items():
            print(f"{name} left out {count} of {len(rows)} rows: {why}")
        if any(name.endswith("*") for name, _ in (row.best(self.mine) for row in rows)):
            print(f"*: of an earlier run. {self.figures.source}")

    def mean_line(self, title: str, rows: List[Row], names: List[str]) -> None:
        found = [self.ratios(row) for row in rows]
        cells = ""
        for name in names:
            values = [math.log(ratios[name]) for ratios in found if name in ratios]
            cells += (f"{math.exp(sum(values) / len(values)):11.3f}" if values else f"{'-':>11}")
        print(f"{title:{WIDTH}}{len(rows):6}{cells}")

    def record(self, row: Row) -> Dict[str, Any]:
        """As a line of the CSV file. Seconds, but for bytes and error."""
        line: Dict[str, Any] = {"group": row.case.group(), "name": row.case.name(),
                                "case": row.case.to_json(), "kernel": row.kernel,
                                "error": row.error, "bytes": row.bytes,
                                "workspace": row.workspace, "remarks": "; ".join(
                                    f"{name}: {remark}" for name, remark in row.remarks.items()),
                                "refused": row.missing.get(self.mine[0], "")}
        line.update({f"{n}_seconds": row.seconds.get(n) for n in self.columns})
        for name in self.columns[1:]:
            found = row.paired.get(name)
            line.update({f"{name}_ratio": found and found.median, f"{name}_ratio_low":
                         found and found.low, f"{name}_ratio_high": found and found.high})
        line["state"] = row.state
        if self.options.sustained:
            line.update({f"{n}_sustained": row.sustained.get(n) for n in self.columns})
        line.update({f"{n}_table": row.table.get(n) for n in ("cudnn", "fa4", "fa3", "flash")})
        return line


def relative(mine: List[Array], truth: List[Any]) -> float:
    """The largest relative error of a result."""
    return max(float((a.tensor.float() - t.float()).norm() / t.float().norm())
               for a, t in zip(mine, truth))


def captured(work: Any) -> Tuple[Any, str]:
    """The work as a graph of PyTorch's; where it cannot be captured, as it is, with a remark."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay, ""
    except RuntimeError as error:
        torch.cuda.synchronize()
        why = str(error).split("\n", maxsplit=1)[0][:100]
        return work, f"called eagerly, since it cannot be captured in a graph: {why}"


def need_gpu() -> None:
    try:
        flashattn.check(dtype="float16", heads_q=1, dim_qk=8, device="cuda")
    except flashattn.UnsupportedError as refused:
        raise SystemExit(
            f"bench: {refused}. ./run bench --device cuda makes a build for GPUs and measures it; "
            "another is named by FLASHATTN_LIBRARY") from None


def main(cases: List[Case], options: argparse.Namespace) -> int:
    need_gpu()
    try:
        bench = Bench(options, cases)
    except OSError as error:
        raise SystemExit(f"bench: there is no NVIDIA driver on this machine ({error})") from None
    table = options.csv or ROOT / "build" / "bench" / "gpu.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    bench.head()
    rows = []
    with table.open("w", newline="") as file:
        writer = None
        for case in cases:
            try:
                row = bench.measure(case)
            except MemoryError as error:
                print(f"{case.name():{WIDTH}}  not measured: {error}")
                continue
            rows.append(row)
            bench.show(row)
            line = bench.record(row)
            writer = writer or csv.DictWriter(file, list(line), lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(line)
            file.flush()
    if rows:
        bench.summary(rows)
    print(f"table: {table}")
    print(chart.draw(table, options.plot or table.with_suffix(".png")))
    return 0
