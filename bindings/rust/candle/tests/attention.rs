//! Against candle's own operations: values and gradients, strides, types, refusals.

mod common;

use candle_core::{DType, Device, Result, Tensor, Var};
use common::{assert_near, assert_same, attention, numbers, var, Scores};
use flashattn_candle::{flash_attn, Attention};

fn compare(q: [usize; 4], kv: [usize; 4], dim_v: usize, causal: bool) -> Result<()> {
    let (q, k, v) = (var(&q, 1)?, var(&kv, 2)?, var(&[kv[0], kv[1], kv[2], dim_v], 3)?);
    let scale = 1.0 / (q.dim(3)? as f64).sqrt();
    let o = flash_attn(&q, &k, &v, scale as f32, causal)?;
    let wanted = attention(&q, &k, &v, &Scores::causal(scale, causal))?;
    assert_same(&o, &wanted, &[&q, &k, &v], 2e-6)
}

#[test]
fn values_and_gradients() -> Result<()> {
    for causal in [false, true] {
        compare([2, 33, 4, 16], [2, 33, 4, 16], 16, causal)?;
        compare([1, 20, 6, 32], [1, 71, 2, 32], 24, causal)?; // groups, decoding, dim_v
    }
    // Heads that candle-flash-attn refuses.
    compare([1, 9, 2, 20], [1, 9, 1, 20], 12, true)?;
    compare([1, 5, 1, 320], [1, 5, 1, 320], 320, false)
}

#[test]
fn strides_without_copies() -> Result<()> {
    // (batch, heads, seq, dim) in memory, and q, k, v of one tensor.
    let qkv = var((2, 12, 19, 8), 4)?;
    let part = |n: usize| qkv.narrow(1, 4 * n, 4)?.transpose(1, 2);
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    assert!(!q.is_contiguous());
    let o = flash_attn(&q, &k, &v, 0.5, true)?;
    let wanted = attention(&q, &k, &v, &Scores::causal(0.5, true))?;
    assert_near(&o, &wanted, 2e-6)?;
    // sum_all: the gradient that arrives is one number, repeated.
    let given = o.sum_all()?.backward()?;
    let wanted = wanted.sum_all()?.backward()?;
    assert_near(given.get(&qkv).unwrap(), wanted.get(&qkv).unwrap(), 2e-5)
}

#[test]
fn half_precision() -> Result<()> {
    let q = numbers((2, 40, 2, 32), 0)?;
    for (dtype, tolerance) in [(DType::F16, 4e-3), (DType::BF16, 3e-2)] {
        let q = Var::from_tensor(&q.to_dtype(dtype)?)?;
        let wide = Var::from_tensor(&q.to_dtype(DType::F32)?)?;
        let o = flash_attn(&q, &q, &q, 0.2, true)?;
        assert_eq!(o.dtype(), dtype);
        let wanted = attention(&wide, &wide, &wide, &Scores::causal(0.2, true))?;
        assert_near(&o, &wanted, tolerance)?;
        let given = o.sum_all()?.backward()?;
        let wanted = wanted.sum_all()?.backward()?;
        let size = wanted.get(&wide).unwrap().abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        assert_near(given.get(&q).unwrap(), wanted.get(&wide).unwrap(), tolerance * size)?;
    }
    Ok(())
}

#[test]
fn a_sink_and_its_gradient() -> Result<()> {
    let (q, k, v) = (var((2, 21, 4, 16), 5)?, var((2, 30, 2, 16), 6)?, var((2, 30, 2, 16), 7)?);
    let sink = var(4, 8)?;
    let options = Attention::new(0.25).window(Some(9), Some(0)).softcap(3.0).sink(&sink);
    let how = Scores {
        scale: 0.25,
        window: (Some(9), Some(0)),
        softcap: 3.0,
        sink: Some(&sink),
        ..Scores::default()
    };
    // Where everything is tracked, (batch, heads, seq, dim) in memory included, and the sink alone.
    assert_same(
        &options.forward(&q, &k, &v)?,
        &attention(&q, &k, &v, &how)?,
        &[&q, &k, &v, &sink],
        4e-6,
    )?;
    let swapped = q.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
    let o = options.forward(&swapped, &k.detach(), &v.detach())?;
    assert_same(&o, &attention(&q, &k, &v, &how)?, &[&q, &sink], 4e-6)?;
    let o = options.forward(&q.detach(), &k.detach(), &v.detach())?;
    assert_same(&o, &attention(&q, &k, &v, &how)?, &[&sink], 4e-6)?;
    // The sink has another type, and one graph gives its gradient twice.
    let half = Var::from_tensor(&sink.to_dtype(DType::BF16)?)?;
    let o = Attention::new(0.25).sink(&half).forward(&q, &k, &v)?.sum_all()?;
    let (first, second) = (o.backward()?, o.backward()?);
    let first = first.get(&half).unwrap();
    assert_eq!((first.dims(), first.dtype()), (&[4][..], DType::BF16));
    assert_eq!(first.to_dtype(DType::F32)?.to_vec1::<f32>()?, {
        second.get(&half).unwrap().to_dtype(DType::F32)?.to_vec1::<f32>()?
    });
    // A sink that is not tracked.
    let o = options.clone().sink(&sink.detach()).forward(&q.detach(), &k, &v)?;
    assert_same(&o, &attention(&q, &k, &v, &how)?, &[&k, &v], 4e-6)
}

#[test]
fn refusals_keep_the_message() -> Result<()> {
    let zeros = |heads, dtype| Tensor::zeros((1, 4, heads, 8), dtype, &Device::Cpu);
    let (q, kv) = (zeros(3, DType::F32)?, zeros(2, DType::F32)?);
    let assert_refused = |o: Result<Tensor>, words: &str| {
        let error = o.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    assert_refused(flash_attn(&q, &kv, &kv, 1.0, false), "heads_q = 3");
    for zero in [0.0, -0.0] {
        assert_refused(flash_attn(&kv, &kv, &kv, zero, false), "scale = 0 would");
    }
    let wide = zeros(2, DType::F64)?;
    assert_refused(flash_attn(&wide, &wide, &wide, 1.0, false), "q holds F64");
    assert_refused(flash_attn(&kv, &kv, &zeros(2, DType::F16)?, 1.0, false), "v holds F16");
    let flat = kv.flatten(1, 2)?;
    assert_refused(flash_attn(&kv, &flat, &kv, 1.0, false), "k has shape [1, 8, 8]; give 4");

    // To the library 0 is a default.
    let none = kv.narrow(3, 0, 0)?;
    assert_refused(flash_attn(&kv, &kv, &none, 1.0, false), "heads of 0 elements; give at least 1");
    assert_refused(flash_attn(&none, &none, &kv, 1.0, false), "dim_qk = 0");
    let none = kv.narrow(2, 0, 0)?;
    assert_refused(flash_attn(&kv, &none, &none, 1.0, false), "0 heads; give at least 1");
    assert_refused(flash_attn(&none, &kv, &kv, 1.0, false), "heads_q = 0");

    let of = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let options = Attention::new(1.0);
    let sink = |sink: &Tensor| options.clone().sink(sink).forward(&kv, &kv, &kv);
    assert_refused(sink(&of(&[3], DType::F32)?), "sink holds 3 elements");
    assert_refused(sink(&of(&[1, 2], DType::F32)?), "sink holds F32 of shape [1, 2]");
    assert_refused(sink(&of(&[0], DType::F32)?), "sink holds F32 of shape [0]");
    let alibi = |slopes: &Tensor| options.clone().alibi(slopes).forward(&kv, &kv, &kv);
    assert_refused(alibi(&of(&[3, 2], DType::F32)?), "alibi_slopes");
    let tracked = Var::zeros(2, DType::F32, &Device::Cpu)?;
    assert_refused(alibi(&tracked), "alibi_slopes is tracked, and has no gradient");
    assert_refused(options.softcap(-1.0).forward(&kv, &kv, &kv), "softcap = -1");
    Ok(())
}
