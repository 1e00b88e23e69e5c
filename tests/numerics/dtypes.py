"""The number formats of the library, as NumPy knows them."""
import ml_dtypes
import numpy as np

NUMPY = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8": np.dtype(ml_dtypes.float8_e4m3fn),
    "u8": np.dtype(np.uint8),
    "i8": np.dtype(np.int8),
}

# Largest relative distance between neighbours: twice the largest error of one rounding.
EPSILON = {"f32": 2.0 ** -23, "f16": 2.0 ** -10, "bf16": 2.0 ** -7, "f8": 2.0 ** -3}
# Types of a quantised cache, and their largest numbers, which the library saturates to.
EIGHT_BITS = {"f8": 448.0, "i8": 127.0}


def round_finite(x, dtype):
    """round_to(), but the largest number of dtype beyond it."""
    most = np.float32(ml_dtypes.finfo(NUMPY[dtype]).max)
    return round_to(np.clip(x, -most, most), dtype)


def round_to(x, dtype):
    """The values of x rounded to dtype, as float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "f32":
            return np.asarray(x, np.float32)
        if dtype in EIGHT_BITS:
            x = np.clip(x, -EIGHT_BITS[dtype], EIGHT_BITS[dtype])
        if dtype == "i8":
            return np.nan_to_num(np.rint(np.asarray(x, np.float32)))
        return np.asarray(x, np.float32).astype(NUMPY[dtype]).astype(np.float32)
