//! The functions that candle-flash-attn has, too: their masks, biases and layouts.

mod common;

use candle_core::{Device, IndexOp, Result, Tensor};
use common::{assert_near, assert_same, attention, numbers, var, Scores};
use flashattn_candle::*;

const SCALE: f32 = 0.25;
const WINDOWS: [(Option<usize>, Option<usize>); 5] =
    [(None, None), (None, Some(0)), (Some(5), Some(0)), (Some(3), Some(4)), (Some(7), None)];

fn how(window: (Option<usize>, Option<usize>)) -> Scores<'static> {
    Scores { scale: f64::from(SCALE), window, ..Scores::default() }
}

#[test]
fn dense() -> Result<()> {
    let (q, k, v) = (var((2, 13, 4, 16), 1)?, var((2, 17, 2, 16), 2)?, var((2, 17, 2, 16), 3)?);
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 1.0], &Device::Cpu)?;
    let all = [&q, &k, &v];
    for (left, right) in WINDOWS {
        let plain = how((left, right));
        let sloped = Scores { slopes: Some(&slopes), ..plain };
        let capped = Scores { softcap: 2.0, ..plain };
        let both = Scores { softcap: 2.0, ..sloped };
        let wanted = |how| attention(&q, &k, &v, how);
        let o = flash_attn_windowed(&q, &k, &v, SCALE, left, right)?;
        assert_same(&o, &wanted(&plain)?, &all, 4e-6)?;
        let o = flash_attn_alibi_windowed(&q, &k, &v, &slopes, SCALE, left, right)?;
        assert_same(&o, &wanted(&sloped)?, &all, 4e-6)?;
        for (slopes, how) in [(None, &capped), (Some(&slopes), &both)] {
            let o = flash_attn_alibi_windowed_softcap(&q, &k, &v, slopes, SCALE, left, right, 2.0)?;
            assert_same(&o, &wanted(how)?, &all, 4e-6)?;
        }
    }
    for causal in [false, true] {
        let how = Scores { slopes: Some(&slopes), ..how((None, causal.then_some(0))) };
        let o = flash_attn_alibi(&q, &k, &v, &slopes, SCALE, causal)?;
        assert_same(&o, &attention(&q, &k, &v, &how)?, &all, 4e-6)?;
    }
    // Slopes of each sequence.
    let each = Tensor::stack(&[&slopes, &(&slopes * 2.0)?], 0)?;
    let o = Attention::new(SCALE).alibi(&each).forward(&q, &k, &v)?;
    for b in 0..2 {
        let (q, k, v, slopes) = (q.i(b..=b)?, k.i(b..=b)?, v.i(b..=b)?, each.i(b)?);
        let how = Scores { slopes: Some(&slopes), ..how((None, None)) };
        assert_near(&o.i(b..=b)?, &attention(&q, &k, &v, &how)?, 4e-6)?;
    }
    Ok(())
}

#[test]
fn operation() -> Result<()> {
    let (q, k, v) = (var((2, 13, 4, 16), 1)?, var((2, 17, 2, 16), 2)?, var((2, 17, 2, 16), 3)?);
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 1.0], &Device::Cpu)?;
    let op = FlashAttn {
        softmax_scale: SCALE,
        alibi_slopes: Some(slopes.clone()),
        window_size_left: Some(5),
        window_size_right: Some(0),
        softcap: Some(2.0),
    };
    let all = Scores { slopes: Some(&slopes), softcap: 2.0, ..how((Some(5), Some(0))) };
    let o = q.apply_op3(&k, &v, op.clone())?;
    assert_same(&o, &attention(&q, &k, &v, &all)?, &[&q, &k, &v], 4e-6)?;
    let plain = FlashAttn { alibi_slopes: None, window_size_left: None, softcap: None, ..op };
    let o = q.apply_op3(&k, &v, plain.clone())?;
    assert_same(&o, &flash_attn(&q, &k, &v, SCALE, true)?, &[&q, &k, &v], 4e-6)?;
    let flat = q.flatten_to(1)?;
    let error = flat.apply_op3(&flat, &flat, plain).unwrap_err();
    assert!(error.to_string().contains("made for (batch, seq, heads, dim)"), "{error}");
    Ok(())
}

/// The attention of packed sequences, one after another.
fn each_sequence([q, k, v]: [&Tensor; 3], ends: [&[u32]; 2], how: &Scores<'_>) -> Result<Tensor> {
    let mut all = vec![];
    for n in 0..ends[0].len() - 1 {
        let part = |x: &Tensor, ends: &[u32]| {
            let (begin, end) = (ends[n] as usize, ends[n + 1] as usize);
            x.narrow(0, begin, end - begin)?.unsqueeze(0)
        };
        let (q, k, v) = (part(q, ends[0])?, part(k, ends[1])?, part(v, ends[1])?);
        all.push(attention(&q, &k, &v, how)?.squeeze(0)?);
    }
    Tensor::cat(&all, 0)
}

#[test]
fn varlen() -> Result<()> {
    let (q, k, v) = (var((23, 4, 16), 4)?, var((31, 2, 16), 5)?, var((31, 2, 16), 6)?);
    let ends: [&[u32]; 2] = [&[0, 9, 10, 23], &[0, 9, 17, 31]];
    let (sq, sk) = (Tensor::new(ends[0], &Device::Cpu)?, Tensor::new(ends[1], &Device::Cpu)?);
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 1.0], &Device::Cpu)?;
    let (all, max_q, max_k) = ([&q, &k, &v], 13, 14);
    let arrays = [q.as_tensor(), k.as_tensor(), v.as_tensor()];
    for (left, right) in WINDOWS {
        let plain = how((left, right));
        let sloped = Scores { slopes: Some(&slopes), ..plain };
        let capped = Scores { softcap: 2.0, ..plain };
        let both = Scores { softcap: 2.0, ..sloped };
        let o = flash_attn_varlen_windowed(&q, &k, &v, &sq, &sk, max_q, max_k, SCALE, left, right)?;
        assert_same(&o, &each_sequence(arrays, ends, &plain)?, &all, 4e-6)?;
        let o = flash_attn_varlen_alibi_windowed(
            &q, &k, &v, &slopes, &sq, &sk, max_q, max_k, SCALE, left, right,
        )?;
        assert_same(&o, &each_sequence(arrays, ends, &sloped)?, &all, 4e-6)?;
        for (slopes, how) in [(None, &capped), (Some(&slopes), &both)] {
            let o = flash_attn_varlen_alibi_windowed_softcap(
                &q, &k, &v, slopes, &sq, &sk, max_q, max_k, SCALE, left, right, 2.0,
            )?;
            assert_same(&o, &each_sequence(arrays, ends, how)?, &all, 4e-6)?;
        }
    }
    for causal in [false, true] {
        let plain = how((None, causal.then_some(0)));
        let o = flash_attn_varlen(&q, &k, &v, &sq, &sk, max_q, max_k, SCALE, causal)?;
        assert_same(&o, &each_sequence(arrays, ends, &plain)?, &all, 4e-6)?;
        let sloped = Scores { slopes: Some(&slopes), ..plain };
        let o =
            flash_attn_varlen_alibi(&q, &k, &v, &slopes, &sq, &sk, max_q, max_k, SCALE, causal)?;
        assert_same(&o, &each_sequence(arrays, ends, &sloped)?, &all, 4e-6)?;
    }
    // A sink of packed sequences; lengths of 64 bits.
    let sink = var(4, 7)?;
    let (sq, sk) = (sq.to_dtype(candle_core::DType::I64)?, sk.to_dtype(candle_core::DType::I64)?);
    let (seqlens_q, seqlens_k) = (&sq, &sk);
    let varlen = Varlen {
        seqlens_q,
        seqlens_k,
        max_seqlen_q: max_q,
        max_seqlen_k: max_k,
        block_table: None,
    };
    let o = Attention::new(SCALE).causal().sink(&sink).forward_varlen(&q, &k, &v, &varlen)?;
    let how = Scores { sink: Some(&sink), ..how((None, Some(0))) };
    assert_same(&o, &each_sequence(arrays, ends, &how)?, &[&q, &k, &v, &sink], 4e-6)
}

#[test]
fn paged() -> Result<()> {
    const PAGE: usize = 32;
    let ends: [&[u32]; 2] = [&[0, 3, 4], &[0, 40, 61]];
    let (sq, sk) = (Tensor::new(ends[0], &Device::Cpu)?, Tensor::new(ends[1], &Device::Cpu)?);
    let q = numbers((4, 4, 16), 8)?;
    let pool = |seed| numbers((3, PAGE, 2, 16), seed);
    let (k, v) = (pool(9)?, pool(10)?);
    let table = Tensor::new(&[[2u32, 0], [1, 0]], &Device::Cpu)?;
    let packed = |pool: &Tensor| -> Result<Tensor> {
        let rows = |page: usize, n: usize| pool.i((page, 0..n));
        Tensor::cat(&[rows(2, PAGE)?, rows(0, 8)?, rows(1, 21)?], 0)
    };
    let call = |q: &Tensor, ranges, page, left, right, softcap| {
        flash_attn_varlen_paged_windowed(
            q, &k, &v, &sq, &sk, &table, ranges, 3, 40, SCALE, left, right, page, softcap,
        )
    };
    for ((left, right), softcap) in
        WINDOWS.into_iter().zip([None, Some(2.0), None, None, Some(9.0)])
    {
        let how = Scores { softcap: f64::from(softcap.unwrap_or(0.0)), ..how((left, right)) };
        let wanted = each_sequence([&q, &packed(&k)?, &packed(&v)?], ends, &how)?;
        assert_near(&call(&q, None, PAGE, left, right, softcap)?, &wanted, 4e-6)?;
    }
    let assert_refused = |o: Result<Tensor>, words: &str| {
        let error = o.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    assert_refused(call(&q, Some(&table), PAGE, None, None, None), "mm_prefix_ranges is given");
    assert_refused(call(&q, None, 16, None, None, None), "page_block_size = 16, but k has 32");
    let tracked = candle_core::Var::from_tensor(&q)?;
    assert_refused(call(&tracked, None, PAGE, None, None, None), "PAGED_KV");
    Ok(())
}

#[test]
fn lengths_that_are_refused() -> Result<()> {
    let x = numbers((6, 2, 8), 11)?;
    let call = |sq: &Tensor, sk: &Tensor, max: usize| {
        flash_attn_varlen(&x, &x, &x, sq, sk, max, max, SCALE, false)
    };
    let ends = |ends: &[u32]| Tensor::new(ends, &Device::Cpu);
    let assert_refused = |o: Result<Tensor>, words: &str| {
        let error = o.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    let whole = ends(&[0, 2, 6])?;
    assert!(call(&whole, &whole, 4).is_ok());
    assert_refused(
        call(&whole, &ends(&[0, 6])?, 6),
        "seqlens_k has 2 elements and seqlens_q has 3",
    );
    assert_refused(call(&whole, &whole, 3), "seqlen_q");
    assert_refused(call(&ends(&[0, 2, 7])?, &whole, 6), "cu_seqlens_q");
    assert_refused(call(&ends(&[0, 2, 1 << 31])?, &whole, 6), "seqlens_q holds 2147483648");
    let floats = Tensor::new(&[0f32, 2.0, 6.0], &Device::Cpu)?;
    assert_refused(call(&floats, &whole, 4), "seqlens_q holds F32");
    assert_refused(
        call(&Tensor::zeros(0, candle_core::DType::U32, &Device::Cpu)?, &whole, 4),
        "seqlens",
    );
    Ok(())
}
