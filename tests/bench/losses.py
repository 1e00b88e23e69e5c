"""Does a loss curve show which attention was called? Runs of SDPA beside runs of this library.

Runs of one seed start from the same weights and see the same text. Two runs of one kernel differ
all the same on a GPU, which adds some sums of gradients in any order, and training lets the
difference grow. That spread of SDPA is the measure:

    apart     |mean curve of SDPA - mean curve of ours|, the mean over the steps
    spread    the largest loss of SDPA's runs less the least at a step, the mean over the steps
    chance    a permutation test: the runs are divided into two halves in all ways; the part of
              these whose mean curves are at least as far apart. It is small if the kernels differ

The curves are the same within SDPA's spread where apart <= spread at every seed. A kernel that is
wrong on purpose, CONTROL times the scores, shows what the comparison can see. On a CPU all runs of
a kernel are equal, and what SDPA's kernels are from each other is the measure.
"""
from __future__ import annotations

import itertools
import math
import statistics
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from training import Attention, Shape, Step, batches

RUNS = {"cuda": 8, "cpu": 2}  # of each at a seed
CONTROL = 1.05
CONTROLLED = f"scores times {CONTROL}"
LAST = 20  # steps at the end, whose mean is the loss that a table shows
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
           SDPBackend.MATH)


class Comparison(NamedTuple):
    """See above."""

    apart: float
    spread: float
    chance: float


def compare(theirs: Tensor, ours: Tensor) -> Comparison:
    """Of curves (runs, steps), as many of each."""
    curves, runs = torch.cat([theirs, ours]).double(), len(theirs)
    apart = (theirs.double().mean(0) - ours.double().mean(0)).abs().mean()
    spread = (theirs.amax(0) - theirs.amin(0)).mean()
    halves = torch.zeros(math.comb(2 * runs, runs), 2 * runs, dtype=torch.float64)
    for line, chosen in zip(halves, itertools.combinations(range(2 * runs), runs)):
        line[list(chosen)] = 1
    drawn = (2 * halves.to(curves.device) @ curves - curves.sum(0)).abs().mean(1) / runs
    # The split that was observed is one of them, but for the order of its additions.
    return Comparison(apart.item(), spread.item(),
                      (drawn >= apart * (1 - 1e-9)).double().mean().item())


def from_mean(run: Tensor, others: Sequence[Tensor]) -> float:
    return (run - torch.stack(list(others)).mean(0)).abs().mean().item()


def scaled(attention: Attention) -> Attention:
    return lambda q, k, v, causal: attention(q * CONTROL, k, v, causal)


def by_kernel(attention: Attention, backend: SDPBackend) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return attention(q, k, v, causal)
    return call


def curve(attention: Attention, shape: Shape, steps: int, device: str,
          seed: int) -> Optional[Tensor]:
    """Losses of the steps; None where SDPA has no such kernel for them."""
    step = Step(shape, attention, device, seed)
    try:
        return torch.stack([step(ids) for ids in batches(shape, steps, device, seed)])
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("No available kernel", "No viable backend")):
            raise
        return None


def measure(sdpa: Attention, ours: Attention, shape: Shape, steps: int, seeds: int,
            device: str, free: Callable[[], None]) -> List[Dict[str, Any]]:
    """Prints the comparison; lines of a table, a step each. free() is called before each run."""
    def run(attention: Attention, seed: int) -> Optional[Tensor]:
        free()
        return curve(attention, shape, steps, device, seed)

    print(f"\nLoss of {shape.name}, {shape.batch} x {shape.tokens} tokens a step, {steps} steps on "
          f"tests/data/passages.json, {RUNS[device]} runs of each, in turns: the mean of the last "
          f"{LAST} steps, least to largest; |differences|, means over the steps\n\n"
          "| | SDPA | flashattn | a run of SDPA from the others' mean | a run of flashattn "
          f"from SDPA's mean | apart | spread | chance |\n|{'---|' * 8}", flush=True)
    lines: List[Dict[str, Any]] = []
    found: List[Comparison] = []
    for seed in range(seeds):
        attentions = {"sdpa": sdpa, "flashattn": ours, **({CONTROLLED: scaled(sdpa)} if seed == 0
                                                          else {})}
        runs: Dict[str, List[Tensor]] = {name: [] for name in attentions}
        for _, (name, attention) in itertools.product(range(RUNS[device]), attentions.items()):
            losses = run(attention, seed)
            assert losses is not None, f"{name} does not run"
            runs[name].append(losses)
        found.append(show(f"seed {seed}", runs["sdpa"], runs["flashattn"]))
        if CONTROLLED in runs:
            show(f"seed {seed}, {CONTROLLED}", runs["sdpa"], runs[CONTROLLED])
        lines += [{"table": f"losses, seed {seed}", "row": i + 1, **{
            f"loss, {name}{f', run {j + 1}' if j else ''}": losses[i].item()
            for name, each in runs.items() for j, losses in enumerate(each)}}
            for i in range(steps)]
        if seed == 0:
            kernels = {backend.name.lower().partition("_attention")[0]: run(
                by_kernel(sdpa, backend), seed) for backend in KERNELS}
            beside = [f"{name} {from_mean(losses, runs['sdpa']):.3g}"
                      for name, losses in kernels.items() if losses is not None]
    within = sum(each.apart <= each.spread for each in found)
    print(f"\nWithin SDPA's spread at {within} of {seeds} seeds; the least chance times their "
          f"number: {min(1.0, seeds * min(each.chance for each in found)):.3f}. SDPA's kernels "
          f"from its mean at seed 0: {', '.join(beside)}", flush=True)
    return lines


def show(name: str, theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> Comparison:
    found = compare(torch.stack(list(theirs)), torch.stack(list(ours)))
    ends = [[losses[-LAST:].mean().item() for losses in each] for each in (theirs, ours)]
    alone = statistics.mean(from_mean(x, [y for y in theirs if y is not x]) for x in theirs)
    beside = statistics.mean(from_mean(x, theirs) for x in ours)
    print(f"| {name} | " + " | ".join(f"{min(each):.4f} to {max(each):.4f}" for each in ends)
          + f" | {alone:.3g} | {beside:.3g} | {found.apart:.3g} | {found.spread:.3g} | "
          f"{found.chance:.3g} |", flush=True)
    return found
