"""E4M3 against the reference: what it computes of the numbers that elements and descales mean, and
how it rounds."""
import numpy as np
import pytest

from . import eightbit
from .case import Case
from .data import make_data
from .dtypes import NUMPY, round_to
from .harness import Call, run
from .randomcases import SHARES, try_share
from .repro import verify


@pytest.fixture(autouse=True)
def _on_the_cpu(device):
    if device.name != "cpu":
        pytest.skip("on a GPU P is rounded to E4M3, too: test_gpu_eightbit.py")


@pytest.mark.parametrize("case", [
    pytest.param(case, id=str(n), marks=[pytest.mark.smoke] if n % 6 == 0 else [])
    for n, case in enumerate(eightbit.listed())])
def test_listed(case, device):
    verify(case, device)


@pytest.mark.parametrize("share", range(SHARES))
def test_random(share, randomised, device):
    try_share(share, eightbit.random_cases(), *randomised, device)


def one_key_each(count, **changes):
    """Sequences of one visible key, whose value o is; behind it a hidden one."""
    return Case(batch=count, seqlen_q=1, seqlen_kv=2, heads_q=1, dim_qk=1, dim_v=1, causal=True,
                top_left=True, dtype="f8", **changes)


@pytest.mark.smoke
@pytest.mark.parametrize("kv", ["f8", "i8"])
@pytest.mark.parametrize("backward", [False, True])
def test_each_code(device, backward, kv):
    """All 256 bytes as keys' values; backward: the packed path, otherwise K and V in place."""
    codes = np.arange(256, dtype=np.uint8).view(NUMPY[kv]).astype(np.float32)
    case = one_key_each(256, dtype_o="f32", dtype_kv=kv, backward=backward)
    data = make_data(case)
    for b in range(256):
        data.v[b][0], data.v[b][1] = codes[b], np.nan if kv == "f8" else -1
    call = Call(case, device, data)
    np.testing.assert_array_equal(np.array(call.forward().o).ravel(), codes)


@pytest.mark.smoke
@pytest.mark.parametrize("kv", ["f8", "i8"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_each_code_in_vectors(device, dtype, kv):
    """All bytes in rows that fill vectors, read in place: as values, and as keys of which a query
    sees one element, in each place of a row. The value of the one key that a row sees is exact."""
    codes = np.arange(256, dtype=np.uint8).view(NUMPY[kv]).astype(np.float32)
    case = one_key_each(256).replace(dtype=dtype, dtype_kv=kv, dtype_o=dtype, dim_qk=64, dim_v=64,
                                     heads_q=4, heads_kv=1, scale=1.0, descales="bt",
                                     descale_block=1)
    data = make_data(case)
    finite = np.where(np.isfinite(codes), codes, 0)
    for b in range(256):
        data.q[b][:] = np.eye(64, dtype=np.float32)[[n + 5 * b for n in range(4)] % np.int64(64)]
        data.k[b][0, 0] = finite[(b + np.arange(64)) % 256]
        data.v[b][0, 0] = codes[(b + np.arange(64)) % 256]
    data.descales.pop("k", None)
    result = Call(case, device, data).forward()
    for b in range(256):
        values = round_to(data.v[b][0, 0] * np.float32(data.descales["v"][b, 0, 0]), dtype)
        np.testing.assert_array_equal(result.o[b], np.broadcast_to(values, (1, 4, 64)))
        seen = (5 * b + np.arange(4)) % 64
        np.testing.assert_array_equal(np.ravel(result.lse[b]), finite[(b + seen) % 256])


@pytest.mark.smoke
@pytest.mark.parametrize("splits", [1, 2])
def test_rounding(device, splits):
    """To nearest even, saturated, NaN kept: fp32 numbers, as descales of 1, on and beside every
    number of E4M3 and every middle of two."""
    numbers = np.unique(np.abs(np.arange(127, dtype=np.uint8).view(NUMPY["f8"]).astype(np.float32)))
    middles = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, [464, 480, 1e30]])
    middles = middles.astype(np.float32)
    every = np.concatenate([middles, np.nextafter(middles, np.float32(0)),
                            np.nextafter(middles, np.float32(1e38)), [np.inf, np.nan]])
    every = np.concatenate([every, -every]).astype(np.float32)
    case = one_key_each(len(every), dtype_o="f8", descales="bt", descale_block=1, splits=splits,
                        amax_o="b")
    data = make_data(case)
    for b, number in enumerate(every):
        data.v[b][0], data.v[b][1] = 1, 1
        data.descales["v"][b, 0] = number, np.nan
    result = run(case, device, data)
    np.testing.assert_array_equal(np.array(result.o).ravel(), round_to(every, "f8"))
    np.testing.assert_array_equal(result.amax_o.ravel(), np.abs(every))
