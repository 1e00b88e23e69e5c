"""Where the demo computes: in host memory by NumPy, or on a GPU, the dense layers by PyTorch. The
attention is libflashattn's in both."""
from __future__ import annotations

import ctypes
import math
import re
from typing import Any, Callable, Optional, Sequence, Tuple

import numpy as np

import flashattn

# (q, k, v, cu_seqlens) -> out; q, k, v, out: (total, heads, dim) of the place; cu_seqlens: NumPy's
Attention = Callable[[Any, Any, Any, np.ndarray], Any]

UNKNOWN = 4e9  # bytes of memory, where the machine does not say


class Host:
    name, maker = "the CPU", "NumPy"
    device: Optional[str] = None  # as flashattn.Plan takes it

    def array(self, x: np.ndarray) -> Any:
        return x

    def to_host(self, x: Any) -> np.ndarray:
        """Waits for it, too."""
        return x

    def rows(self, table: Any, indices: np.ndarray) -> Any:
        return table[indices]

    def stack(self, parts: Sequence[Any]) -> Any:
        return np.stack(parts)

    def gelu(self, dtype: Any) -> Callable[[Any], Any]:
        return Gelu(dtype)

    def flash(self, q: Any, k: Any, v: Any, cu_seqlens: np.ndarray) -> Any:
        """Attention of packed sequences by libflashattn."""
        return flashattn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens)

    def materialised(self, q: Any, k: Any, v: Any, cu_seqlens: np.ndarray) -> Any:
        """The same as the formula stands, with all scores in memory, in the inputs' own
        precision."""
        out = np.empty_like(q)
        for first, last in zip(cu_seqlens[:-1], cu_seqlens[1:]):
            heads = [np.swapaxes(x[first:last], 0, 1) for x in (q, k, v)]
            scores = heads[0] @ np.swapaxes(heads[1], 1, 2)  # (heads, queries, keys)
            scores *= scores.dtype.type(1 / math.sqrt(q.shape[-1]))
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            out[first:last] = np.swapaxes(scores @ heads[2], 0, 1)
        return out

    def wait(self) -> None:
        pass

    def peak_of(self, work: Callable[[], object]) -> float:
        """Bytes of memory that a call needs at its worst, its result included."""
        try:
            # Else memory freed before and kept by malloc would serve the call unseen.
            ctypes.CDLL(None).malloc_trim(0)
            with open("/proc/self/clear_refs", "w", encoding="ascii") as marks:
                marks.write("5")  # sets the high-water mark back: proc(5)
            before = _memory("VmRSS")
            work()
            return max(0.0, _memory("VmHWM") - before)
        except (OSError, AttributeError):
            work()
            return float("nan")

    def available(self) -> float:
        """Bytes of memory to spare."""
        try:
            with open("/proc/meminfo", encoding="ascii") as info:
                found = re.search(r"MemAvailable:\s+(\d+) kB", info.read())
            return 1024.0 * int(found.group(1)) if found else UNKNOWN
        except OSError:
            return UNKNOWN


def _memory(name: str) -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        found = re.search(rf"{name}:\s+(\d+) kB", status.read())
    return 1024.0 * int(found.group(1)) if found else float("nan")


class Gpu(Host):
    maker = "PyTorch"

    def __init__(self, torch: Any, index: int, name: str) -> None:
        self.torch, self.device, self.name = torch, f"cuda:{index}", name
        # Else its products would be of tf32, with a thousandth of the precision.
        torch.backends.cuda.matmul.allow_tf32 = False

    def array(self, x: np.ndarray) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(x)).to(self.device)

    def to_host(self, x: Any) -> np.ndarray:
        return x.cpu().numpy()

    def rows(self, table: Any, indices: np.ndarray) -> Any:
        return table[self.array(np.asarray(indices, np.int64))]

    def stack(self, parts: Sequence[Any]) -> Any:
        return self.torch.stack(tuple(parts))

    def gelu(self, dtype: Any) -> Callable[[Any], Any]:
        return self.torch.nn.functional.gelu

    def flash(self, q: Any, k: Any, v: Any, cu_seqlens: np.ndarray) -> Any:
        offsets, longest = self.array(cu_seqlens), int(np.diff(cu_seqlens).max())
        return flashattn.attention_varlen(q, k, v, offsets, offsets, longest, longest)

    def materialised(self, q: Any, k: Any, v: Any, cu_seqlens: np.ndarray) -> Any:
        out = self.torch.empty_like(q)
        for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
            heads = [x[first:last].transpose(0, 1) for x in (q, k, v)]
            scores = heads[0] @ heads[1].transpose(1, 2)
            scores *= 1 / math.sqrt(q.shape[-1])
            scores -= scores.amax(-1, keepdim=True)
            scores.exp_()
            scores /= scores.sum(-1, keepdim=True)
            out[first:last] = (scores @ heads[2]).transpose(0, 1)
        return out

    def wait(self) -> None:
        self.torch.cuda.synchronize(self.device)

    def peak_of(self, work: Callable[[], object]) -> float:
        cuda = self.torch.cuda
        cuda.reset_peak_memory_stats(self.device)
        before = cuda.memory_allocated(self.device)
        work()
        self.wait()
        return float(cuda.max_memory_allocated(self.device) - before)

    def available(self) -> float:
        return float(self.torch.cuda.mem_get_info(self.device)[0])


HOST = Host()


def find() -> Tuple[Host, str]:
    """The first GPU on which the model runs, else the CPU; and a message that says which, and why
    not on a GPU."""
    found = next((d for d in flashattn.devices() if d.kind == "cuda"), None)
    device = f"cuda:{found.device_index}" if found else "cuda"
    try:
        flashattn.check(dtype="float32", heads_q=12, dim_qk=32, varlen_q=True, varlen_kv=True,
                        device=device)
    except flashattn.FlashAttentionError as error:
        return HOST, f"On the CPU, not on a GPU: {error}."
    try:
        import torch
    except ImportError as error:
        return HOST, (f"On the CPU, though there is a GPU ({found.name if found else device}): its "
                      f"dense layers need PyTorch ({error}); install it: pip install torch.")
    if not torch.cuda.is_available():
        return HOST, ("On the CPU, though there is a GPU: PyTorch does not reach it "
                      "(torch.cuda.is_available() says no); install a build of it with CUDA.")
    name = found.name if found else device
    return Gpu(torch, found.device_index if found else 0, name), (
        f"On the GPU: {name}, {device}; dense layers by PyTorch {torch.__version__}, attention by "
        "libflashattn.")


class Gelu:
    """x * Phi(x), with Phi from a table of cubic Hermite pieces: exact to 1e-13."""

    REACH, STEPS = 9.0, 256  # of the table; entries for a unit

    def __init__(self, dtype: Any) -> None:
        x = np.arange(-self.REACH, self.REACH + 2 / self.STEPS, 1 / self.STEPS)
        value = np.array([0.5 * math.erfc(-t / math.sqrt(2)) for t in x])
        slope = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) / self.STEPS
        rise = np.diff(value)
        self.table = np.stack([value[:-1], slope[:-1], 3 * rise - 2 * slope[:-1] - slope[1:],
                               slope[:-1] + slope[1:] - 2 * rise]).astype(dtype)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        at = (np.clip(x, -self.REACH, self.REACH) + x.dtype.type(self.REACH)) * self.STEPS
        piece = at.astype(np.int32)
        at -= piece
        a, b, c, d = self.table
        return x * (a[piece] + at * (b[piece] + at * (c[piece] + at * d[piece])))
