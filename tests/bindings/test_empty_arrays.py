"""Arrays without heads, elements or tokens: refused, as 0 is a default of the descriptor's numbers.
Those without sequences or tokens are fine."""
import numpy as np
import pytest

import flashattn
from flashattn import Reason
from numerics.arrays import random

X = random(2, 9, 4, 16)
NO_ELEMENTS, NO_HEADS = X[..., :0], X[:, :, :0]
ELEMENTS, HEADS = "heads of 0 elements; give at least 1", "0 heads in the order .* at least 1"


@pytest.mark.parametrize("name, array, words", [
    ("q", NO_ELEMENTS, ELEMENTS), ("k", NO_ELEMENTS, ELEMENTS), ("v", NO_ELEMENTS, ELEMENTS),
    ("q", NO_HEADS, HEADS), ("k", NO_HEADS, HEADS), ("v", NO_HEADS, HEADS)])
def test_arrays_without_heads_or_elements(name, array, words):
    """0 is a default of the descriptor's numbers: they were read and written past their end. None
    gets as far as to o, which lies between words that must stay."""
    guarded = np.full(X.size + 2 * 64, 7, np.float32)
    o = guarded[64:-64].reshape(X.shape)[..., :array.shape[-1]]
    q, k, v = (array if name == each else X for each in "qkv")
    cu = [0, 4, 9]
    calls = [
        lambda: flashattn.attention(q, k, v, o=o),
        lambda: flashattn.attention(q, k, v),
        lambda: flashattn.attention_varlen(q[0], k[0], v[0], cu, cu),
        lambda: flashattn.attention_varlen(q, k[0], v[0], None, cu, o=o),
        lambda: flashattn.attention_paged(q, k[:, :8], v[:, :8], [[0], [1]], [8, 8], o=o),
        lambda: flashattn.attention_backward(o, q, k, v, o, np.zeros((2, 4, 9), np.float32)),
        lambda: flashattn.Plan(dtype="float32", heads_q=4, dim_qk=16).forward(q, k, v),
        lambda: flashattn.quantize(**{name: array})]
    for call in calls:
        with pytest.raises(ValueError, match=rf"^{name} has shape \(.*\), {words}") as caught:
            call()
        assert caught.value.field == name and caught.value.reason is Reason.SIZE
    assert (guarded == 7).all()


def test_results_and_parts_without_heads_or_elements():
    lse, keep = np.zeros((2, 4, 9), np.float32), np.ones((1, 0, 2, 2), bool)
    for name, words, call in [
            ("part_o", ELEMENTS, lambda: flashattn.merge([NO_ELEMENTS], [lse])),
            ("part_o", HEADS, lambda: flashattn.merge([NO_HEADS], [lse[:, :0]])),
            ("o", "expected", lambda: flashattn.attention(X, X, X, o=NO_ELEMENTS)),
            ("k_cache", ELEMENTS, lambda: flashattn.append_kv(
                NO_ELEMENTS.copy(), None, [0, 0], X)),
            ("v_cache", HEADS, lambda: flashattn.append_kv(
                X.copy(), NO_HEADS.copy(), [0, 0], X, X)),
            ("q", HEADS, lambda: flashattn.append_kv(X.copy(), None, [0, 0], None, None, NO_HEADS)),
            ("heads_q", "= 0", lambda: flashattn.dropout_mask(1, 0, 2, 2, dropout=0.5, rng_seed=1)),
            ("heads_q", "= 0", lambda: flashattn.dropout_mask(1, 0, 2, 2, dropout=0.5, rng_seed=1,
                                                              keep=keep)),
            ("heads_q", "= 0", lambda: flashattn.check(dtype="float32", heads_q=0, dim_qk=8)),
            ("dim_qk", "= 0", lambda: flashattn.check(dtype="float32", heads_q=1, dim_qk=0))]:
        with pytest.raises(ValueError, match=f"^{name} .*{words}") as caught:
            call()
        assert caught.value.field.partition(".")[0] == name, name


def test_pages_without_tokens():
    pages = X[:, :0]
    table, lengths = np.zeros((2, 1), np.int32), np.zeros(2, np.int32)
    for name, call in (("k", lambda: flashattn.attention_paged(X, pages, pages, table, lengths)),
                       ("k_cache", lambda: flashattn.append_kv(
                           pages.copy(), pages.copy(), lengths, X, X, page_table=table))):
        with pytest.raises(ValueError, match=f"^{name} has shape .*, pages of 0 tokens in the "
                                             "order \"pshd\"; give at least 1") as caught:
            call()
        assert caught.value.field == name and caught.value.reason is Reason.PAGE_SIZE


def test_no_sequences_and_no_tokens_are_fine():
    assert flashattn.attention(X[:0], X[:0], X[:0]).shape == (0, 9, 4, 16)
    assert flashattn.attention(X[:, :0], X, X).shape == (2, 0, 4, 16)
    assert not flashattn.attention(X, X[:, :0], X[:, :0]).any()
