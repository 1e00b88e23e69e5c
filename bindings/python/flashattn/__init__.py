"""FlashAttention for NumPy arrays, PyTorch's and CuPy's on a GPU, and whatever speaks DLPack: the
Python layer of libflashattn.

    o = flashattn.attention(q, k, v, causal=True)

Start with attention(). `python -m flashattn` shows what the library can do on this machine.
"""
from ._append import Appended, append_kv
from ._attention import attention, attention_backward, attention_paged, attention_varlen
from ._constants import (Bias, Descriptor, Determinism, Device, DeviceInfo, Dtype, Feature, Layout,
                         LogLevel, Mask, Op, PlanInfo, Reason, Status)
from ._describe import describe
from ._errors import (ArrayTypeError, FlashAttentionError, InvalidArgumentError, OutOfMemoryError,
                      UnsupportedError)
from ._library import lib as _lib, text as _text
from ._plan import Plan, cache_info, clear_cache
from ._quantize import Quantized, quantize
from ._tools import build_info, check, devices, dropout_mask, merge, set_log, supported

__version__ = _text(_lib.flashattn_version_string())

__all__ = [
    "Appended", "ArrayTypeError", "Bias", "Descriptor", "Determinism", "Device", "DeviceInfo",
    "Dtype", "Feature", "FlashAttentionError", "InvalidArgumentError", "Layout", "LogLevel", "Mask",
    "Op", "OutOfMemoryError", "Plan", "PlanInfo", "Quantized", "Reason", "Status",
    "UnsupportedError", "append_kv", "attention", "attention_backward", "attention_paged",
    "attention_varlen", "build_info", "cache_info", "check", "clear_cache", "describe", "devices",
    "dropout_mask", "merge", "quantize", "set_log", "supported",
]
