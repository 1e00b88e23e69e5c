"""The worked examples of the literature, to their printed digits."""
import dataclasses
import json
import pathlib

import numpy as np
import pytest

from . import harness, philox
from .case import Case
from .data import make_data
from .harness import run
from .merging import merge_parts

pytestmark = pytest.mark.smoke
EXAMPLES = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "worked-examples.json").read_text())


def scores_as_attention(device, scores, values):
    """One query whose scores are given: q = 1, k = scores, scale = 1."""
    case = Case(seqlen_q=1, seqlen_kv=len(scores), dim_qk=1, dim_v=1, scale=1.0)
    data = make_data(case)
    data.q[0][:] = 1
    data.k[0][:, 0, 0] = scores
    data.v[0][:, 0, 0] = values
    return case, run(case, device, data)


def test_online_softmax_running_sums(device):
    """The sum after each block, relative to the maximum so far, from the lse of the keys so far.
    The printed digits continue from rounded ones: the second sum is 1.20344."""
    example = EXAMPLES["online_softmax_row"]
    scores, block = example["scores"], example["block"]
    for n, (top, total) in enumerate(zip(example["running_max"], example["running_sum"])):
        seen = scores[:(n + 1) * block]
        _, result = scores_as_attention(device, seen, seen)
        assert abs(np.exp(result.lse[0][0, 0] - top) - total) < 1e-4
    assert abs(total - example["denominator"]) < 1e-9


def test_online_softmax_by_merging(device):
    """The same sums when each block is merged into the state before it."""
    example = EXAMPLES["online_softmax_row"]
    scores, block = example["scores"], example["block"]
    state = None
    for n, (top, total) in enumerate(zip(example["running_max"], example["running_sum"])):
        here = scores[n * block:(n + 1) * block]
        case, result = scores_as_attention(device, here, here)
        state = merge_parts(case, device, [state, result] if state else [result], "f32")
        assert abs(np.exp(state.lse[0][0, 0] - top) - total) < 1e-4


def test_merge_of_two_blocks(device):
    example = EXAMPLES["merge_two_blocks"]
    case, a = scores_as_attention(device, example["scores_a"], example["values_a"])
    _, b = scores_as_attention(device, example["scores_b"], example["values_b"])
    whole = scores_as_attention(device, example["scores_a"] + example["scores_b"],
                                example["values_a"] + example["values_b"])[1]
    for result in (merge_parts(case, device, [a, b], "f32"), whole):
        assert abs(result.o[0][0, 0, 0] - example["output"]) < 4e-6


@pytest.mark.parametrize("cuts", [[0, 5], [0, 2, 4, 5], [0, 1, 5]])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_five_tokens(device, cuts, splits):
    """Whole, and split by blocks of keys and merged."""
    example = EXAMPLES["five_tokens"]
    case = Case(seqlen_q=5, seqlen_kv=5, dim_qk=4, scale=0.5, splits=splits)
    data = make_data(case)
    data.q, data.k, data.v = ([np.array(example[name], np.float32)[:, None]] for name in "qkv")
    parts = []
    for begin, end in zip(cuts, cuts[1:]):
        part = dataclasses.replace(data, k=[data.k[0][begin:end]], v=[data.v[0][begin:end]])
        parts.append(run(case.replace(seqlen_kv=end - begin), device, part))
    result = merge_parts(case, device, parts, "f32") if len(parts) > 1 else parts[0]
    assert np.abs(result.o[0][:, 0] - example["output"]).max() < 5.1e-5
    # v = identity shows the weights themselves.
    shown = dataclasses.replace(data, v=[np.eye(5, dtype=np.float32)[:, None]])
    weights = run(case.replace(dim_v=5), device, shown).o[0][:, 0]
    assert np.abs(weights - example["weights"]).max() < 5.1e-5
    scores = np.array(example["scores"])
    np.testing.assert_allclose(parts[0].lse[0][0] if len(parts) == 1 else result.lse[0][0],
                               np.log(np.exp(scores).sum(1)), rtol=1e-5)


# u(i, j) of seed 0x0123456789abcdef, offset 0x1122334455667788, head index 5: part of the ABI.
FROZEN = {
    (0, 0): 51323, (0, 1): 18024, (0, 7): 5032, (0, 8): 56992,
    (1, 0): 53865, (7, 15): 47038, (8, 0): 4960, (8, 9): 34071,
    (15, 15): 51521, (16, 0): 19741, (0, 16): 57065, (31, 31): 23030}


def test_dropout_layout_is_frozen(device):
    seed, offset = 0x0123456789ABCDEF, 0x1122334455667788
    numbers = philox.numbers(seed, offset, 5, 32, 32)
    for (i, j), u in FROZEN.items():
        assert numbers[i, j] == u
    case = Case(batch=2, seqlen_q=32, seqlen_kv=32, heads_q=3, dim_qk=8, dropout=0.5,
                rng=(seed, offset))
    keep = harness.dropout_mask(case, device)[1, 2]
    for (i, j), u in FROZEN.items():
        assert keep[i, j] == (u >= 32768)
