"""Who is measured beside this library on a GPU: PyTorch's backends of scaled_dot_product_attention,
and FlashAttention-4 (the package flash-attn-4) where it can be imported."""
from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import warnings
from typing import Any, Callable, Dict, List, Tuple

from cases import Case
from memory import Array, torch

Work = Callable[[], Any]
_SCORES = 8 << 30  # bytes of scores past which MATH, which stores them, is left alone


class CannotRun(Exception):
    """Why a peer does not compute a case, in a few words."""


def _gradients(out: Any, inputs: List[Any], dout: Any) -> Work:
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


class Sdpa:
    """A backend of torch.nn.functional.scaled_dot_product_attention, on views of the same
    (batch, seq, head, dim) arrays."""

    remark = ""

    def __init__(self, name: str, backend: str) -> None:
        attention = importlib.import_module("torch.nn.attention")
        self.name, self.choose = name, attention.sdpa_kernel
        self.backend = getattr(attention.SDPBackend, backend)

    def prepare(self, case: Case, arrays: Dict[str, Array]) -> Tuple[Work, Callable[[Any], Any]]:
        """What enqueues a call, and what brings its result into the shape of ours."""
        if case.uneven and self.name == "flash":
            return self.packed(case, arrays)
        if not case.plain:
            raise CannotRun("SDPA has no such option")
        if self.name == "math":
            size = 2 if case.dtype != "f32" else 4
            scores = case.batch * case.heads * case.seqlen_q * case.keys * size
            if scores > _SCORES:
                raise CannotRun(f"{scores / 2**30:.0f} GiB of scores")
        q, k, v = (arrays[name].tensor.detach().transpose(1, 2) for name in "qkv")
        backward = case.op == "backward"
        inputs = [t.requires_grad_(backward) for t in (q, k, v)]

        def forward() -> Any:
            # Where SDPA was told to use one backend, it says why that one cannot by warnings.
            with self.choose(self.backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.nn.functional.scaled_dot_product_attention(
                    *inputs, is_causal=case.causal, dropout_p=case.dropout,
                    enable_gqa=case.kv_heads != case.heads)

        try:
            out = forward()
            work = forward
            if backward:
                work = _gradients(out, inputs, arrays["dout"].tensor.transpose(1, 2))
                work()
        except RuntimeError as error:
            raise CannotRun(str(error).split("\n", maxsplit=1)[0][:100]) from None
        if backward:
            return work, lambda grads: [g.transpose(1, 2) for g in grads]
        return work, lambda out: [out.transpose(1, 2)]

    @staticmethod
    def packed(case: Case, arrays: Dict[str, Array]) -> Tuple[Work, Callable[[Any], Any]]:
        """PyTorch's function for packed sequences, by the kernels of its backend flash."""
        if case.dropout or not dataclasses.replace(case, uneven=False).plain:
            raise CannotRun("not by varlen_attn")
        inputs = [arrays[name].tensor.detach()[0].requires_grad_(case.op == "backward")
                  for name in "qkv"]
        starts = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in case.starts()]
        try:
            function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
            known = inspect.signature(function).parameters  # they change from version to version
            options: Dict[str, Any] = {}
            if case.causal:
                options.update({"is_causal": True} if "is_causal" in known
                               else {"window_size": (-1, 0)})
            if case.kv_heads != case.heads and "enable_gqa" in known:
                options["enable_gqa"] = True
            forward = functools.partial(function, *inputs, *starts, max(case.lengths()),
                                        max(case.key_lengths()), **options)
            out = forward()
            if case.op == "forward":
                return forward, lambda out: [out[None]]
            work = _gradients(out, inputs, arrays["dout"].tensor[0])
            work()
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            raise CannotRun(str(error).split("\n", maxsplit=1)[0][:100]) from None
        return work, lambda grads: [g[None] for g in grads]


class FlashAttention4:
    """flash_attn.cute, which compiles a kernel when it first meets its configuration."""

    name = "fa4"
    remark = ""  # what it did less well than it might in the case prepared last

    def __init__(self) -> None:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
        self.function, self.packed = flash_attn_func, flash_attn_varlen_func

    def prepare(self, case: Case, arrays: Dict[str, Array]) -> Tuple[Work, Callable[[Any], Any]]:
        if case.dtype == "f32" or case.op == "merge":
            raise CannotRun("attention of 16-bit types only")
        self.remark = ""
        if case.page_size or case.alibi or case.dropout or case.block_density < 1:
            raise CannotRun("not by this function")
        tensors = {name: array.tensor.detach() for name, array in arrays.items()}
        function = self.function
        if case.uneven:
            tensors = {name: tensor[0] for name, tensor in tensors.items()}
            starts = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in case.starts()]
            function = functools.partial(
                self.packed, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
                max_seqlen_q=max(case.lengths()), max_seqlen_k=max(case.key_lengths()))
        inputs = [tensors[name].requires_grad_(case.op == "backward") for name in "qkv"]
        window = (case.window, 0) if case.window >= 0 else (None, None)
        forward = functools.partial(
            function, *inputs, causal=case.causal and case.window < 0, window_size=window,
            softcap=case.softcap)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                forward, out = self.split(forward) if case.decodes else (forward, forward())
                out = out[0] if isinstance(out, tuple) else out
                if case.op == "forward":
                    return forward, lambda out: [out[0] if isinstance(out, tuple) else out]
                work = _gradients(out, inputs, tensors["dout"])
                work()
        except Exception as error:  # its compiler has many ways to fail
            raise CannotRun(f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0][:100]
                            ) from None
        return work, list

    def split(self, forward: Any) -> Tuple[Work, Any]:
        """With as many splits as it finds best; not on every GPU has it kernels that split."""
        try:
            several = functools.partial(forward, num_splits=0)
            return several, several()
        except AssertionError as error:
            self.remark = f"without splits of the keys, for which it has no kernel here: {error}"
            return forward, forward()


def available() -> Tuple[Dict[str, Any], List[str]]:
    """Peers by name, and a sentence for each that this machine lacks."""
    if torch is None:
        return {}, ["PyTorch with a GPU cannot be imported: this library is timed alone"]
    found: Dict[str, Any] = {name: Sdpa(name, backend) for name, backend in (
        ("cudnn", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION"),
        ("efficient", "EFFICIENT_ATTENTION"), ("math", "MATH"))}
    try:
        found["fa4"] = FlashAttention4()
    except Exception as error:
        return found, [f"flash-attn-4 cannot be imported ({error}): where the table of "
                       "tests/data has its figure, that one is shown, marked *"]
    return found, []
