//! With a GPU: against a plain evaluation. Without one every test says so and passes.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use flashattn::half::f16;
use flashattn::{DescBuilder, Dtype};
use flashattn_cudarc::{Attention, Backward, Beside, Error, Forward, Tensor, TensorMut};

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

fn numbers(seed: u32) -> Vec<f16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..SIZE).map(|_| f16::from_f32(next())).collect()
}

/// o of sequence b, head h, query i; all keys visible below `keys`.
fn plain([q, k, v]: [&[f16]; 3], b: usize, h: usize, i: usize, keys: usize) -> Vec<f32> {
    let at = |row: usize| ((b * DIMS[1] + row) * DIMS[2] + h) * DIMS[3];
    let row =
        |x: &[f16], r: usize| x[at(r)..at(r) + 64].iter().map(|n| n.to_f32()).collect::<Vec<_>>();
    let query = row(q, i);
    let weights: Vec<f32> = (0..keys)
        .map(|j| (query.iter().zip(row(k, j)).map(|(x, y)| x * y).sum::<f32>() / 8.0).exp())
        .collect();
    let total: f32 = weights.iter().sum();
    let mut o = vec![0.0; 64];
    for (j, weight) in weights.iter().enumerate() {
        for (sum, value) in o.iter_mut().zip(row(v, j)) {
            *sum += weight / total * value;
        }
    }
    o
}

#[test]
fn forward_and_lengths() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let host = [numbers(1), numbers(2), numbers(3)];
    let [q, k, v] =
        [stream.clone_htod(&host[0])?, stream.clone_htod(&host[1])?, stream.clone_htod(&host[2])?];
    let attention = Attention::new(&stream, DescBuilder::new(Dtype::F16, 4, 64))?;
    let lens = stream.clone_htod(&[40i32, 7])?;
    for lengths in [[40, 40], [40, 7]] {
        let mut o = stream.alloc_zeros::<f16>(SIZE)?;
        let [q, k, v] = [&q, &k, &v].map(|x| Tensor::packed(x, DIMS));
        let call = Forward::new(q, k, v, TensorMut::packed(&mut o, DIMS));
        let beside =
            Beside { lens_kv: (lengths[1] == 7).then_some(&lens as _), ..Beside::default() };
        // SAFETY: no length is above 40.
        unsafe { attention.forward_with(&stream, call, &beside)? };
        let got = stream.clone_dtoh(&o)?;
        for (b, keys) in lengths.into_iter().enumerate() {
            let want = plain([&host[0], &host[1], &host[2]], b, 3, 17, keys);
            let first = ((b * DIMS[1] + 17) * DIMS[2] + 3) * DIMS[3];
            for (x, y) in got[first..first + 64].iter().zip(want) {
                assert!((x.to_f32() - y).abs() < 2e-3, "{x} {y}");
            }
        }
    }
    Ok(())
}

#[test]
fn backward_or_a_sentence() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let desc = DescBuilder::new(Dtype::F16, 4, 64).lse().backward();
    let attention = match Attention::new(&stream, desc) {
        Err(Error::Library(refused)) => {
            println!("skipped: {refused}");
            return Ok(());
        }
        other => other?,
    };
    let q = stream.clone_htod(&numbers(1))?;
    let t = Tensor::packed(&q, DIMS);
    let (mut o, mut lse) =
        (stream.alloc_zeros::<f16>(SIZE)?, stream.alloc_zeros::<f32>(2 * 4 * 40)?);
    let mut forward = Forward::new(t, t, t, TensorMut::packed(&mut o, DIMS));
    forward.lse = Some(&mut lse);
    attention.forward(&stream, forward)?;
    let mut grads =
        [stream.alloc_zeros::<f16>(SIZE)?, stream.alloc_zeros(SIZE)?, stream.alloc_zeros(SIZE)?];
    let [dq, dk, dv] = grads.each_mut().map(|x| TensorMut::packed(x, DIMS));
    let o = Tensor::packed(&o, DIMS);
    attention
        .backward(&stream, Backward { q: t, k: t, v: t, o, lse: &lse, dout: t, dq, dk, dv })?;
    assert!(grads.iter().all(|x| stream.clone_dtoh(x).unwrap().iter().any(|n| n.to_f32() != 0.0)));
    Ok(())
}

#[test]
fn a_short_slice_is_refused() -> Result<(), Error> {
    let Some(stream) = gpu() else { return Ok(()) };
    let attention = Attention::new(&stream, DescBuilder::new(Dtype::F16, 4, 64))?;
    let q = stream.alloc_zeros::<f16>(SIZE - 1)?;
    let mut o = stream.alloc_zeros::<f16>(SIZE)?;
    let t = Tensor::packed(&q, DIMS);
    let error = attention
        .forward(&stream, Forward::new(t, t, t, TensorMut::packed(&mut o, DIMS)))
        .unwrap_err();
    assert!(matches!(&error, Error::Argument("q", _)), "{error}");
    Ok(())
}
