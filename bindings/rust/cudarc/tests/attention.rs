//! With a GPU: against a plain evaluation. Without one every test says so and passes.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use flashattn::half::f16;
use flashattn::{
    AppendInputs, AppendOutput, Array, ArrayMut, DescBuilder, Dtype, Element, Gradients, Inputs,
    Output, Part, QuantizeInputs, QuantizeOutput, Upstream, View, ViewMut, F8E4M3,
};
use flashattn_cudarc::{Attention, Error};

const DIMS: [usize; 4] = [2, 40, 4, 64];
const SIZE: usize = 2 * 40 * 4 * 64;

/// A stream of the first GPU that both the driver and the library see.
fn gpu() -> Option<Arc<CudaStream>> {
    if flashattn::device_count(flashattn::Device::CUDA).unwrap_or(0) == 0 {
        println!("skipped: libflashattn sees no GPU, or is built without CUDA");
        return None;
    }
    CudaContext::new(0).ok()?.new_stream().ok()
}

/// A plan, or nothing where the device's kernels do not compute it.
fn plan(stream: &Arc<CudaStream>, desc: DescBuilder) -> Result<Option<Attention>, Error> {
    match Attention::new(stream, desc) {
        Err(Error::Library(refused)) => {
            println!("skipped: {refused}");
            Ok(None)
        }
        other => other.map(Some),
    }
}

fn numbers(seed: u32) -> Vec<f16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..SIZE).map(|_| f16::from_f32(next())).collect()
}

/// o of sequence b, head h, query i, of the keys in a range, with a bias for each.
fn plain(
    [q, k, v]: [&[f16]; 3],
    [b, h, i]: [usize; 3],
    keys: std::ops::Range<usize>,
    bias: &[f32],
) -> Vec<f32> {
    let at = |row: usize| ((b * DIMS[1] + row) * DIMS[2] + h) * DIMS[3];
    let row =
        |x: &[f16], r: usize| x[at(r)..at(r) + 64].iter().map(|n| n.to_f32()).collect::<Vec<_>>();
    let query = row(q, i);
    let score = |j: usize| query.iter().zip(row(k, j)).map(|(x, y)| x * y).sum::<f32>() / 8.0;
    let weights: Vec<f32> = keys.clone().map(|j| (score(j) + bias[j]).exp()).collect();
    let total: f32 = weights.iter().sum();
    let mut o = vec![0.0; 64];
    for (j, weight) in keys.zip(&weights) {
        for (sum, value) in o.iter_mut().zip(row(v, j)) {
            *sum += weight / total * value;
        }
    }
    o
}

#[track_caller]
fn assert_row(got: &[f16], at: [usize; 3], want: &[f32]) {
    let [b, h, i] = at;
    let first = ((b * DIMS[1] + i) * DIMS[2] + h) * DIMS[3];
    for (x, y) in got[first..first + 64].iter().zip(want) {
        assert!((x.to_f32() - y).abs() < 2e-3, "{x} {y}");
    }
}

#[test]
fn forward_and_lengths() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let host = [numbers(1), numbers(2), numbers(3)];
    let [q, k, v] =
        [stream.clone_htod(&host[0])?, stream.clone_htod(&host[1])?, stream.clone_htod(&host[2])?];
    let attention = Attention::new(&stream, DescBuilder::new(Dtype::F16, 4, 64))?;
    let (lens, starts) = (stream.clone_htod(&[40i32, 7])?, stream.clone_htod(&[3i32, 0])?);
    for short in [false, true] {
        let mut o = stream.alloc_zeros::<f16>(SIZE)?;
        attention.forward(&stream, |on| {
            let [q, k, v] = [on.view(&q, DIMS)?, on.view(&k, DIMS)?, on.view(&v, DIMS)?];
            let mut inputs = Inputs::new(q, k, v);
            if short {
                inputs = inputs.lens_kv(on.array(&lens)).starts_kv(on.array(&starts));
            }
            Ok((inputs, Output::new(on.view_mut(&mut o, DIMS)?)))
        })?;
        let got = stream.clone_dtoh(&o)?;
        for (b, keys) in [3..40, 0..7].into_iter().enumerate() {
            let (at, keys) = ([b, 3, 17], if short { keys } else { 0..40 });
            let want = plain([&host[0], &host[1], &host[2]], at, keys, &[0.0; 40]);
            assert_row(&got, at, &want);
        }
    }
    Ok(())
}

#[test]
fn bias_and_block_mask() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let host = numbers(1);
    let q = stream.clone_htod(&host)?;
    // One row for all: key j gets -j / 4; the block mask hides keys from 32 on.
    let row: Vec<f32> = (0..40).map(|j| j as f32 / -4.0).collect();
    let (bias, blocks) = (stream.clone_htod(&row)?, stream.clone_htod(&[1u8, 0])?);
    let desc = DescBuilder::new(Dtype::F16, 4, 64).bias(Dtype::F32).blocks(64, 32);
    let Some(attention) = plan(&stream, desc)? else { return Ok(()) };
    let mut o = stream.alloc_zeros::<f16>(SIZE)?;
    attention.forward(&stream, |on| {
        let q = on.view(&q, DIMS)?;
        let inputs = Inputs::new(q, q, q)
            .bias(on.array(&bias).dims([1, 1, 1, 40]))
            .block_mask(on.array(&blocks).dims([1, 1, 1, 2]));
        Ok((inputs, Output::new(on.view_mut(&mut o, DIMS)?)))
    })?;
    let got = stream.clone_dtoh(&o)?;
    let want = plain([&host, &host, &host], [1, 2, 9], 0..32, &row);
    assert_row(&got, [1, 2, 9], &want);
    Ok(())
}

#[test]
fn gradients() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let desc = DescBuilder::new(Dtype::F16, 4, 64).bias(Dtype::F32).sink().backward();
    let Some(attention) = plan(&stream, desc.dbias().dsink().dlse())? else { return Ok(()) };
    let q = stream.clone_htod(&numbers(1))?;
    let (bias, sink) = (stream.alloc_zeros::<f32>(40 * 40)?, stream.alloc_zeros::<f32>(4)?);
    let (mut o, mut lse) =
        (stream.alloc_zeros::<f16>(SIZE)?, stream.alloc_zeros::<f32>(2 * 4 * 40)?);
    let dlse = stream.clone_htod(&vec![1f32; 2 * 4 * 40])?;
    fn bias_of(bias: Array<'_, f32>) -> Array<'_, f32> {
        bias.dims([1, 1, 40, 40])
    }
    attention.forward(&stream, |on| {
        let x = on.view(&q, DIMS)?;
        let inputs = Inputs::new(x, x, x).bias(bias_of(on.array(&bias))).sink(on.array(&sink));
        let output = Output::new(on.view_mut(&mut o, DIMS)?).lse(on.array_mut(&mut lse));
        Ok((inputs, output))
    })?;
    let mut grads =
        [stream.alloc_zeros::<f16>(SIZE)?, stream.alloc_zeros(SIZE)?, stream.alloc_zeros(SIZE)?];
    let (mut dbias, mut dsink) = (stream.alloc_zeros::<f32>(1600)?, stream.alloc_zeros::<f32>(4)?);
    let [dq, dk, dv] = &mut grads;
    attention.backward(&stream, |on| {
        let x = on.view(&q, DIMS)?;
        let inputs = Inputs::new(x, x, x).bias(bias_of(on.array(&bias))).sink(on.array(&sink));
        let upstream = Upstream::new(on.view(&o, DIMS)?, on.array(&lse), x).dlse(on.array(&dlse));
        let gradients =
            Gradients::new(on.view_mut(dq, DIMS)?, on.view_mut(dk, DIMS)?, on.view_mut(dv, DIMS)?)
                .dbias(ArrayMut::dims(on.array_mut(&mut dbias), [1, 1, 40, 40]))
                .dsink(on.array_mut(&mut dsink));
        Ok((inputs, upstream, gradients))
    })?;
    assert!(grads.iter().all(|x| stream.clone_dtoh(x).unwrap().iter().any(|n| n.to_f32() != 0.0)));
    for written in [&dbias, &dsink] {
        assert!(stream.clone_dtoh(written)?.iter().any(|&n| n != 0.0));
    }
    Ok(())
}

#[test]
fn parts_merge_into_the_whole() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let attention = Attention::new(&stream, DescBuilder::new(Dtype::F16, 4, 64).lse())?;
    let q = stream.clone_htod(&numbers(1))?;
    let lens = [stream.clone_htod(&[13i32, 13])?, stream.clone_htod(&[40i32, 40])?];
    let starts = [stream.clone_htod(&[0i32, 0])?, stream.clone_htod(&[13i32, 13])?];
    let none = || -> Result<_, Error> {
        Ok((stream.alloc_zeros::<f16>(SIZE)?, stream.alloc_zeros::<f32>(2 * 4 * 40)?))
    };
    let (mut first, mut second, mut whole, mut merged) = (none()?, none()?, none()?, none()?);
    for (n, (o, lse)) in [&mut first, &mut second, &mut whole].into_iter().enumerate() {
        attention.forward(&stream, |on| {
            let x = on.view(&q, DIMS)?;
            let mut inputs = Inputs::new(x, x, x);
            if n < 2 {
                inputs = inputs.lens_kv(on.array(&lens[n])).starts_kv(on.array(&starts[n]));
            }
            Ok((inputs, Output::new(on.view_mut(o, DIMS)?).lse(on.array_mut(lse))))
        })?;
    }
    attention.merge(&stream, |on| {
        let mut parts = Vec::new();
        for (o, lse) in [&first, &second] {
            parts.push(Part::new(on.view(o, DIMS)?, on.array(lse)));
        }
        let output = Output::new(on.view_mut(&mut merged.0, DIMS)?);
        Ok((parts, output.lse(on.array_mut(&mut merged.1))))
    })?;
    let (got, want) = (stream.clone_dtoh(&merged.0)?, stream.clone_dtoh(&whole.0)?);
    assert!(got.iter().zip(&want).all(|(a, b)| (a.to_f32() - b.to_f32()).abs() < 4e-3));
    let (got, want) = (stream.clone_dtoh(&merged.1)?, stream.clone_dtoh(&whole.1)?);
    assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-4));
    Ok(())
}

#[test]
fn new_tokens_enter_a_cache() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let attention = Attention::new(&stream, DescBuilder::new(Dtype::F16, 4, 64))?;
    let host = numbers(1);
    let cache_dims = [2, 60, 4, 64];
    let (k, mut lens) = (stream.clone_htod(&host)?, stream.clone_htod(&[5i32, 20])?);
    let mut q = stream.clone_htod(&host)?;
    let mut k_cache = stream.alloc_zeros::<f16>(2 * 60 * 4 * 64)?;
    let mut v_cache = stream.alloc_zeros::<f16>(2 * 60 * 4 * 64)?;
    attention.append_kv(&stream, |on| {
        let k = on.view(&k, DIMS)?;
        let caches =
            [on.view_mut(&mut k_cache, cache_dims)?, on.view_mut(&mut v_cache, cache_dims)?];
        let [k_cache, v_cache] = caches;
        let output = AppendOutput::new(k_cache, v_cache)
            .q_in_place(on.view_mut(&mut q, DIMS)?)
            .lens_in_place(on.array_mut(&mut lens));
        Ok((AppendInputs::new(k, k).rotary(10000.0, 64), output))
    })?;
    assert_eq!(stream.clone_dtoh(&lens)?, [45, 60]);
    let (k_cache, v_cache) = (stream.clone_dtoh(&k_cache)?, stream.clone_dtoh(&v_cache)?);
    let rotated = stream.clone_dtoh(&q)?;
    for (b, first) in [5, 20].into_iter().enumerate() {
        let (tokens, row) = (b * 40 * 256..(b + 1) * 40 * 256, (b * 60 + first) * 256);
        assert_eq!(v_cache[row..row + 40 * 256], host[tokens.clone()]);
        // q, k and their heads alike: q of a token is its k.
        assert_eq!(k_cache[row..row + 40 * 256], rotated[tokens.clone()]);
        assert!(v_cache[b * 60 * 256..row].iter().all(|x| x.to_f32() == 0.0));
        let (x, y) = (host[tokens.start].to_f32(), host[tokens.start + 32].to_f32());
        let angle = first as f32;
        let turned = x * angle.cos() - y * angle.sin();
        assert!((k_cache[row].to_f32() - turned).abs() < 2e-3);
    }
    Ok(())
}

/// Written by append_kv, whose descales are 1, and read beside queries of 16 bits.
#[test]
fn a_cache_of_8_bits() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let desc = DescBuilder::new(Dtype::F16, 4, 64).dtype_kv(Dtype::F8E4M3);
    let Some(attention) = plan(&stream, desc)? else { return Ok(()) };
    let host = [numbers(1), numbers(2), numbers(3)];
    let [q, k, v] =
        [stream.clone_htod(&host[0])?, stream.clone_htod(&host[1])?, stream.clone_htod(&host[2])?];
    let mut lens = stream.clone_htod(&[0i32, 0])?;
    let (mut k_cache, mut v_cache) =
        (stream.alloc_zeros::<u8>(SIZE)?, stream.alloc_zeros::<u8>(SIZE)?);
    attention.append_kv(&stream, |on| {
        let caches = [on.view_e4m3_mut(&mut k_cache, DIMS)?, on.view_e4m3_mut(&mut v_cache, DIMS)?];
        let [k_cache, v_cache] = caches;
        let output = AppendOutput::new(k_cache, v_cache).lens_in_place(on.array_mut(&mut lens));
        Ok((AppendInputs::new(on.view(&k, DIMS)?, on.view(&v, DIMS)?), output))
    })?;
    assert_eq!(stream.clone_dtoh(&lens)?, [40, 40]);
    let mut o = stream.alloc_zeros::<f16>(SIZE)?;
    attention.forward(&stream, |on| {
        let (k, v) = (on.view_e4m3(&k_cache, DIMS)?, on.view_e4m3(&v_cache, DIMS)?);
        let inputs = Inputs::new(on.view(&q, DIMS)?, k, v).lens_kv(on.array(&lens));
        Ok((inputs, Output::new(on.view_mut(&mut o, DIMS)?)))
    })?;
    let [k, v] = [&host[1], &host[2]].map(|x| {
        x.iter().map(|n| f16::from_f32(F8E4M3::from_f32(n.to_f32()).to_f32())).collect::<Vec<_>>()
    });
    let got = stream.clone_dtoh(&o)?;
    for at in [[0, 0, 0], [1, 3, 17]] {
        assert_row(&got, at, &plain([&host[0], &k, &v], at, 0..40, &[0.0; 40]));
    }
    Ok(())
}

/// The CPU writes the same bits.
#[test]
fn quantized() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let desc = || DescBuilder::new(Dtype::F16, 4, 64).dtype_kv(Dtype::F8E4M3).descale_block(16);
    let Some(attention) = plan(&stream, desc())? else { return Ok(()) };
    let host = numbers(2);
    let k = stream.clone_htod(&host)?;
    let mut out = stream.alloc_zeros::<u8>(SIZE)?;
    let mut descale = stream.alloc_zeros::<f32>(2 * 4 * 3)?;
    attention.quantize(&stream, |on| {
        let output = QuantizeOutput::<f16, F8E4M3>::new()
            .k(on.view_e4m3_mut(&mut out, DIMS)?)
            .descale_k(on.array_mut(&mut descale));
        Ok((QuantizeInputs::new().k(on.view(&k, DIMS)?), output))
    })?;
    let (mut wanted, mut factors) = (vec![F8E4M3(0); SIZE], [0f32; 2 * 4 * 3]);
    desc().build()?.quantize(
        &QuantizeInputs::new().k(View::new(&host, DIMS)?),
        QuantizeOutput::<f16, F8E4M3>::new()
            .k(ViewMut::new(&mut wanted, DIMS)?)
            .descale_k(&mut factors),
    )?;
    assert_eq!(stream.clone_dtoh(&descale)?, factors);
    assert!(stream.clone_dtoh(&out)?.iter().zip(&wanted).all(|(x, y)| *x == y.0));
    Ok(())
}

#[test]
fn a_short_slice_is_refused() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let attention = Attention::new(&stream, DescBuilder::new(Dtype::F16, 4, 64))?;
    let q = stream.alloc_zeros::<f16>(SIZE - 1)?;
    let mut o = stream.alloc_zeros::<f16>(SIZE)?;
    let error = attention
        .forward(&stream, |on| {
            let q = on.view(&q, DIMS)?;
            Ok((Inputs::new(q, q, q), Output::new(on.view_mut(&mut o, DIMS)?)))
        })
        .unwrap_err();
    assert!(matches!(&error, Error::Argument(_)), "{error}");
    Ok(())
}
