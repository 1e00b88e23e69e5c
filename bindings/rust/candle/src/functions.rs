//! The functions of the crate candle-flash-attn, by name and argument.

use candle_core::{bail, Result, Tensor};

use crate::{Attention, Varlen};

/// softmax(softmax_scale * q k^T) v in memory linear in the sequence length, with gradients.
///
/// * `q`: (batch, seqlen_q, heads, dim); `k`, `v`: (batch, seqlen_kv, heads_kv, dim), where heads is a
///   multiple of heads_kv.
/// * `softmax_scale`: factor of the scores, 1 / sqrt(dim) as a rule, not 0.
/// * `causal`: hides keys after the query, both sequences aligned at their ends.
///
/// Returns o: (batch, seqlen_q, heads, dim_v), contiguous.
///
/// # Errors
///
/// As of [`Attention::forward`].
pub fn flash_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, causal_right(causal))
}

/// [`flash_attn`] where a query sees the keys from `window_size_left` before to `window_size_right`
/// after it; `None`: that side is open.
///
/// # Errors
///
/// As of [`Attention::forward`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let (left, right) = (window_size_left, window_size_right);
    Attention::new(softmax_scale).window(left, right).forward(q, k, v)
}

/// [`flash_attn`] with ALiBi: `alibi_slopes` is (heads), see [`Attention::alibi`].
///
/// # Errors
///
/// As of [`Attention::forward`].
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let right = causal_right(causal);
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, None, right)
}

/// [`flash_attn_windowed`] with ALiBi: `alibi_slopes` is (heads), see [`Attention::alibi`].
///
/// # Errors
///
/// As of [`Attention::forward`].
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let window = (window_size_left, window_size_right);
    options(softmax_scale, window, Some(alibi_slopes), 0.0).forward(q, k, v)
}

/// [`flash_attn_windowed`] with ALiBi where slopes are given, and with a softcap, see
/// [`Attention::softcap`].
///
/// # Errors
///
/// As of [`Attention::forward`].
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let window = (window_size_left, window_size_right);
    options(softmax_scale, window, alibi_slopes, softcap).forward(q, k, v)
}

/// [`flash_attn`] of packed sequences.
///
/// * `q`: (total_q, heads, dim); `k`, `v`: (total_kv, heads_kv, dim).
/// * `seqlens_q`, `seqlens_k`: (batch + 1) integers, the rows where the sequences begin and the last
///   ends: 0, length 1, length 1 + length 2, and so on.
/// * `max_seqlen_q`, `max_seqlen_k`: at least the length of the longest.
///
/// Returns o: (total_q, heads, dim_v), contiguous.
///
/// # Errors
///
/// As of [`Attention::forward_varlen`].
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    let window = (None, causal_right(causal));
    options(softmax_scale, window, None, 0.0).forward_varlen(q, k, v, &varlen)
}

/// [`flash_attn_varlen`] with the window of [`flash_attn_windowed`].
///
/// # Errors
///
/// As of [`Attention::forward_varlen`].
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    let window = (window_size_left, window_size_right);
    options(softmax_scale, window, None, 0.0).forward_varlen(q, k, v, &varlen)
}

/// [`flash_attn_varlen_windowed`] of keys and values in pages, forward only.
///
/// * `k`, `v`: (pages, page_block_size, heads_kv, dim).
/// * `seqlens_k`: (batch + 1) integers, the sums of the sequences' lengths.
/// * `block_table`: (batch, pages of a sequence) integers, the page of each page_block_size tokens.
/// * `mm_prefix_ranges`: `None`; libflashattn has no mask that a range of keys escapes.
/// * `softcap`: see [`Attention::softcap`].
///
/// # Errors
///
/// As of [`Attention::forward_varlen`]; mm_prefix_ranges; a page_block_size that is not that of k.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    if mm_prefix_ranges.is_some() {
        bail!(
            "flash-attn: mm_prefix_ranges is given, and libflashattn has no mask that a range of keys \
             escapes; give None, and the queries of such ranges in a call of their own without the mask"
        )
    }
    if k.rank() == 4 && k.dim(1)? != page_block_size {
        bail!(
            "flash-attn: page_block_size = {page_block_size}, but k has {} tokens a page; give that \
             number",
            k.dim(1)?
        )
    }
    let mut varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    varlen.block_table = Some(block_table);
    let window = (window_size_left, window_size_right);
    let options = options(softmax_scale, window, None, softcap.unwrap_or(0.0));
    options.forward_varlen(q, k, v, &varlen)
}

/// [`flash_attn_varlen`] with ALiBi: `alibi_slopes` is (heads), see [`Attention::alibi`].
///
/// # Errors
///
/// As of [`Attention::forward_varlen`].
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    let window = (None, causal_right(causal));
    options(softmax_scale, window, Some(alibi_slopes), 0.0).forward_varlen(q, k, v, &varlen)
}

/// [`flash_attn_varlen_windowed`] with ALiBi: `alibi_slopes` is (heads), see [`Attention::alibi`].
///
/// # Errors
///
/// As of [`Attention::forward_varlen`].
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    let window = (window_size_left, window_size_right);
    options(softmax_scale, window, Some(alibi_slopes), 0.0).forward_varlen(q, k, v, &varlen)
}

/// [`flash_attn_varlen_windowed`] with ALiBi where slopes are given, and with a softcap, see
/// [`Attention::softcap`].
///
/// # Errors
///
/// As of [`Attention::forward_varlen`].
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let varlen = packed(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k);
    let window = (window_size_left, window_size_right);
    options(softmax_scale, window, alibi_slopes, softcap).forward_varlen(q, k, v, &varlen)
}

fn causal_right(causal: bool) -> Option<usize> {
    causal.then_some(0)
}

pub(crate) fn options(
    scale: f32,
    (left, right): (Option<usize>, Option<usize>),
    alibi_slopes: Option<&Tensor>,
    softcap: f32,
) -> Attention {
    let options = Attention::new(scale).window(left, right).softcap(softcap);
    match alibi_slopes {
        Some(slopes) => options.alibi(slopes),
        None => options,
    }
}

fn packed<'a>(
    seqlens_q: &'a Tensor,
    seqlens_k: &'a Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
) -> Varlen<'a> {
    Varlen { seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k, block_table: None }
}
