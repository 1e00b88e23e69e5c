//! What the tests share: fixed numbers, and attention of candle's own operations.
#![allow(dead_code)]

use candle_core::{DType, Device, Result, Shape, Tensor, Var, D};

/// Numbers in [-1.5, 1.5], the same on every run, others for each seed.
pub fn numbers(shape: impl Into<Shape>, seed: u32) -> Result<Tensor> {
    let shape = shape.into();
    let number =
        |n: usize| 1.5 * ((n + 1) as f64 * (n as f64 + 0.7 * f64::from(seed))).sin() as f32;
    Tensor::from_vec((0..shape.elem_count()).map(number).collect(), shape, &Device::Cpu)
}

pub fn var(shape: impl Into<Shape>, seed: u32) -> Result<Var> {
    Var::from_tensor(&numbers(shape, seed)?)
}

/// What scores go through; see flashattn_candle::Attention.
#[derive(Clone, Copy, Default)]
pub struct Scores<'a> {
    pub scale: f64,
    pub window: (Option<usize>, Option<usize>),
    pub softcap: f64,
    pub slopes: Option<&'a Tensor>, // (heads)
    pub sink: Option<&'a Tensor>,   // (heads)
}

impl Scores<'_> {
    pub fn causal(scale: f64, causal: bool) -> Self {
        Self { scale, window: (None, causal.then_some(0)), ..Self::default() }
    }
}

/// The attention of (batch, seq, heads, dim) with every score in memory.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, how: &Scores<'_>) -> Result<Tensor> {
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
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * how.scale)?;
    if how.softcap > 0.0 {
        scores = ((scores / how.softcap)?.tanh()? * how.softcap)?;
    }
    // The distance of key j behind query i.
    let after = |n: usize| {
        let (i, j) = ((n / seqlen_kv) as i64, (n % seqlen_kv) as i64);
        j - (i + seqlen_kv as i64 - seqlen_q as i64)
    };
    let plane = |f: &dyn Fn(i64) -> f32| -> Result<Tensor> {
        let all = (0..seqlen_q * seqlen_kv).map(|n| f(after(n))).collect();
        Tensor::from_vec(all, (seqlen_q, seqlen_kv), &Device::Cpu)
    };
    if let Some(slopes) = how.slopes {
        let distance = plane(&|after| -after.abs() as f32)?;
        let bias = slopes.reshape((heads, 1, 1))?.broadcast_mul(&distance.unsqueeze(0)?)?;
        scores = scores.broadcast_add(&bias.unsqueeze(0)?)?;
    }
    let (left, right) = how.window;
    let far = |after: i64, side: Option<usize>| side.is_some_and(|side| after > side as i64);
    let hidden = |after: i64| far(-after, left) || far(after, right);
    let mask = plane(&|after| if hidden(after) { f32::NEG_INFINITY } else { 0.0 })?;
    scores = scores.broadcast_add(&mask)?;
    if let Some(sink) = how.sink {
        let column = sink.reshape((1, heads, 1, 1))?.broadcast_as((batch, heads, seqlen_q, 1))?;
        scores = Tensor::cat(&[&scores, &column.contiguous()?], 3)?;
    }
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.narrow(3, 0, seqlen_kv)?.contiguous()?.matmul(&v)?.transpose(1, 2)
}

#[track_caller]
pub fn assert_near(given: &Tensor, wanted: &Tensor, tolerance: f32) -> Result<()> {
    assert_eq!(given.dims(), wanted.dims());
    let given = given.to_dtype(DType::F32)?;
    let most = (given - wanted)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    assert!(most <= tolerance, "{most} above {tolerance}");
    Ok(())
}

/// Compares o, and the gradients of all variables under a weighted sum of it.
#[track_caller]
pub fn assert_same(given: &Tensor, wanted: &Tensor, vars: &[&Var], tolerance: f32) -> Result<()> {
    assert_near(given, wanted, tolerance)?;
    let weight = numbers(given.shape().clone(), 99)?;
    let given = (given * &weight)?.sum_all()?.backward()?;
    let wanted = (wanted * &weight)?.sum_all()?.backward()?;
    for x in vars {
        assert_near(given.get(x).expect("a gradient"), wanted.get(x).unwrap(), 10.0 * tolerance)?;
    }
    Ok(())
}
