"""What evaluates the reference: NumPy, or for many scores PyTorch in float64 on the GPU, where the
tests run on one and PyTorch can be imported. Both know the functions that reference.py uses."""
import numpy as np

from .dtypes import round_to

LARGE = 1 << 19  # scores of a case from which the GPU is faster
on_gpu = False  # set by the tests' --device cuda


_COMMON = ("where", "maximum", "broadcast_to", "exp", "log", "tanh", "sqrt", "abs", "isneginf",
           "isfinite")


class NumPy:
    def __init__(self):
        self.wide, self.narrow = np.float64, np.float32
        self.errstate, self.round_to, self.count = np.errstate, round_to, np.count_nonzero
        for name in _COMMON:
            setattr(self, name, getattr(np, name))

    load = staticmethod(np.asarray)

    @staticmethod
    def repeat(x, count):
        return np.repeat(x, count, 0)

    @staticmethod
    def highest(x, initial):
        """Along the last axis, which may be empty."""
        return x.max(-1, initial=initial)

    @staticmethod
    def host(x):
        return x


class Torch:
    def __init__(self, torch):
        self.torch = torch
        self.wide, self.narrow = torch.float64, torch.float32
        self.errstate = np.errstate
        for name in _COMMON[1:]:
            setattr(self, name, getattr(torch, name))

    def load(self, x, dtype=None):
        if isinstance(x, self.torch.Tensor):
            return x.to(dtype) if dtype else x
        x = np.asarray(x)
        return self.torch.as_tensor(np.array(x, order="C"), dtype=dtype, device="cuda")

    def where(self, condition, x, y):
        return self.torch.where(self.load(condition), x, y)

    def repeat(self, x, count):
        return x.repeat_interleave(count, 0)

    def highest(self, x, initial):
        floor = self.torch.full_like(x[..., :1], initial) if x.shape[-1] else \
            self.torch.full((*x.shape[:-1], 1), initial, dtype=x.dtype, device=x.device)
        return self.torch.cat([x, floor], -1).amax(-1)

    def round_to(self, x, dtype):
        torch = self.torch
        kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
        return x.to(torch.float32).to(kind).to(torch.float32)

    def count(self, x):
        return int(self.torch.count_nonzero(x))

    def host(self, x):
        return x.cpu().numpy() if isinstance(x, self.torch.Tensor) else x


NUMPY = NumPy()


def engine_for(case):
    if not on_gpu or case.batch * case.heads_q * case.seqlen_q * case.seqlen_kv < LARGE:
        return NUMPY
    try:
        import torch
    except ImportError:
        return NUMPY
    return Torch(torch) if torch.cuda.is_available() else NUMPY
