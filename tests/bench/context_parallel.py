"""./run bench --device cuda --preset context-parallel: attention of one long sequence, or of packed
documents, on 1, 2, 4, ... GPUs of this host, by this library and by PyTorch's own kernels.

Causal sequences run under torch's context_parallel (keys and values are gathered, load balanced).
It has nothing for packed documents: there the tokens of all heads become all tokens of some heads
and back, by DTensor's redistribute(), which is an all-to-all. With --device cpu: two processes,
gloo, tiny sizes. README.md predicts the figures.

One process for each GPU, started here. The rows come as they are measured; --csv has them all.
Environment variables of NCCL and torch stay as they are.
"""
from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import gc
import inspect
import pathlib
import queue as queues
import statistics
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn.torch as fa

ROOT = pathlib.Path(__file__).resolve().parents[2]
_END = 25.0  # seconds that the last row may take longer, and the processes to end
_WARM = 1024  # tokens of each process in a first call that does not count
_NAMES = ("o", "dq", "dk", "dv")


class Setup(NamedTuple):
    """What is measured, and on what."""

    device: str
    sizes: Tuple[int, ...]  # GPUs of a row
    tokens: Tuple[int, ...]  # of causal sequences; the first is compared with one GPU, too
    packed: int  # tokens of all documents
    shortest: int
    longest: int
    heads: int
    heads_kv: int
    dim: int
    rounds: int
    seconds: float  # rows that would end later, from the start of all, are left out

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def runners(self) -> Dict[str, Optional[SDPBackend]]:
        """None: this library."""
        if self.device == "cpu":
            return {"flashattn": None}
        return {"flashattn": None, "torch, cudnn": SDPBackend.CUDNN_ATTENTION,
                "torch, flash": SDPBackend.FLASH_ATTENTION}

    def flops(self, lengths: List[int]) -> float:
        """Of the forward pass; 2.5 times as many backward."""
        return 4.0 * self.heads * self.dim * sum(n * n / 2 for n in lengths)


def setup(device: str, gpus: int, rounds: int, quick: bool = False) -> Setup:
    sizes = tuple(1 << i for i in range(gpus.bit_length()))
    if device == "cpu":
        tokens, packed = ((64, 256), 320) if quick else ((1 << 10, 1 << 12), 1 << 12)
        return Setup(device, sizes, tokens, packed, 8, 128, 4, 2, 16, rounds, 240.0)
    return Setup(device, sizes, (1 << 15, 1 << 17, 1 << 19), 1 << 19, 1 << 12, 1 << 17, 64, 8, 128,
                 rounds, 170.0)


def documents(given: Setup) -> List[int]:
    """Log-normal lengths, which together are the tokens of a row."""
    generator = torch.Generator().manual_seed(0)
    middle = (given.shortest * given.longest) ** 0.5
    lengths: List[int] = []
    while sum(lengths) < given.packed:
        drawn = middle * float(torch.randn((), generator=generator).exp())
        length = int(min(max(drawn, given.shortest), given.longest))
        lengths.append(min(length, given.packed - sum(lengths)))
    return lengths


# ---- one row, in each process of it

Times = Tuple[float, float]  # seconds forward, backward
Pass = Callable[[], Any]


class Member:
    """One process of a row. mesh is None where it is alone."""

    def __init__(self, given: Setup, mesh: Any, group: Any) -> None:
        self.given, self.mesh, self.group = given, mesh, group
        self.size = 1 if mesh is None else mesh.size()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.given.device, dtype=self.given.dtype)

    def inputs(self, tokens: int, seq_first: bool) -> List[Tensor]:
        """q, k, v and dout of this process."""
        found, local = [], tokens // self.size
        for heads in (self.given.heads, self.given.heads_kv, self.given.heads_kv,
                      self.given.heads):
            shape = (local, heads) if seq_first else (1, heads, local)
            found.append(self.random(*shape, self.given.dim))
        for x in found[:3]:
            x.requires_grad_()
        return found

    def wait(self) -> None:
        if self.given.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, forward: Pass, inputs: List[Tensor], dout: Tensor, rounds: int) -> List[Times]:
        times = []
        for _ in range(rounds):
            self.wait()
            dist.barrier(self.group)
            start = time.perf_counter()
            o = forward()
            self.wait()
            middle = time.perf_counter()
            torch.autograd.grad(o, inputs, dout)
            self.wait()
            times.append((middle - start, time.perf_counter() - middle))
            del o
        return times

    @contextlib.contextmanager
    def kernels(self, backend: Optional[SDPBackend]) -> Iterator[None]:
        """Flash attention under SDPA, by whom. None: this library."""
        chosen = backend
        if backend is None:
            fa.activate()
            chosen = SDPBackend.FLASH_ATTENTION
        try:
            with sdpa_kernel([chosen]):
                yield
        finally:
            fa.restore()

    @contextlib.contextmanager
    def split(self, **buffers: Any) -> Iterator[None]:
        if self.mesh is None:
            yield
            return
        from torch.distributed.tensor.experimental import context_parallel
        # Without buffers it does not find the device.
        none = [torch.empty(2 * self.size, device=self.given.device)]
        buffers = buffers or dict(buffers=none, buffer_seq_dims=[0], no_restore_buffers=set(none))
        with context_parallel(self.mesh, **buffers):
            yield

    def causal(self, backend: Optional[SDPBackend], tokens: int, rounds: int) -> List[Times]:
        if tokens > _WARM * self.size:  # loads the kernels, opens the connections
            self.causal(backend, _WARM * self.size, 1)
        q, k, v, dout = self.inputs(tokens, False)
        before = fa.report()["forward"]
        with self.kernels(backend), self.split():
            found = self.timed(lambda: _sdpa(q, k, v), [q, k, v], dout, rounds)
        if (fa.report()["forward"] > before) != (backend is None):
            raise RuntimeError(f"refused by flashattn: {fa.report()['refused']}")
        return found

    def packed(self, backend: Optional[SDPBackend], lengths: List[int], rounds: int) -> List[Times]:
        """Tokens are split between calls, heads in them."""
        if self.given.heads_kv % self.size or sum(lengths) % self.size:
            raise ValueError(f"{self.given.heads_kv} heads of keys and {sum(lengths)} tokens on "
                             f"{self.size} GPUs")  # in every process, so that none waits
        if backend and sum(lengths) * self.given.heads * self.given.dim >= self.size << 32:
            raise ValueError("torch's kernels crash with 2^32 elements of q")
        if sum(lengths) > _WARM * self.size:
            self.packed(backend, [_WARM * self.size], 1)
        *inputs, dout = self.inputs(sum(lengths), True)
        cu = torch.tensor([0, *lengths], device=self.given.device).cumsum(0).to(torch.int32)
        varlen = _varlen(backend, cu, max(lengths))

        def forward() -> Tensor:
            return self.exchange(varlen(*[self.exchange(x, 0, 1) for x in inputs]), 1, 0)

        with sdpa_kernel([backend]) if backend else contextlib.nullcontext():
            return self.timed(forward, inputs, dout, rounds)

    def exchange(self, tensor: Tensor, before: int, after: int) -> Tensor:
        """Shards over one dimension as shards over another."""
        if self.mesh is None:
            return tensor
        from torch.distributed.tensor import DTensor, Shard
        split = DTensor.from_local(tensor, self.mesh, [Shard(before)], run_check=False)
        return split.redistribute(placements=[Shard(after)]).to_local()

    def compared(self, backend: Optional[SDPBackend], tokens: int) -> str:
        """The largest differences from one GPU's results, beside the errors of the formula in the
        type of the inputs (of the heads that share one head of keys)."""
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard
        torch.manual_seed(1)
        whole = Member(self.given, None, None).inputs(tokens, False)
        shards = [x.detach().clone() for x in whole]
        with self.kernels(backend):
            with self.split(buffers=shards, buffer_seq_dims=[2] * 4,
                            no_restore_buffers=set(shards)):
                leaves = [x.requires_grad_() for x in shards[:3]]
                o = _sdpa(*leaves)
                grads = torch.autograd.grad(o, leaves, shards[3])
            results = context_parallel_unshard(self.mesh, [o.detach(), *grads], [2] * 4)
            if self.mesh.get_local_rank():
                return ""
            alone = _sdpa(*whole[:3])
            wants = [alone.detach(), *torch.autograd.grad(alone, whole[:3], whole[3])]
        apart = [(a.float() - b.float()).abs().max().item() for a, b in zip(results, wants)]
        group = self.given.heads // self.given.heads_kv
        few = [x.detach()[0, :heads] for x, heads in zip(whole, (group, 1, 1, group))]
        exact, naive = (formula(*few, kind) for kind in (torch.float64, self.given.dtype))
        errors = [(a.double() - b).abs().max().item() for a, b in zip(naive, exact)]
        return ", ".join(f"{name} {a:.1e} ({b:.1e})" for name, a, b in zip(_NAMES, apart, errors))


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _varlen(backend: Optional[SDPBackend], cu: Tensor, longest: int) -> Callable[..., Tensor]:
    if backend is None:
        return lambda q, k, v: fa.attention_varlen(q, k, v, cu, cu, longest, longest, causal=True)
    from torch.nn.attention.varlen import varlen_attn
    takes = inspect.signature(varlen_attn).parameters
    options: Dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {
        "is_causal": True}
    if "enable_gqa" in takes:
        options["enable_gqa"] = True

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if "enable_gqa" not in takes:  # of an older torch: as many heads for k and v
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return varlen_attn(q, k, v, cu, cu, longest, longest, **options)
    return attention


def formula(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dtype: torch.dtype,
            block: int = 1024) -> List[Tensor]:
    """o, dq, dk and dv of causal attention, (heads, tokens, dim), with stored scores of a block of
    rows at a time. Sums over blocks are in float64."""
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    scale, tokens = q.shape[-1] ** -0.5, q.shape[1]
    o, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (k, v))
    for first in range(0, tokens, block):
        rows, keys = slice(first, first + block), slice(0, min(first + block, tokens))
        hidden = torch.ones(q[0, rows].shape[0], keys.stop, dtype=torch.bool,
                            device=q.device).triu(first + 1)
        weights = ((q[:, rows] @ k[:, keys].mT) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        o[:, rows] = weights @ v[:, keys]
        dweights = dout[:, rows] @ v[:, keys].mT
        dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * scale
        dq[:, rows] = dscores @ k[:, keys]
        dk[:, keys] += torch.einsum("hqk,hqd->kd", dscores, q[:, rows])
        dv[:, keys] += torch.einsum("hqk,hqd->kd", weights, dout[:, rows])
    return [o, dq, dk, dv]


# ---- all rows, in every process

class Ranks:
    """The processes, of which the first decides and tells. They talk by gloo beside the rows."""

    def __init__(self, given: Setup, rank: int, end: float, said: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        self.given, self.rank, self.said = given, rank, said
        self.end, self.count = end, given.sizes[-1]
        self.everyone = dist.new_group(backend="gloo")
        self.members = {}
        for size in given.sizes:
            group = dist.new_group(list(range(size)), backend="gloo")
            mesh = DeviceMesh(given.device, list(range(size))) if size > 1 else None
            if rank < size:
                self.members[size] = Member(given, mesh, group)
        self.rates: Dict[Tuple[str, str, int], Times] = {}

    def told(self, value: Any) -> Any:
        """What the first process has for value."""
        values = [value]
        dist.broadcast_object_list(values, 0, group=self.everyone)
        return values[0]

    def attempt(self, size: int, work: Callable[[Member], Any]) -> Tuple[List[Any], str]:
        """What work returns in each process of a row, and why one of them failed."""
        result, failed = None, ""
        if size in self.members:
            try:
                result = work(self.members[size])
            except torch.OutOfMemoryError:
                failed = "out of memory"
            except Exception as error:  # the other rows run
                failed = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        gc.collect()
        if self.given.device == "cuda":
            torch.cuda.empty_cache()
        found: List[Any] = [None] * self.count
        dist.all_gather_object(found, (result, failed), group=self.everyone)
        return [each[0] for each in found[:size]], next(filter(None, [e[1] for e in found]), "")

    def rounds_of(self, flops: float, size: int) -> int:
        """As many as there is time for; 0: not one."""
        left = self.end - time.time()
        one = 3.5 * flops / (size * 350e12 if self.given.device == "cuda" else 1e10)
        return self.told(int(max(0, min(self.given.rounds, left // (one + 0.1)))))

    def row(self, case: str, lengths: List[int], size: int, runner: str,
            work: Callable[[Member, int], List[Times]]) -> None:
        flops = self.given.flops(lengths)
        line: Dict[str, Any] = {"case": case, "tokens": sum(lengths), "gpus": size,
                                "runner": runner, "note": ""}
        rounds = self.rounds_of(flops, size)
        if not rounds:
            line["note"] = "no time"
        else:
            results, line["note"] = self.attempt(size, lambda member: work(member, rounds))
            if not line["note"]:
                slowest = [max(found) for found in zip(*[
                    [statistics.median(column) for column in zip(*each)] for each in results])]
                rates = (flops / size / slowest[0], 2.5 * flops / size / slowest[1])
                self.rates[case, runner, size] = rates
                alone = self.rates.get((case, runner, 1)) or self.rates.get((
                    f"causal, {self.given.tokens[1]}", runner, 1))
                for i, name in enumerate(("forward", "backward")):
                    line[f"{name}_seconds"] = slowest[i]
                    line[f"{name}_rate"] = rates[i]
                    line[f"{name}_of_one"] = rates[i] / alone[i] if alone else None
        if self.rank == 0:
            self.said.put(line)

    def run(self) -> None:
        given, (least, *_) = self.given, self.given.tokens
        for size in given.sizes[1:]:
            for runner, backend in given.runners.items():
                results, failed = self.attempt(
                    size, lambda member: member.compared(backend, least))
                if self.rank == 0:
                    self.said.put({"case": "compared", "tokens": least, "gpus": size,
                                   "runner": runner, "note": failed or results[0]})
        cases = [(f"causal, {n}", [n], False) for n in given.tokens]
        cases.insert(-1, ("packed", documents(given), True))
        for i, (case, each, packed) in enumerate(cases):
            # The longest runs on the most GPUs first: there may be no time for the fewest.
            for size in given.sizes if i < len(cases) - 1 else given.sizes[::-1]:
                for runner, backend in given.runners.items():
                    self.row(case, each, size, runner, lambda member, rounds: (
                        member.packed(backend, each, rounds) if packed else
                        member.causal(backend, each[0], rounds)))
                if packed and size > 1 and self.rank == 0:
                    self.said.put({"case": case, "tokens": sum(each), "gpus": size,
                                   "runner": "context_parallel", "note": "torch has none"})


def work(rank: int, given: Setup, end: float, meeting: str, said: Any) -> None:
    if given.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if given.device == "cuda" else "gloo",
                            f"file://{meeting}", rank=rank, world_size=given.sizes[-1],
                            timeout=datetime.timedelta(seconds=90))
    Ranks(given, rank, end, said).run()
    if rank == 0:
        said.put(None)
    dist.destroy_process_group()


# ---- the one that people start

def shown(line: Dict[str, Any]) -> str:
    cells = [line["case"], str(line["gpus"]), line["runner"]]
    for name in ("forward", "backward"):
        rate, of_one = line.get(f"{name}_rate"), line.get(f"{name}_of_one")
        cells.append("" if rate is None else f"{rate * 1e-12:.3g}" + (
            "" if of_one is None else f" ({of_one:.2f})"))
    return "| " + " | ".join([*cells, line["note"]]) + " |"


def rows(given: Setup) -> Iterator[Dict[str, Any]]:
    """As they come. Processes that hang are stopped."""
    import torch.multiprocessing as multiprocessing
    context = multiprocessing.get_context("spawn")
    end = time.time() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        said = context.Queue()
        processes = [context.Process(target=work, args=(
            rank, given, end, f"{folder}/meeting", said), daemon=True)
            for rank in range(given.sizes[-1])]
        for process in processes:
            process.start()
        try:
            while True:
                try:
                    line = said.get(timeout=0.5)
                except queues.Empty:
                    if time.time() > end + _END or any(p.exitcode for p in processes):
                        yield {"case": "", "tokens": 0, "gpus": 0, "runner": "",
                               "note": "a process failed or hung; what it said is above"}
                        return
                    continue
                if line is None:
                    break
                yield line
            for process in processes:
                process.join(timeout=_END)
        finally:
            for process in processes:
                process.kill()


def main(options: argparse.Namespace, quick: bool = False) -> int:
    gpus = torch.cuda.device_count() if options.device == "cuda" else 2
    if not gpus:
        raise SystemExit("bench: --preset context-parallel needs GPUs, two or more to compare, and "
                         "PyTorch finds none; --device cpu tries it with two processes")
    if not dist.is_available():
        raise SystemExit("bench: this PyTorch has no torch.distributed; install one that has")
    given = setup(options.device, gpus, options.rounds, quick)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, gloo"
    print(f"{given.sizes[-1]} x {name}, PyTorch {torch.__version__}; {given.heads} heads on "
          f"{given.heads_kv}, D{given.dim}, {str(given.dtype)[6:]}; TFLOP/s a GPU (of one GPU's)")
    if gpus == 1:
        print("one GPU: there is nothing to compare it with")
    print("\n| | GPUs | kernels | forward | backward | |\n|---|---|---|---|---|---|", flush=True)
    lines, start = [], time.perf_counter()
    for line in rows(given):
        lines.append(line)
        print(shown(line), flush=True)
    table = options.csv or ROOT / "build" / "bench" / "context_parallel.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    fields = list(dict.fromkeys(key for line in lines for key in line))
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"\n{time.perf_counter() - start:.0f} s\ntable: {table}")
    return 0 if lines and all(line["gpus"] for line in lines) else 1
