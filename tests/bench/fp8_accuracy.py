"""How exact is attention in E4M3? This library beside FlashAttention-3 and cuDNN, which are given
the same elements and descales.

    kernel    from float64 of the quantised inputs: what the kernel itself loses
    recipe    from float64 of the inputs before: what quantising loses, too

Each is the relative error of o (Frobenius norms); recipe also as the root of its mean square, which
FlashAttention-3's paper reports. o is in bf16; cuDNN writes E4M3 if it must. One head, so that one
descale is one for all of cuDNN's tensor. No mask.
"""
from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any, Callable, Dict, NamedTuple, Optional

import torch
from torch import Tensor

import flashattn
from cases import Case

ROWS = 512  # queries that are compared; of as many as keys on a GPU, which peers want


class Data(NamedTuple):
    keys: int
    make: Callable[[Tensor, Tensor, Tensor], None]  # changes normal data (seq, dim), in place
    dim: int = 128
    recipe: Optional[Dict[str, Any]] = None  # of flashattn.quantize; None: elements are rounded


def _plain(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Normal data as they are."""


def _mean(q: Tensor, k: Tensor, v: Tensor) -> None:
    v += 1


def _lone(token: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    def make(q: Tensor, k: Tensor, v: Tensor) -> None:
        """One key has a score 10 nats above the rest; its v is 0, so that theirs are seen."""
        q[:, 0], k[:, 0] = 8, 0
        k[token, 0] = 10 * q.shape[1] ** 0.5 / 8
        v += 1
        v[token] = 0
    return make


def _needle(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One key of many is what all queries look for: half of the weight is its own."""
    q[:, 0], k[:, 0] = 8, 0
    most = torch.logsumexp(q[:64] @ k.T * q.shape[1] ** -0.5, 1).mean()
    k[len(k) // 3, 0] = most * q.shape[1] ** 0.5 / 8
    v[len(k) // 3] = 4


def _outliers(q: Tensor, k: Tensor, v: Tensor) -> None:
    for x in (q, k, v):
        x += 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001)


_BLOCKS = dict(descale_block=64, rotation_seed=1)
DATA = {
    "normal, 4k keys": Data(4096, _plain),
    "normal, 4k keys, D64": Data(4096, _plain, 64),
    "normal, 4k keys, D256": Data(4096, _plain, 256),
    "V with a mean of 1, 16k": Data(16384, _mean),
    "first token 10 nats above, 4k": Data(4096, _lone(0)),
    "last token 10 nats above, 4k": Data(4096, _lone(-1)),
    "a needle in 128k": Data(131072, _needle),
    "outliers, 4k, a descale a head": Data(4096, _outliers, recipe={}),
    "outliers, 4k, blocks of 64, rotated": Data(4096, _outliers, recipe=_BLOCKS),
}


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of (seq, dim), in float64: the first ROWS queries."""
    q, k, v = q[:ROWS].double(), k.double(), v.double()
    return torch.softmax(q @ k.T * q.shape[1] ** -0.5, 1) @ v


def widened(x: Tensor, descale: Tensor) -> Tensor:
    """(1, seq, 1, dim) in E4M3, times descales (1, 1, blocks) of equal blocks: (seq, dim)."""
    wide = x[0, :, 0].double()
    return wide * descale.double().reshape(-1).repeat_interleave(
        -(-len(wide) // descale.numel()))[:len(wide), None]


class Peers:
    """Those that can be imported."""

    def __init__(self, device: str) -> None:
        self.found: Dict[str, Any] = {}
        if device == "cpu":
            return
        import peers
        for name, peer in (("FlashAttention-3", peers.FlashAttention3), ("cuDNN", peers.CudnnFp8)):
            try:
                self.found[name] = peer()
            except ImportError as error:
                print(f"{name} is left out: {error}")

    def __call__(self, name: str, tensors: Dict[str, Tensor],
                 descales: Dict[str, Tensor]) -> Tensor:
        """tensors: E4M3 (1, seq, 1, dim); descales: of one element."""
        _, seqlen, heads, dim = tensors["q"].shape
        case = Case(dtype="f8", batch=1, heads=heads, seqlen_q=seqlen, dim=dim)
        arrays = {x: SimpleNamespace(tensor=tensor, shape=tensor.shape)
                  for x, tensor in tensors.items()}
        work, outputs = self.found[name].prepare(
            case, arrays, {"descale_" + x: descale for x, descale in descales.items()})
        return outputs(work())[0]


def measure(name: str, data: Data, peers: Peers, device: str) -> None:
    torch.manual_seed(0)
    queries = ROWS if device == "cpu" else data.keys
    wide = [torch.randn(n, data.dim, device=device) for n in (queries, data.keys, data.keys)]
    data.make(*wide)
    batched = [x.bfloat16()[None, :, None] for x in wide]
    if data.recipe is None:
        one = torch.ones(1, 1, 1, device=device)
        tensors = dict(zip("qkv", (x.to(torch.float8_e4m3fn) for x in batched)))
        descales, options = dict.fromkeys("qkv", one), {}
    else:
        made = flashattn.quantize(*batched, **data.recipe)
        tensors = dict(zip("qkv", made[:3]))
        descales = {x: getattr(made, "descale_" + x) for x in "qkv"}
        options = {"descale_block": data.recipe.get("descale_block", 0)}
    of_quantised = exact(*(widened(tensors[x], descales[x]) for x in "qkv"))
    of_inputs = exact(*(x[0, :, 0] for x in batched))

    def show(who: str, out: Tensor) -> None:
        rows = out[0, :ROWS, 0].double()
        off = [rows - true for true in (of_quantised, of_inputs)]
        kernel, recipe = (x.norm() / true.norm() for x, true in zip(off, (of_quantised, of_inputs)))
        remark = " (o in E4M3)" if out.dtype == torch.float8_e4m3fn else ""
        print(f"{name:38}{who + remark:30}{kernel:10.4f}{recipe:10.4f}"
              f"{off[1].square().mean().sqrt():12.2e}", flush=True)

    scaled = {"descale_" + x: descale for x, descale in descales.items()}
    for dtype in ("bfloat16", "float8_e4m3fn"):
        show("this library", flashattn.attention(*tensors.values(), dtype_o=dtype, **scaled,
                                                 **options))
    for peer in peers.found if not options.get("descale_block") else ():
        try:
            show(peer, peers(peer, tensors, descales))
        except Exception as error:
            print(f"{name:38}{peer}: {error}")


def main(chosen: argparse.Namespace) -> int:
    print(f"{'':68}{'kernel':>10}{'recipe':>10}{'its RMSE':>12}")
    peers = Peers(chosen.device)
    for name, data in DATA.items():
        measure(name, data, peers, chosen.device)
    return 0
