"""How exact attention in E4M3 is: the kernel's own error, against float64 of the numbers that the
quantised inputs mean; and the recipe's, against float64 of the numbers before. On normal data, on
values with a mean of 1, with a first token that all look at, on outliers (Shah et al. 2024, section
4.3) and with a needle among 16k keys.

Relative errors are root mean squares over those of the exact result. A kernel that sums P V in the
14 bits of a tensor core errs by 2e-2 and more on values with a mean of 1 and by none of that on
others, which average to zero."""
import numpy as np
import pytest

from . import capi, reference
from .case import Case
from .data import make_data
from .harness import run
from .test_quantize import SEED, Quantized, eight

KEYS = 16384
# The kernel computes in fp32, in both of its ways: for many queries, and for few.
OWN = 5e-6


@pytest.fixture(autouse=True)
def _on_the_cpu(device):
    if device.name != "cpu":
        pytest.skip("on a GPU P is rounded to E4M3, too: test_gpu_eightbit.py")


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def exact(case, data):
    return [reference.forward(case, data, b).o.swapaxes(0, 1) for b in range(case.batch)]


def errors(device, case, data, transform=0):
    """Of the kernel and of the recipe, relative, and the recipe's absolute."""
    seed = SEED if transform & capi.ROTATE else 0
    quantized = Quantized(case, device, data, eight(case), transform, seed)
    meant = quantized.data(data)
    result = run(eight(case), device, meant)
    before, after = exact(case, data), exact(eight(case), meant)
    own = [rms(x - y) / rms(y) for x, y in zip(result.o, after)]
    recipe = [rms(x - y) for x, y in zip(result.o, before)]
    return max(own), max(r / rms(y) for r, y in zip(recipe, before)), max(recipe)


def normal(rows, block=64):
    case = Case(seqlen_q=rows, seqlen_kv=KEYS, heads_q=2, heads_kv=1, dim_qk=64, dtype="f32",
                descale_block=block)
    return case, make_data(case)


def with_mean(case, data):
    data.v = [v + np.float32(1) for v in data.v]


def with_first_token(case, data):
    """20 nats above the rest."""
    along = data.q[0].mean((0, 1)) + 1
    data.q = [q + along for q in data.q]
    data.k[0][0] = along * (20 * case.dim_qk ** 0.5 / (along ** 2).sum())


def with_outliers(case, data):
    rng = np.random.default_rng(1)
    for name in "qkv":
        x = getattr(data, name)[0]
        x += (rng.standard_normal(x.shape) * 10 * (rng.random(x.shape) < 0.001)).astype(np.float32)


# The recipe's error: the values keep three bits, averaged over the keys that count.
@pytest.mark.parametrize("rows", [1, 48])
@pytest.mark.parametrize("change, recipe", [
    (lambda case, data: None, 0.06), (with_mean, 0.0015), (with_first_token, 0.04),
    (with_outliers, 0.17)])
def test_errors(device, rows, change, recipe):
    case, data = normal(rows)
    change(case, data)
    own, whole, _ = errors(device, case, data)
    assert own <= OWN, "the kernel's own error is %.2g" % own
    assert whole <= recipe, "the recipe's error is %.2g" % whole


def test_outliers_of_the_paper(device):
    """q, k and v of N(0, 1) + N(0, 100) Bernoulli(0.001), 2k keys, heads of 128: the root mean
    square error that the paper gives for rotation and block scales is 9.1e-3, and 2.4e-2 for one a
    tensor. It depends on the few queries that see an outlier: heads of 64 reach 1.2e-2 here, much
    of it from v, which nothing rotates."""
    case = Case(seqlen_q=256, seqlen_kv=2048, heads_q=2, dim_qk=128, dtype="f32", descale_block=64)
    data = make_data(case)
    with_outliers(case, data)
    _, _, whole = errors(device, case.replace(descale_block=0), data)
    _, _, rotated = errors(device, case, data, capi.ROTATE)
    assert rotated <= 9.1e-3, rotated
    assert rotated <= 0.75 * whole, (rotated, whole)


@pytest.mark.parametrize("rows", [1, 48])
@pytest.mark.parametrize("at", [0, 9001, KEYS - 1])
def test_needle(device, rows, at):
    """A key that answers to the queries, 14 nats above the others, is found among 16k."""
    case, data = normal(rows)
    along = np.sign(data.q[0].mean((0, 1)) + 1e-9).astype(np.float32)
    data.q = [q * np.float32(0.1) + along for q in data.q]
    data.k[0][at] = along * (14 * case.dim_qk ** 0.5 / case.dim_qk)
    data.v[0][at] = 3
    own, whole, _ = errors(device, case, data)
    assert own <= OWN and whole <= 0.05, (own, whole)
