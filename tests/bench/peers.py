"""Who is measured beside this library on a GPU: PyTorch's backends of scaled_dot_product_attention
and its flex_attention, and, where they can be imported, FlashAttention-4 (the package
flash-attn-4); for E4M3 FlashAttention-3 (fa3-fwd) and cuDNN through its frontend
(nvidia-cudnn-frontend); for a dense bias cuEquivariance (cuequivariance-ops-torch-cu13 or
-cu12)."""
from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

from cases import Case
from memory import Array, torch
from ours import blocks_of

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
        if case.kv_dtype == "f8":
            raise CannotRun("no E4M3")
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
        bias = mask = None
        if case.bias:  # of q's type: SDPA takes no other
            bias = arrays["bias"].tensor.detach().to(q.dtype).requires_grad_(case.dbias)
            mask = bias.expand(case.batch, -1, -1, -1)
        wanted = inputs + ([bias] if case.dbias else [])

        def forward() -> Any:
            # Where SDPA was told to use one backend, it says why that one cannot by warnings.
            with self.choose(self.backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.nn.functional.scaled_dot_product_attention(
                    *inputs, mask, is_causal=case.causal, dropout_p=case.dropout,
                    enable_gqa=case.kv_heads != case.heads)

        try:
            out = forward()
            work = forward
            if backward:
                work = _gradients(out, wanted, arrays["dout"].tensor.transpose(1, 2))
                work()
        except RuntimeError as error:
            raise CannotRun(str(error).split("\n", maxsplit=1)[0][:100]) from None
        if backward:
            return work, lambda grads: [g.transpose(1, 2) for g in grads[:3]] + list(grads[3:])
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
        if case.dtype == "f32" or case.kv_dtype == "f8" or case.op == "merge":
            raise CannotRun("attention of 16-bit types only")
        self.remark = ""
        if (case.page_size or case.alibi or case.bias or case.dropout
                or case.block_density < 1):
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


class FlashAttention3:
    """fa3_fwd_interface, in E4M3. Its sums of P V are not promoted to fp32."""

    remark = ""

    def __init__(self) -> None:
        from fa3_fwd_interface import flash_attn_func
        self.function = flash_attn_func

    def prepare(self, case: Case, arrays: Dict[str, Array],
                descales: Optional[Dict[str, Any]] = None) -> Tuple[Work, Callable[[Any], Any]]:
        """descales: descale_q, descale_k, descale_v, if they are not 1."""
        cache = dataclasses.replace(case, causal=False) if case.decodes else case
        if case.kv_dtype != "f8" or case.latent or not cache.plain or case.op != "forward":
            raise CannotRun("only measured in E4M3")
        shape = case.batch, case.kv_heads
        of = {f"{x}_descale": descales[f"descale_{x}"].reshape(shape) if descales else
              torch.ones(shape, device="cuda") for x in "qkv"}
        q, k, v = (arrays[name].tensor for name in "qkv")
        self.remark = "q in E4M3, as it takes no other beside such a cache" if case.dtype_kv else ""
        work = functools.partial(
            self.function, q.to(k.dtype), k, v, causal=case.causal, **of,
            **({"num_splits": 0} if case.decodes else {}))
        try:
            work()
        except Exception as error:
            raise CannotRun(str(error).split("\n", maxsplit=1)[0][:100]) from None
        return work, lambda out: [out[0] if isinstance(out, tuple) else out]


class CudnnFp8:
    """cuDNN's graph of an attention in E4M3, o in bf16 or, where it refuses that, E4M3."""

    remark = ""

    def __init__(self) -> None:
        import cudnn
        self.cudnn, self.handle = cudnn, cudnn.create_handle()

    def prepare(self, case: Case, arrays: Dict[str, Array],
                descales: Optional[Dict[str, Any]] = None) -> Tuple[Work, Callable[[Any], Any]]:
        """descales: descale_q, descale_k, descale_v, if they are not 1; of one head alone."""
        if case.dtype != "f8" or not case.plain or case.op != "forward":
            raise CannotRun("only measured in E4M3")
        refusal = ""
        for dtype, remark in ((torch.bfloat16, ""), (torch.float8_e4m3fn, "o in E4M3, as cuDNN "
                                                     "writes no bf16 from it")):
            self.remark = remark
            try:
                return self.graph(case, arrays, descales or {}, dtype)
            except Exception as error:
                refusal = str(error).split("\n", maxsplit=1)[0][:100]
        raise CannotRun(refusal)

    def graph(self, case: Case, arrays: Dict[str, Array], descales: Dict[str, Any],
              dtype: Any) -> Tuple[Work, Callable[[Any], Any]]:
        types = self.cudnn.data_type
        graph = self.cudnn.pygraph(io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT,
                                   compute_data_type=types.FLOAT, handle=self.handle)

        def described(name: str) -> Dict[str, Any]:
            batch, seq, heads, dim = arrays[name].shape
            return dict(dim=[batch, heads, seq, dim],
                        stride=[seq * heads * dim, dim, heads * dim, 1])

        tensors = {name: graph.tensor(name=name, data_type=types.FP8_E4M3, **described(name))
                   for name in "qkv"}
        unit = dict(dim=[1] * 4, stride=[1] * 4)
        scales = {name: graph.tensor(name=name, data_type=types.FLOAT, **unit)
                  for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s",
                               "scale_o")}
        out, _, *maxima = graph.sdpa_fp8(
            **tensors, **scales, is_inference=True, attn_scale=case.dim ** -0.5,
            use_causal_mask=case.causal, name="sdpa")
        shape = described("q")
        out.set_output(True).set_dim(shape["dim"]).set_stride(shape["stride"]).set_data_type(
            types.BFLOAT16 if dtype == torch.bfloat16 else types.FP8_E4M3)
        for largest in maxima:
            largest.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(types.FLOAT)
        graph.validate()
        graph.build_operation_graph()
        modes = self.cudnn.heur_mode
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        one = torch.ones(1, 1, 1, 1, device="cuda")
        o = torch.empty(arrays["q"].shape, device="cuda", dtype=dtype)
        workspace = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
        pack = {**{tensors[name]: arrays[name].tensor for name in "qkv"}, out: o,
                **{scale: descales.get(name, one) for name, scale in scales.items()},
                **{largest: torch.zeros(1, 1, 1, 1, device="cuda") for largest in maxima}}

        def work() -> Any:
            stream = torch.cuda.current_stream().cuda_stream
            self.cudnn.set_stream(handle=self.handle, stream=stream)
            graph.execute(pack, workspace, handle=self.handle)
            return o

        work()
        return work, lambda result: [result]


class CuEquivariance:
    """Triangle attention: a bias that all sequences share, and always its gradient."""

    remark = ""

    def __init__(self) -> None:
        from cuequivariance_ops_torch.triangle_attention import triangle_attention
        self.function = triangle_attention

    def prepare(self, case: Case, arrays: Dict[str, Array]) -> Tuple[Work, Callable[[Any], Any]]:
        if not case.bias or case.causal or (case.op == "backward" and not case.dbias):
            raise CannotRun("only measured with a bias, and its gradient")
        inputs = [arrays[name].tensor.detach().transpose(1, 2)[None].contiguous()
                  for name in "qkv"] + [arrays["bias"].tensor.detach()[None]]
        mask = torch.ones(1, case.batch, 1, 1, case.keys, device="cuda", dtype=torch.bool)
        backward = case.op == "backward"
        for tensor in inputs:
            tensor.requires_grad_(backward)

        def forward() -> Any:
            found = self.function(*inputs, mask)
            return found[0] if isinstance(found, tuple) else found

        try:
            out = forward()
            if not backward:
                return forward, lambda out: [out[0].transpose(1, 2)]
            dout = arrays["dout"].tensor.transpose(1, 2)[None].contiguous()
            work = _gradients(out, inputs, dout)
            work()
        except Exception as error:
            raise CannotRun(str(error).split("\n", maxsplit=1)[0][:100]) from None
        return work, lambda grads: ([g[0].transpose(1, 2) for g in grads[:3]]
                                    + [g[0] for g in grads[3:]])


class FlexAttention:
    """torch.nn.attention.flex_attention, compiled when it first meets a shape: windows, block
    masks, softcap and ALiBi."""

    remark = ""

    def __init__(self) -> None:
        self.flex = importlib.import_module("torch.nn.attention.flex_attention")
        self.function = torch.compile(self.flex.flex_attention, dynamic=False)

    def prepare(self, case: Case, arrays: Dict[str, Array]) -> Tuple[Work, Callable[[Any], Any]]:
        usual = dataclasses.replace(case, window=-1, block_density=1.0, block_lists=False,
                                    softcap=0.0, alibi=False)
        if (case.plain or not usual.plain or case.decodes or case.bias or case.dropout
                or case.latent or case.kv_dtype not in ("bf16", "f16")):
            raise CannotRun("only measured with windows, block masks, softcap and ALiBi")
        inputs = [arrays[name].tensor.detach().transpose(1, 2).requires_grad_(case.op == "backward")
                  for name in "qkv"]
        options = dict(block_mask=self.mask(case), score_mod=self.score_mod(case),
                       enable_gqa=case.kv_heads != case.heads)
        try:
            if case.op == "forward":
                work = functools.partial(self.function, *inputs, **options)
                work()
                return work, lambda out: [out.transpose(1, 2)]
            work = _gradients(self.function(*inputs, **options), inputs,
                              arrays["dout"].tensor.transpose(1, 2))
            work()
        except Exception as error:  # its compiler has many ways to fail
            raise CannotRun(f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0][:100]
                            ) from None
        return work, lambda grads: [g.transpose(1, 2) for g in grads]

    def mask(self, case: Case) -> Any:
        if case.block_density < 1:  # all blocks that it shows are whole
            on = torch.tensor(blocks_of(case), device="cuda")[None, None]
            counts = on.sum(-1, dtype=torch.int32)
            index = on.sort(dim=-1, descending=True, stable=True).indices.int()
            return self.flex.BlockMask.from_kv_blocks(
                torch.zeros_like(counts), torch.zeros_like(index), counts, index,
                BLOCK_SIZE=case.block_size, seq_lengths=(case.seqlen_q, case.keys))
        if case.window < 0 and not case.causal:
            return None
        width = case.window if case.window >= 0 else case.keys
        return self.flex.create_block_mask(lambda _b, _h, q, k: (q >= k) & (q - k <= width),
                                           None, None, case.seqlen_q, case.keys, device="cuda")

    @staticmethod
    def score_mod(case: Case) -> Any:
        if case.softcap:
            return lambda s, _b, _h, _q, _k: case.softcap * torch.tanh(s / case.softcap)
        if case.alibi:
            slopes = torch.exp2(-8.0 * torch.arange(1, case.heads + 1, device="cuda") / case.heads)
            return lambda s, _b, h, q, k: s - slopes[h] * (q - k).abs()
        return None


def available() -> Tuple[Dict[str, Any], List[str]]:
    """Peers by name, and a sentence for each that this machine lacks."""
    if torch is None:
        return {}, ["PyTorch with a GPU cannot be imported: this library is timed alone"]
    found: Dict[str, Any] = {name: Sdpa(name, backend) for name, backend in (
        ("cudnn", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION"),
        ("efficient", "EFFICIENT_ATTENTION"), ("math", "MATH"))}
    for name, peer in (("fa3 fp8", FlashAttention3), ("cudnn fp8", CudnnFp8),
                       ("cueq", CuEquivariance), ("flex", FlexAttention)):
        try:
            found[name] = peer()
        except Exception:
            continue  # only some rows lack it
    try:
        found["fa4"] = FlashAttention4()
    except Exception as error:
        return found, [f"flash-attn-4 cannot be imported ({error}): where the table of "
                       "tests/data has its figure, that one is shown, marked *"]
    return found, []
