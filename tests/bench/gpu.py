"""The bench on a GPU: this library through its C calls on PyTorch's tensors, PyTorch's own backends
beside it, and a clock that repeats.

The GPU is bound by power under long load: what ran before changes what runs next. Kernels therefore
take turns in short bursts with pauses between them, in rotating order.
"""
from __future__ import annotations

import statistics
import time
from typing import Any, Callable, Dict, List, Optional

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cases import Case
from flashattn._constants import Dtype, Feature, Mask
from flashattn._library import ffi, lib, text

Work = Callable[[], Any]
_TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_OURS = {"f32": Dtype.F32, "f16": Dtype.F16, "bf16": Dtype.BF16}


def _check(status: int) -> None:
    if status:
        raise RuntimeError(text(lib.flashattn_last_error(ffi.NULL, ffi.NULL)))


def tensors(case: Case) -> List[torch.Tensor]:
    """q, k, v and the gradient of the output: random normal, (batch, seq, head, dim)."""
    torch.manual_seed(0)
    return [torch.randn(case.batch, seqlen, heads, case.dim, device="cuda",
                        dtype=_TORCH[case.dtype])
            for seqlen, heads in ((case.seqlen_q, case.heads), (case.keys, case.kv_heads),
                                  (case.keys, case.kv_heads), (case.seqlen_q, case.heads))]


class FlashAttn:
    """A plan and its arguments, made once. work() enqueues one call on the current stream."""

    name = "flashattn"

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                dout: torch.Tensor) -> Optional[Work]:
        if not case.plain:
            return None
        backward = case.op == "backward"
        desc = ffi.new("flashattn_desc *")
        desc.struct_size = ffi.sizeof("flashattn_desc")
        desc.device, desc.dtype = 1, int(_OURS[case.dtype])
        desc.ops = 3 if backward else 1
        desc.heads_q, desc.heads_kv, desc.dim_qk = case.heads, case.kv_heads, case.dim
        desc.mask = int(Mask.CAUSAL) if case.causal else 0
        desc.features = int(Feature.LSE)
        made = ffi.new("flashattn_plan **")
        _check(lib.flashattn_plan_create(desc, made))
        self.plan = ffi.gc(made[0], lib.flashattn_plan_destroy)
        out = torch.full_like(q, float("nan"))
        lse = torch.full((case.batch, case.heads, case.seqlen_q), float("nan"), device="cuda")
        inputs = [("q", q), ("k", k), ("v", v)]
        work = self._work(case, 1, inputs, [("o", out)], lse)
        self.results = [out]
        if backward:
            work()
            self.results = [torch.full_like(t, float("nan")) for t in (q, k, v)]
            others = list(zip(("dq", "dk", "dv"), self.results)) + [("o", out), ("dout", dout)]
            work = self._work(case, 2, inputs, others, lse)
        return work

    def _work(self, case: Case, op: int, inputs: Any, others: Any, lse: torch.Tensor) -> Work:
        """One operation (1: forward, 2: backward) on tensors named as in its arguments."""
        struct = "flashattn_backward_args" if op == 2 else "flashattn_forward_args"
        args = ffi.new(struct + " *")
        args.struct_size = ffi.sizeof(struct)
        args.shape.batch = case.batch
        args.shape.seqlen_q, args.shape.seqlen_kv = case.seqlen_q, case.keys
        for owner, named in ((args.inputs, inputs), (args, others)):
            for name, tensor in named:
                where = getattr(owner, name)
                where.data = ffi.cast("void *", tensor.data_ptr())
                where.stride_batch, where.stride_seq, where.stride_head = tensor.stride()[:3]
        args.lse = ffi.cast("float *", lse.data_ptr())
        plan, shape = self.plan, ffi.addressof(args, "shape")
        size = ffi.new("int64_t *")
        _check(lib.flashattn_workspace_size(plan, op, shape, size))
        workspace = torch.empty(max(size[0], 1), dtype=torch.uint8, device="cuda")
        info = ffi.new("flashattn_plan_properties *")
        info.struct_size = ffi.sizeof("flashattn_plan_properties")
        _check(lib.flashattn_plan_info(plan, op, shape, info))
        self.kernel = text(info.kernel)
        address = ffi.cast("void *", workspace.data_ptr())
        call = lib.flashattn_backward if op == 2 else lib.flashattn_forward

        def work() -> None:
            stream = ffi.cast("void *", torch.cuda.current_stream().cuda_stream)
            _check(call(plan, args, address, size[0], stream))

        work.keep = (inputs, others, lse, workspace)  # type: ignore[attr-defined]
        return work


class Sdpa:
    """One backend of torch.nn.functional.scaled_dot_product_attention."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = name, backend

    def prepare(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                dout: torch.Tensor) -> Optional[Work]:
        """work() returns the output, or the gradients."""
        if not case.plain:
            return None
        backward = case.op == "backward"
        swapped = [t.detach().transpose(1, 2).requires_grad_(backward) for t in (q, k, v)]

        def forward() -> torch.Tensor:
            with sdpa_kernel(self.backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *swapped, is_causal=case.causal, enable_gqa=case.kv_heads != case.heads)

        try:
            out = forward()
            if not backward:
                return lambda: [forward()]
            gradient = dout.transpose(1, 2)

            def work() -> Any:
                return torch.autograd.grad(out, swapped, gradient, retain_graph=True)

            work()
        except RuntimeError:
            return None  # this backend does not compute the case
        return work


PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
         "efficient": SDPBackend.EFFICIENT_ATTENTION}


def _elapsed(work: Work, times: int) -> float:
    """Milliseconds a call, on the device's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def bursts(works: Dict[str, Work], rounds: int = 8) -> Dict[str, float]:
    """Median seconds of each: bursts of about 6 ms after one call to warm up, 10 ms apart."""
    for work in works.values():
        work()
    counts = {name: max(2, int(6 / (_elapsed(work, 2) + 1e-4))) for name, work in works.items()}
    times: Dict[str, List[float]] = {name: [] for name in works}
    order = list(works)
    for _ in range(rounds):
        for name in order:
            works[name]()
            times[name].append(_elapsed(works[name], counts[name]))
            time.sleep(0.01)
        order.append(order.pop(0))
    return {name: statistics.median(t) * 1e-3 for name, t in times.items()}


def flushed(works: Dict[str, Work], rounds: int = 15) -> Dict[str, float]:
    """Median seconds of single calls, each with the L2 cache cleared before it."""
    clear = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: Dict[str, List[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            clear.zero_()
            times[name].append(_elapsed(work, 1))
    return {name: statistics.median(t) * 1e-3 for name, t in times.items()}


def _error(mine: torch.Tensor, truth: torch.Tensor) -> float:
    truth = truth.transpose(1, 2).float()
    return float((mine.float() - truth).norm() / truth.norm())


def measure(case: Case) -> Dict[str, Any]:
    """Seconds by runner, the kernel that ran, and the largest error of its results against the
    first peer's."""
    inputs = tensors(case)
    ours = FlashAttn()
    works: Dict[str, Work] = {}
    work = ours.prepare(case, *inputs)
    if work is None:
        return {"seconds": {}}
    works[ours.name] = work
    for name, backend in PEERS.items():
        peer = Sdpa(name, backend).prepare(case, *inputs)
        if peer:
            works[name] = peer
    work()
    torch.cuda.synchronize()
    error = None
    peers = [name for name in works if name != ours.name]
    if peers:
        error = max(map(_error, ours.results, works[peers[0]]()))
    clock = flushed if case.seqlen_q == 1 else bursts
    return {"seconds": clock(works), "kernel": ours.kernel, "error": error}
