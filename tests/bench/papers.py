"""./run bench --device cuda --preset papers: what the literature reports of attention without
stored scores, by this library, by PyTorch's SDPA, and by PyTorch with the scores stored, in one
run.

Training steps of GPT-2 and BERT-large (Dao et al. 2022), the shapes of the Long Range Arena (Tay et
al. 2021), the tables of the two Triton tutorials, time against the density of a block mask, bytes
of a GPU's memory against tokens / dim, and the loss curve of a small GPT-2 on the text in
tests/data. The runners take turns; figures are medians. On a CPU, training steps of a MiniLM and a
GPT-2, and less of the rest.
"""
from __future__ import annotations

import argparse
import csv
import gc
import pathlib
import statistics
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn.torch
import losses
import traffic
from training import ROOT, Attention, Shape, Step


def materialised(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flashattn.torch.attention(q, k, v, causal=causal)


RUNNERS: Dict[str, Attention] = {"materialised": materialised, "sdpa": sdpa, "flashattn": ours}


def nothing(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """In the place of attention: what no attention could be faster than."""
    return q + k + v


_GPT2, _LENGTHS = "3 x materialised at 1k", (1024, 2048, 4096)
SHAPES: Dict[str, List[Shape]] = {
    "cuda": [
        *[Shape(f"GPT-2 small, {n}", _GPT2, 12, 768, 12, n, 16384 // n) for n in _LENGTHS],
        *[Shape(f"GPT-2 medium, {n}", _GPT2, 24, 1024, 16, n, 8192 // n) for n in _LENGTHS],
        Shape("BERT-large, 512", "1.15 x the fused record", 24, 1024, 16, 512, 32, False, 30522),
        *[Shape(f"Long Range Arena, {n}", "2.4 x materialised", 4, 512, 8, n, 65536 // n, False,
                256) for n in _LENGTHS]],
    "cpu": [shape._replace(name=f"{shape.name}, {'bf16' if autocast else 'fp32'}",
                           autocast=autocast)
            for autocast in (True, False) for shape in (
                *[Shape(f"MiniLM, {n}", "", 6, 384, 12, n, 2048 // n, False, 30522)
                  for n in (512, 1024, 2048)],
                Shape("GPT-2 small, 2048", "", 12, 768, 12, 2048, 1))],
}


class Bench:
    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.lines: List[Dict[str, Any]] = []

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def once(self, work: Callable[[], Any]) -> float:
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - start

    def free(self) -> None:
        """What earlier rows have left."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def memory(self, work: Callable[[], Any]) -> float:
        """MiB on top of what there is, on a GPU."""
        if self.device != "cuda":
            return 0.0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def row(self, table: str, name: str, claim: str,
            makers: Dict[str, Callable[[], Callable[[], Any]]]) -> None:
        """Seconds of what each maker makes, and how many times as fast ours is. A runner for which
        the memory does not suffice, at first or beside the others, leaves the row."""
        works: Dict[str, Callable[[], Any]] = {}
        memory: Dict[str, float] = {}
        times: Dict[str, List[float]] = {}

        def attempt(runner: str, step: Callable[[], Any]) -> None:
            try:
                step()
                return
            except torch.OutOfMemoryError:
                pass  # its traceback holds tensors: freed behind this block
            for kept in (works, memory, times):
                kept.pop(runner, None)
            self.free()

        def start(runner: str, make: Callable[[], Callable[[], Any]]) -> None:
            works[runner], times[runner] = make(), []
            works[runner]()
            memory[runner] = self.memory(works[runner])

        self.free()
        for runner, make in makers.items():
            attempt(runner, lambda: start(runner, make))
        for _ in range(self.rounds):
            for runner in list(works):
                attempt(runner, lambda: times[runner].append(self.once(works[runner])))
        seconds = {runner: statistics.median(each) for runner, each in times.items()}
        line: Dict[str, Any] = {"table": table, "row": name, "claim": claim}
        for runner in RUNNERS:
            line[f"{runner}_seconds"] = seconds.get(runner)
            line[f"{runner}_mib"] = memory.get(runner)
        self.lines.append(line)
        cells = [f"{seconds[r] * 1e3:.2f} ms" if r in seconds else "out of memory" if r in makers
                 else "" for r in RUNNERS]
        if nothing.__name__ in seconds:
            most = seconds["sdpa"] / seconds[nothing.__name__]
            claim += f"without any attention {most:.2f} x sdpa"
        mine = seconds.get("flashattn")
        cells += [f"{seconds[r] / mine:.2f} x" if mine and r in seconds else ""
                  for r in ("materialised", "sdpa")]
        if self.device == "cuda":
            both = {"materialised", "flashattn"} <= set(memory)
            cells.append(f"{memory['materialised']:.0f}, {memory['flashattn']:.0f} MiB" if both
                         else "")
        print("| " + " | ".join([name, *cells, claim]) + " |", flush=True)

    def head(self, title: str) -> None:
        memory = "memory | " if self.device == "cuda" else ""
        columns = 7 + bool(memory)
        print(f"\n{title}\n\n| | {' | '.join(RUNNERS)} | over materialised | over sdpa | {memory}"
              f"the literature |\n|{'---|' * columns}")

    def training(self, shapes: Sequence[Shape]) -> None:
        """On a CPU also what a step takes without attention, which GPUs have no memory for."""
        self.head("A training step")
        runners = {**RUNNERS, **({nothing.__name__: nothing} if self.device == "cpu" else {})}
        for shape in shapes:
            self.row("training", shape.name, shape.claim, {
                name: lambda shape=shape, f=f: Step(shape, f, self.device)  # type: ignore[misc]
                for name, f in runners.items()})

    def tutorials(self, lengths: Sequence[int]) -> None:
        """4 sequences, 32 heads of 64."""
        claims = {torch.float16: "9 x; memory -93 % at 2048", torch.float32: "6 x"}
        for dtype, causal in ((dtype, causal) for dtype in claims for causal in (False, True)):
            self.head(f"The Triton tutorials' table: B4 H32 D64, {str(dtype)[6:]}"
                      f"{', causal' if causal else ''}, forward and backward")
            for n in lengths:
                inputs = [torch.randn(4, n, 32, 64, device=self.device, dtype=dtype,
                                      requires_grad=True) for _ in range(3)]

                def work(attention: Attention, inputs: Any = inputs, causal: bool = causal) -> None:
                    torch.autograd.grad(attention(*inputs, causal).sum(), inputs)

                self.row("tutorials", f"{str(dtype)[6:]} {n}{' causal' if causal else ''}",
                         claims[dtype], {name: lambda f=f, work=work: lambda: work(f)
                                         for name, f in RUNNERS.items()})  # type: ignore[misc]

    def densities(self, tokens: int) -> None:
        """Blocks of 128 by 128, drawn at random; the diagonal is always there."""
        self.head(f"Block masks: B1 H16 S{tokens} D64, forward and backward; time against density")
        blocks = tokens // 128
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        inputs = [torch.randn(1, tokens, 16, 64, device=self.device, dtype=dtype,
                              requires_grad=True) for _ in range(3)]
        for density in (1.0, 0.5, 0.25, 0.125):
            drawn = torch.rand(blocks, blocks, device=self.device).fill_diagonal_(-1.0)
            mask = drawn.argsort(-1).argsort(-1) < density * blocks

            def work(mask: Tensor = mask) -> None:
                o = flashattn.torch.attention(*inputs, block_mask=mask, block_q=128, block_kv=128)
                torch.autograd.grad(o.sum(), inputs)

            self.row("densities", f"{mask.float().mean().item():.3f}", "proportional",
                     {"flashattn": lambda work=work: work})  # type: ignore[misc]

    def traffic(self) -> None:
        """Where ncu cannot count, the table says why."""
        title = "Bytes of a GPU's memory, by ncu: 32,768 tokens, heads * d = 2048, bf16"
        try:
            found = traffic.measure(self.device, list(RUNNERS)) if self.device == "cuda" else {}
        except RuntimeError as error:
            self.lines.append({"table": "traffic", "row": "not measured", "claim": str(error)})
            print(f"\n{title}: not measured: {error}")
            return
        if not found:
            return
        print(f"\n{title}\n\n| | N / d | {' | '.join(RUNNERS)} | least | materialised over "
              f"flashattn |\n|{'---|' * 7}")
        for line in traffic.lines(found, list(RUNNERS)):
            self.lines.append(line)
            numbers = [line[f"{runner}_bytes"] for runner in RUNNERS]
            cells = [f"{x / 1e9:.2f} GB" if x else "out of memory"
                     for x in (*numbers, line["least_bytes"])]
            over = f"{numbers[0] / numbers[-1]:.1f} x" if numbers[0] and numbers[-1] else ""
            print("| " + " | ".join([line["row"], f"{line['tokens_over_dim']:.0f}", *cells, over])
                  + " |", flush=True)


def draw(lines: List[Dict[str, Any]], path: pathlib.Path) -> str:
    """The loss curves, and the times of the training steps."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return "no picture: matplotlib is not installed"
    steps = [line for line in lines if line["table"] == "training"]
    curves = [line for line in lines if line["table"] == "losses, seed 0"]
    if not steps and not curves:
        return "no picture: neither training nor losses was measured"
    figure, axes = pyplot.subplots(1, bool(steps) + bool(curves), squeeze=False, figsize=(13, 5))
    if steps:
        left = axes[0][0]
        for i, runner in enumerate(RUNNERS):
            values = [(line[f"{runner}_seconds"] or 0) * 1e3 for line in steps]
            left.bar([j + (i - 1) * 0.27 for j in range(len(steps))], values, 0.27, label=runner)
        left.set_xticks(range(len(steps)), [line["row"] for line in steps], rotation=60, ha="right")
        left.set_ylabel("ms a training step")
        left.legend()
    if curves:
        right = axes[0][-1]
        for name in (key for key in curves[0] if key.startswith("loss, ") and ", run " not in key):
            right.plot([line[name] for line in curves], label=name)
        right.set_xlabel("step")
        right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return f"picture: {path}"


def sizes(device: str, quick: bool) -> Tuple[List[Shape], Sequence[int], int, Shape, int, int]:
    """Shapes of training steps, lengths of the tutorials, tokens of the block masks, the model of
    the loss curve, its steps and seeds. quick: the least that runs every part."""
    if quick:
        tiny = Shape("tiny", "", 1, 32, 2, 64, 2, vocabulary=256, autocast=device == "cuda")
        return [tiny], [64], 256, tiny, 2, 1
    if device == "cpu":
        small = Shape("two layers of 256", "", 2, 256, 8, 256, 4, vocabulary=256, autocast=False)
        return SHAPES["cpu"], [512, 1024], 2048, small, 100, 2
    small = Shape("GPT-2 small", "", 12, 768, 12, 1024, 4)
    return SHAPES["cuda"], [512, 1024, 2048, 4096, 8192], 8192, small, 200, 4


def main(options: argparse.Namespace, quick: bool = False) -> int:
    bench, start = Bench(options.device, 1 if quick else options.rounds), time.perf_counter()
    if options.device == "cpu" and options.threads:
        torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name() if options.device == "cuda" else \
        f"{torch.get_num_threads()} threads"
    print(f"{name}, PyTorch {torch.__version__}; {flashattn.build_info()}")
    shapes, lengths, tokens, small, steps, seeds = sizes(options.device, quick)
    parts = {"training": lambda: bench.training(shapes),
             "tutorials": lambda: bench.tutorials(lengths),
             "densities": lambda: bench.densities(tokens), "traffic": bench.traffic,
             "losses": lambda: bench.lines.extend(losses.measure(
                 sdpa, ours, small, steps, seeds, options.device, bench.free))}
    chosen = options.only.split() or list(parts)
    if set(chosen) - set(parts):
        raise SystemExit(f"--only names parts of papers: {', '.join(parts)}")
    for part in chosen:
        parts[part]()
    table = options.csv or ROOT / "build" / "bench" / "papers.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    fields = list(dict.fromkeys(key for line in bench.lines for key in line))
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(bench.lines)
    print(f"{time.perf_counter() - start:.0f} s\ntable: {table}")
    print(draw(bench.lines, options.plot or table.with_suffix(".png")))
    return 0
