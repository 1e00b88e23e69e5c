"""What an eager call takes besides its kernel: the smallest tensors, microseconds, beside PyTorch's
own function.

    FLASHATTN_LIBRARY=... PYTHONPATH=bindings/python build/venv-torch/bin/python \\
        tests/bench/torch_cost.py [--device cuda] [--clock wall]

The clock is that of the calling thread on a CPU, which others on its core do not add to, and the
wall's on a GPU, whose backward calls autograd runs on a thread of its own: the calling thread's
clock shows next to nothing of them.

The kinds of calls take turns, 25 at a time; of what a call of each turn took the least is shown. A
backward call is one of torch.autograd.grad: most of it is PyTorch's, as that of a sum shows; one of
ten is what a call adds to a longer backward pass. flash-attn's functions are there on a GPU where
packages of it are installed, 2, 3 and 4; nan: one has no backward pass.
"""
from __future__ import annotations

import argparse
import importlib
import sys
import time
from typing import Any, Callable, Dict

import torch
import torch.nn.functional as F

import flashattn
import flashattn.torch as fa

_CALLS = 25
_CHAIN = 10  # calls of one backward pass


def measure(calls: Dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float],
            synchronize: Callable[[], Any]) -> Dict[str, float]:
    """Microseconds. The GPU has nothing to do when a turn begins, so that no call waits for it."""
    least = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize()
            start = clock()
            for _ in range(_CALLS):
                call()
            least[name] = min(least[name], (clock() - start) / _CALLS * 1e6)
    return least


def gradient(o: torch.Tensor, inputs: Any) -> Callable[[], Any]:
    dout = torch.ones_like(o)
    return lambda: torch.autograd.grad(o, inputs, dout, retain_graph=True)


def chain(function: Callable[..., Any], leaf: torch.Tensor, k: torch.Tensor,
          v: torch.Tensor) -> Callable[[], Any]:
    """The backward pass of several calls, each of the result of the one before."""
    o = leaf
    for _ in range(_CHAIN):
        o = function(o, k, v)
    return gradient(o, leaf)


def kinds(function: Callable[..., Any], inputs: Any, leaves: Any) -> Dict[str, Callable[[], Any]]:
    """What is measured of a function of q, k and v."""
    return {"forward": lambda: function(*inputs),
            "forward, recorded": lambda: function(*leaves),
            "backward": gradient(function(*leaves), leaves),
            "backward, one of ten": chain(function, leaves[0], *inputs[1:])}


def flash_attns() -> Dict[str, Callable[..., Any]]:
    """The functions of what is installed of flash-attn 2, 3 and 4, by the module's name."""
    found = {}
    for module in ("flash_attn", "flash_attn_interface", "fa3_fwd_interface", "flash_attn.cute"):
        try:
            function = importlib.import_module(module).flash_attn_func
        except ModuleNotFoundError as error:
            if error.name != module.partition(".")[0]:  # it is installed
                print(f"{module} does not import: {error}", file=sys.stderr)
            continue
        except Exception as error:
            print(f"{module} does not import: {error}", file=sys.stderr)
            continue

        def first(*inputs: Any, function: Callable[..., Any] = function) -> Any:
            o = function(*inputs)
            return o[0] if isinstance(o, tuple) else o
        found[module] = first
    return found


def working(calls: Dict[str, Callable[[], Any]]) -> Dict[str, Callable[[], Any]]:
    """Those that run: a wheel may have no backward pass."""
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception:
            continue
        found[name] = call
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--clock", choices=["thread", "wall"])
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    wall = (arguments.clock or ("wall" if on_gpu else "thread")) == "wall"
    how: Any = (arguments.rounds, time.perf_counter if wall else time.thread_time,
                torch.cuda.synchronize if on_gpu else lambda: None)
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    ours = [torch.randn(1, 4, 2, 16, device=arguments.device, dtype=dtype) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in ours]
    theirs = [x.transpose(1, 2).contiguous() for x in ours]
    their_leaves = [x.clone().requires_grad_() for x in theirs]
    rows, row_leaves = [[x[0].detach().requires_grad_(records) for x in ours]
                        for records in (False, True)]
    cu = torch.tensor([0, 4], dtype=torch.int32, device=arguments.device)
    more = (cu, cu, 4, 4)
    sdpa = F.scaled_dot_product_attention
    columns = {"flashattn": kinds(fa.attention, ours, leaves),
               "PyTorch": kinds(sdpa, theirs, their_leaves)}
    for name, function in (flash_attns() if on_gpu else {}).items():
        try:
            columns[name] = working(kinds(function, ours, leaves))
        except Exception as error:  # a package for other GPUs or sizes
            print(f"{name} does not run: {error}", file=sys.stderr)
    calls: Dict[str, Callable[[], Any]] = {
        "backward of a sum of three": gradient(leaves[0] + leaves[1] + leaves[2], leaves),
        "backward of an addition, one of ten": chain(lambda q, k, v: q + k, leaves[0], *ours[1:]),
        "packed, forward": lambda: fa.attention_varlen(*rows, *more),
        "packed, recorded": lambda: fa.attention_varlen(*row_leaves, *more),
        "packed, backward": gradient(fa.attention_varlen(*row_leaves, *more), row_leaves),
        "NumPy's functions, tensors": lambda: flashattn.attention(*ours),
    }
    if not on_gpu:
        arrays = [x.numpy() for x in ours]
        calls["NumPy's functions, arrays"] = lambda: flashattn.attention(*arrays)
    apart = list(calls)
    calls.update({f"{column}: {name}": call for column, its in columns.items()
                  for name, call in its.items()})
    found = measure(calls, *how)
    fa.activate()
    found.update({f"activated: {name}": took for name, took in measure(
        kinds(sdpa, theirs, their_leaves), *how).items()})
    fa.restore()
    for name in found:
        if name.endswith("one of ten"):
            found[name] /= _CHAIN
    shown = ["flashattn", "activated", *list(columns)[1:]]
    print(f"{'microseconds':<36}" + "".join(f"{name:>20}" for name in shown))
    for name in columns["flashattn"]:
        print(f"{name:<36}" + "".join(f"{found.get(f'{column}: {name}', float('nan')):>20.1f}"
                                      for column in shown))
    for name in apart:
        print(f"{name:<36}{found[name]:>20.1f}")


if __name__ == "__main__":
    main()
