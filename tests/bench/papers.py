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
import itertools
import json
import pathlib
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn.torch
import traffic

ROOT = pathlib.Path(__file__).resolve().parents[2]
Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


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


REPEATS = 4  # runs of a loss curve, whose differences are the spread
RUNNERS: Dict[str, Attention] = {"materialised": materialised, "sdpa": sdpa, "flashattn": ours}


def nothing(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """In the place of attention: what no attention could be faster than."""
    return q + k + v


def sdpa_by(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, causal)
    return attention


class Shape(NamedTuple):
    """A transformer and its batch."""

    name: str
    claim: str  # the literature's
    layers: int
    width: int
    heads: int
    tokens: int
    batch: int
    causal: bool = True
    vocabulary: int = 50257
    autocast: bool = True  # to bfloat16


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


class Block(nn.Module):
    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.shape, self.attention = shape, attention
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(a * shape.width, b * shape.width)
            for a, b in ((1, 3), (1, 1), (1, 4), (4, 1)))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.shape.heads, -1))
        x = x + self.out(self.attention(*qkv.unbind(2), self.shape.causal).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Transformer(nn.Module):
    """Of GPT-2's kind; not causal, of BERT's."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.Sequential(*[Block(shape, attention) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[:ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Step:
    """A model, and what a step of its training is: forward, backward, AdamW."""

    def __init__(self, shape: Shape, attention: Attention, device: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        with torch.device(device):  # a GPU draws 0.35e9 weights in no time, a CPU in seconds
            self.model = Transformer(shape, attention)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.device, self.autocast = device, shape.autocast
        self.ids = torch.randint(shape.vocabulary, (shape.batch, shape.tokens + 1), device=device)

    def __call__(self, ids: Optional[Tensor] = None) -> Tensor:
        ids = self.ids if ids is None else ids
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


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

    def losses(self, shape: Shape, steps: int, seeds: int) -> None:
        """Curves of several runs of SDPA and of ours, and of each of SDPA's kernels.

        A second run of the same kernel has the same o, bit for bit; on a GPU sums of gradients come
        in another order. Another kernel rounds every o in another way. Training lets both grow, so
        that SDPA's kernels among themselves are what another kernel compares with.
        """
        kernels = {f"sdpa {backend.name.lower().partition('_attention')[0]}": sdpa_by(backend)
                   for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                                   SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)}
        runs = {"sdpa": sdpa, "sdpa again": sdpa, **kernels, "flashattn": ours}
        repeats = {name: [name, *(f"{name}, run {i}" for i in range(first, REPEATS + 1))]
                   for name, first in (("sdpa", 3), ("flashattn", 2))}
        repeats["sdpa"].insert(1, "sdpa again")
        for name, names in repeats.items():
            runs.update({other: runs[name] for other in names})
        for seed in range(seeds):
            curves = {name: curve for name, f in runs.items()
                      if (curve := self.curve(f, shape, steps, seed)) is not None}
            for i, values in enumerate(zip(*[curve.tolist() for curve in curves.values()])):
                self.lines.append({"table": f"losses, seed {seed}", "row": i + 1, **{
                    f"loss, {name}": value for name, value in zip(curves, values)}})
            theirs = [name for name in kernels if name in curves]
            first = curves["sdpa"]
            print(f"\nLoss of {shape.name} over {steps} steps on tests/data/passages.json, seed "
                  f"{seed}: from {first[0]:.3f} to {first[-1]:.3f} by SDPA, "
                  f"{curves['flashattn'][-1]:.3f} by flashattn. Differences:\n\n"
                  "| | mean | largest |\n|---|---|---|")
            pairs = [("sdpa", "sdpa again"), *itertools.combinations(theirs, 2),
                     *[(name, "flashattn") for name in ("sdpa", *theirs)]]
            both = [[curves[name] for name in names] for names in repeats.values()]
            spreads: Dict[str, Any] = {
                f"{REPEATS} runs of sdpa": itertools.combinations(both[0], 2),
                f"{REPEATS} runs of flashattn": itertools.combinations(both[1], 2),
                "each of sdpa, each of flashattn": itertools.product(*both),
                "the mean of sdpa, the mean of flashattn": [
                    [torch.stack(its).mean(0) for its in both]]}
            for name, those in spreads.items():
                apart = torch.stack([(a - b).abs() for a, b in those])
                print(f"| {name} | {apart.mean():.5f} | {apart.max():.4f} |", flush=True)
            for a, b in pairs:
                apart = (curves[a] - curves[b]).abs()
                print(f"| {a}, {b} | {apart.mean():.5f} | {apart.max():.4f} |", flush=True)

    def curve(self, attention: Attention, shape: Shape, steps: int,
              seed: int) -> Optional[Tensor]:
        """Losses; None where that kernel does not run."""
        self.free()
        step = Step(shape, attention, self.device, seed)
        try:
            return torch.stack([step(ids) for ids in batches(shape, steps, self.device, seed)])
        except RuntimeError as error:
            if not any(sign in str(error) for sign in ("No available kernel", "No viable backend")):
                raise
            return None


def batches(shape: Shape, steps: int, device: str, seed: int = 0) -> Iterator[Tensor]:
    """Bytes of the passages, the same places for every runner."""
    passages = json.loads((ROOT / "tests" / "data" / "passages.json").read_text(encoding="utf-8"))
    data = torch.tensor(list(json.dumps(passages, ensure_ascii=False).encode()))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - shape.tokens - 1, (shape.batch,), generator=generator)
        yield torch.stack([data[i:i + shape.tokens + 1] for i in starts.tolist()]).to(device)


def draw(lines: List[Dict[str, Any]], path: pathlib.Path) -> str:
    """The loss curves, and the times of the training steps."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return "no picture: matplotlib is not installed"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    steps = [line for line in lines if line["table"] == "training"]
    for i, runner in enumerate(RUNNERS):
        values = [(line[f"{runner}_seconds"] or 0) * 1e3 for line in steps]
        left.bar([j + (i - 1) * 0.27 for j in range(len(steps))], values, 0.27, label=runner)
    left.set_xticks(range(len(steps)), [line["row"] for line in steps], rotation=60, ha="right")
    left.set_ylabel("ms a training step")
    left.legend()
    losses = [line for line in lines if line["table"] == "losses, seed 0"]
    for name in ([key for key in losses[0] if key.startswith("loss, ")
                 and ", run " not in key] if losses else ()):
        right.plot([line[name] for line in losses], label=name)
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
    small = Shape("GPT-2 small", "", 12, 768, 12, 1024, 8)
    return SHAPES["cuda"], [512, 1024, 2048, 4096, 8192], 8192, small, 200, 2


def main(options: argparse.Namespace, quick: bool = False) -> int:
    bench, start = Bench(options.device, 1 if quick else options.rounds), time.perf_counter()
    if options.device == "cpu" and options.threads:
        torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name() if options.device == "cuda" else \
        f"{torch.get_num_threads()} threads"
    print(f"{name}, PyTorch {torch.__version__}; {flashattn.build_info()}")
    shapes, lengths, tokens, small, steps, seeds = sizes(options.device, quick)
    bench.training(shapes)
    bench.tutorials(lengths)
    bench.densities(tokens)
    bench.traffic()
    bench.losses(small, steps, seeds)
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
