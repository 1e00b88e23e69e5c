//! Against candle's own operations: values and gradients.

use candle_core::{DType, Device, Result, Tensor, Var, D};
use flashattn_candle::flash_attn;

/// softmax(scale * q k^T) v with every score in memory; arguments as of flash_attn.
fn softmax_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    causal: bool,
) -> Result<Tensor> {
    let (batch, seqlen_q, heads, _) = q.dims4()?;
    let (_, seqlen_kv, heads_kv, _) = k.dims4()?;
    let repeated = |x: &Tensor| -> Result<Tensor> {
        let dim = x.dim(3)?;
        x.unsqueeze(3)?
            .broadcast_as((batch, seqlen_kv, heads_kv, heads / heads_kv, dim))?
            .reshape((batch, seqlen_kv, heads, dim))?
            .transpose(1, 2)?
            .contiguous()
    };
    let (q, k, v) = (q.transpose(1, 2)?.contiguous()?, repeated(k)?, repeated(v)?);
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * scale)?;
    if causal {
        let hidden = |i: usize, j: usize| j + seqlen_q > i + seqlen_kv;
        let mask: Vec<f32> = (0..seqlen_q * seqlen_kv)
            .map(|n| if hidden(n / seqlen_kv, n % seqlen_kv) { f32::NEG_INFINITY } else { 0.0 })
            .collect();
        let mask = Tensor::from_vec(mask, (seqlen_q, seqlen_kv), &Device::Cpu)?;
        scores = scores.broadcast_add(&mask)?;
    }
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.matmul(&v)?.transpose(1, 2)
}

fn assert_near(given: &Tensor, wanted: &Tensor, tolerance: f32) -> Result<()> {
    assert_eq!(given.dims(), wanted.dims());
    let given = given.to_dtype(DType::F32)?;
    let most = (given - wanted)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    assert!(most <= tolerance, "{most} above {tolerance}");
    Ok(())
}

fn compare(q: [usize; 4], kv: [usize; 4], dim_v: usize, causal: bool) -> Result<()> {
    let random = |dims: [usize; 4]| Var::randn(0f32, 1f32, &dims, &Device::Cpu);
    let (q, k, v) = (random(q)?, random(kv)?, random([kv[0], kv[1], kv[2], dim_v])?);
    let scale = 1.0 / (q.dim(3)? as f64).sqrt();
    let o = flash_attn(&q, &k, &v, scale as f32, causal)?;
    let wanted = softmax_attention(&q, &k, &v, scale, causal)?;
    assert_near(&o, &wanted, 2e-6)?;

    let weight = Tensor::randn(0f32, 1f32, o.dims(), &Device::Cpu)?;
    let given = (o * &weight)?.sum_all()?.backward()?;
    let wanted = (wanted * &weight)?.sum_all()?.backward()?;
    for x in [&q, &k, &v] {
        assert_near(given.get(x).expect("a gradient"), wanted.get(x).unwrap(), 2e-5)?;
    }
    Ok(())
}

#[test]
fn values_and_gradients() -> Result<()> {
    for causal in [false, true] {
        compare([2, 33, 4, 16], [2, 33, 4, 16], 16, causal)?;
        compare([1, 20, 6, 32], [1, 71, 2, 32], 24, causal)?; // groups, decoding, dim_v
    }
    Ok(())
}

#[test]
fn strides_without_copies() -> Result<()> {
    // (batch, heads, seq, dim) in memory, and q, k, v of one tensor.
    let qkv = Var::randn(0f32, 1f32, (2, 12, 19, 8), &Device::Cpu)?;
    let part = |n: usize| qkv.narrow(1, 4 * n, 4)?.transpose(1, 2);
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    assert!(!q.is_contiguous());
    let o = flash_attn(&q, &k, &v, 0.5, true)?;
    let wanted = softmax_attention(&q, &k, &v, 0.5, true)?;
    assert_near(&o, &wanted, 2e-6)?;
    // sum_all: the gradient that arrives is one number, repeated.
    let given = o.sum_all()?.backward()?;
    let wanted = wanted.sum_all()?.backward()?;
    assert_near(given.get(&qkv).unwrap(), wanted.get(&qkv).unwrap(), 2e-5)
}

#[test]
fn half_precision() -> Result<()> {
    // The same numbers each time: of random ones, one set in a thousand exceeds the tolerance of the
    // gradients, which o's rounding enters.
    let numbers: Vec<f32> =
        (0..2 * 40 * 2 * 32).map(|n| 1.5 * (n as f32 * n as f32).sin()).collect();
    let q = Tensor::from_vec(numbers, (2, 40, 2, 32), &Device::Cpu)?;
    for (dtype, tolerance) in [(DType::F16, 4e-3), (DType::BF16, 3e-2)] {
        let q = Var::from_tensor(&q.to_dtype(dtype)?)?;
        let wide = Var::from_tensor(&q.to_dtype(DType::F32)?)?;
        let o = flash_attn(&q, &q, &q, 0.2, true)?;
        assert_eq!(o.dtype(), dtype);
        let wanted = softmax_attention(&wide, &wide, &wide, 0.2, true)?;
        assert_near(&o, &wanted, tolerance)?;
        let given = o.sum_all()?.backward()?;
        let wanted = wanted.sum_all()?.backward()?;
        let size = wanted.get(&wide).unwrap().abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        assert_near(given.get(&q).unwrap(), wanted.get(&wide).unwrap(), tolerance * size)?;
    }
    Ok(())
}

#[test]
fn refusals_keep_the_message() -> Result<()> {
    let q = Tensor::zeros((1, 4, 3, 8), DType::F32, &Device::Cpu)?;
    let kv = Tensor::zeros((1, 4, 2, 8), DType::F32, &Device::Cpu)?;
    let error = flash_attn(&q, &kv, &kv, 1.0, false).unwrap_err();
    assert!(error.to_string().contains("heads_q = 3"), "{error}");
    for zero in [0.0, -0.0] {
        let error = flash_attn(&kv, &kv, &kv, zero, false).unwrap_err();
        assert!(error.to_string().contains("scale = 0 would"), "{error}");
    }
    let q = Tensor::zeros((1, 4, 2, 8), DType::F64, &Device::Cpu)?;
    assert!(flash_attn(&q, &kv, &kv, 1.0, false).is_err());
    assert!(flash_attn(&kv, &kv, &q, 1.0, false).is_err());
    Ok(())
}
