"""What an eager call takes besides its kernel: the smallest tensors, microseconds, beside PyTorch's
own function.

    FLASHATTN_LIBRARY=... PYTHONPATH=bindings/python build/venv-torch/bin/python \\
        tests/bench/torch_cost.py [--device cuda] [--clock wall]

The clock is that of the calling thread on a CPU, which others on its core do not add to, and the
wall's on a GPU, whose backward calls autograd runs on a thread of its own: the calling thread's
clock shows next to nothing of them.

The kinds of calls take turns, 25 at a time; of what a call of each turn took the least is shown. A
backward call is one of torch.autograd.grad: most of it is PyTorch's, as that of a sum shows.
flash-attn's functions are there where that package is installed.
"""
from __future__ import annotations

import argparse
import importlib
import time
from typing import Any, Callable, Dict

import torch
import torch.nn.functional as F

import flashattn
import flashattn.torch as fa

_CALLS = 25


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


def of_flash_attn(inputs: Any, leaves: Any) -> Dict[str, Callable[[], Any]]:
    """Of flash-attn 2 or, without it, 4; nothing without both."""
    for module in ("flash_attn", "flash_attn.cute"):
        try:
            function = importlib.import_module(module).flash_attn_func
        except (ImportError, AttributeError):
            continue
        o = function(*leaves)
        o = o[0] if isinstance(o, tuple) else o
        return {f"{module} forward": lambda: function(*inputs),
                f"{module} forward, recorded": lambda: function(*leaves),
                f"{module} backward": gradient(o, leaves)}
    return {}


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
    calls: Dict[str, Callable[[], Any]] = {
        "forward": lambda: fa.attention(*ours),
        "forward, recorded": lambda: fa.attention(*leaves),
        "backward": gradient(fa.attention(*leaves), leaves),
        "torch forward": lambda: sdpa(*theirs),
        "torch forward, recorded": lambda: sdpa(*their_leaves),
        "torch backward": gradient(sdpa(*their_leaves), their_leaves),
        "backward of a sum of three": gradient(leaves[0] + leaves[1] + leaves[2], leaves),
        "packed, forward": lambda: fa.attention_varlen(*rows, *more),
        "packed, recorded": lambda: fa.attention_varlen(*row_leaves, *more),
        "packed, backward": gradient(fa.attention_varlen(*row_leaves, *more), row_leaves),
        "NumPy's functions, tensors": lambda: flashattn.attention(*ours),
    }
    if not on_gpu:
        arrays = [x.numpy() for x in ours]
        calls["NumPy's functions, arrays"] = lambda: flashattn.attention(*arrays)
    else:
        calls.update(of_flash_attn(ours, leaves))
    found = measure(calls, *how)
    fa.activate()
    active = measure({
        "activated forward": lambda: sdpa(*theirs),
        "activated forward, recorded": lambda: sdpa(*their_leaves),
        "activated backward": gradient(sdpa(*their_leaves), their_leaves)}, *how)
    fa.restore()
    print(f"{'microseconds':<28}{'flashattn':>12}{'activated':>12}{'PyTorch':>12}")
    for name in ("forward", "forward, recorded", "backward"):
        print(f"{name:<28}{found[name]:>12.1f}{active['activated ' + name]:>12.1f}"
              f"{found['torch ' + name]:>12.1f}")
    for name in list(found)[6:]:
        print(f"{name:<28}{found[name]:>12.1f}")


if __name__ == "__main__":
    main()
