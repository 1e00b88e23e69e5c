"""Who is measured: this library, and PyTorch where it is installed. A runner turns a case into a
function without arguments that does the work once."""
from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Callable, Dict, Optional

import numpy as np

import flashattn
from cases import Case

Work = Callable[[], Any]


def _numpy_dtype(name: str) -> Any:
    if name == "bf16":
        import ml_dtypes
        return ml_dtypes.bfloat16
    return {"f32": np.float32, "f16": np.float16}[name]


def arrays(case: Case) -> Dict[str, np.ndarray]:
    """Random normal data, (batch, seq, head, dim)."""
    rng = np.random.default_rng(0)

    return {name: rng.standard_normal(shape, np.float32).astype(_numpy_dtype(case.dtype))
            for name, shape in case.shapes().items()}


def options(case: Case) -> Dict[str, Any]:
    """The keywords of flashattn.attention."""
    chosen: Dict[str, Any] = {"causal": case.causal}
    if case.window >= 0:
        chosen["window"] = (case.window, 0)
    if case.softcap:
        chosen["softcap"] = case.softcap
    if case.dropout:
        chosen["dropout"] = case.dropout
    if case.alibi:
        chosen["alibi_slopes"] = np.exp2(
            -8.0 * np.arange(1, case.heads + 1) / case.heads).astype(np.float32)
    if case.block_density < 1:
        blocks = (-(-case.seqlen_q // 128), -(-case.keys // 128))
        rng = np.random.default_rng(1)
        # Exactly this share of the blocks, so that the work is known.
        on = np.zeros(blocks[0] * blocks[1], np.uint8)
        on[rng.permutation(on.size)[: round(on.size * case.block_density)]] = 1
        chosen["block_mask"] = on.reshape(1, 1, *blocks)
        chosen["block_size"] = (128, 128)
    return chosen


class FlashAttn:
    name = "flashattn"

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def prepare(self, case: Case) -> Optional[Work]:
        a = arrays(case)
        chosen = dict(options(case), threads=self.threads)
        if case.op == "forward":
            out = np.empty((*a["q"].shape[:3], case.value_dim), a["q"].dtype)
            return lambda: flashattn.attention(a["q"], a["k"], a["v"], out=out, **chosen)
        out, lse = flashattn.attention(a["q"], a["k"], a["v"], return_lse=True, **chosen)
        chosen.update({"d" + name: np.empty_like(a[name]) for name in "qkv"})
        return lambda: flashattn.attention_backward(a["dout"], a["q"], a["k"], a["v"], out, lse,
                                                    **chosen)


class Torch:
    """torch.nn.functional.scaled_dot_product_attention; None for what it does not compute."""

    name = "torch"

    def __init__(self, threads: int) -> None:
        import torch
        self.torch = torch
        torch.set_num_threads(threads)

    def prepare(self, case: Case) -> Optional[Work]:
        if not case.plain:
            return None
        torch = self.torch
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
        data = {name: torch.from_numpy(x.astype(np.float32)).to(dtype).transpose(1, 2).contiguous()
                for name, x in arrays(case).items()}
        grouped = {"enable_gqa": True} if case.kv_heads != case.heads else {}

        def forward() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(
                data["q"], data["k"], data["v"], is_causal=case.causal, **grouped)

        if case.op == "forward":
            def work() -> Any:
                with torch.no_grad():
                    return forward()
            return work
        inputs = [data[name].requires_grad_() for name in "qkv"]
        out = forward()
        return lambda: torch.autograd.grad(out, inputs, data["dout"], retain_graph=True)


def keep_memory() -> None:
    """Memory that is freed stays with the process, where the C library can be told: PyTorch makes
    its gradients anew in each call, and pages for them are not what is measured."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in ((-1, 1 << 30), (-3, 32 << 20)):  # M_TRIM_, M_MMAP_THRESHOLD
            library.mallopt(option, value)


def available(threads: int) -> Dict[str, Any]:
    """Runner by name, ours first."""
    found: Dict[str, Any] = {FlashAttn.name: FlashAttn(threads)}
    try:
        found[Torch.name] = Torch(threads)
    except ImportError:
        pass
    return found
