//! Tensors on a GPU: values and gradients of each function beside the CPU's, which other tests compare
//! with the formula. Without a GPU every test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, Var,
};
use common::{numbers, var};
use flashattn_candle::*;

const SCALE: f32 = 0.125;

fn gpu() -> Option<Device> {
    if flashattn::device_count(flashattn::Device::CUDA).unwrap_or(0) == 0 {
        println!("skipped: libflashattn sees no GPU, or is built without CUDA");
        return None;
    }
    Some(Device::new_cuda(0).expect("candle's device"))
}

/// Hands its argument on, with this gradient.
struct Weighted(Tensor);

impl CustomOp1 for Weighted {
    fn name(&self) -> &'static str {
        "weighted"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

#[track_caller]
fn assert_near(name: &str, given: &Tensor, wanted: &Tensor, tolerance: f32) -> Result<()> {
    assert_eq!(given.dims(), wanted.dims(), "{name}");
    let given = given.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?;
    let (given, wanted) = (given.to_vec1::<f32>()?, wanted.flatten_all()?.to_vec1::<f32>()?);
    let most = wanted.iter().fold(0f32, |most, x| most.max(x.abs()));
    for (x, y) in given.iter().zip(&wanted) {
        assert!((x - y).abs() <= tolerance * most, "{name}: {x} for {y}, the largest {most}");
    }
    Ok(())
}

/// o, and with `backward` the gradients, of a function of (q, k, v, sink), on both devices.
#[track_caller]
fn compare(
    name: &str,
    tensors: &[Tensor; 3],
    dtype: DType,
    backward: bool,
    f: impl Fn(&[Tensor; 3], &Tensor, &Device) -> Result<Tensor>,
) -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let tolerance = if dtype == DType::F16 { 4e-3 } else { 3e-2 };
    let sink = numbers(4, 50)?;
    let mut results: Vec<Vec<Tensor>> = vec![];
    for device in [Device::Cpu, gpu] {
        let mut vars = vec![];
        for tensor in tensors.iter().chain([&sink]) {
            let mut tensor = tensor.clone();
            if vars.len() < 3 {
                tensor = tensor.to_dtype(dtype)?; // the same rounded numbers on both
                if device.is_cpu() {
                    tensor = tensor.to_dtype(DType::F32)?;
                }
            }
            vars.push(Var::from_tensor(&tensor.to_device(&device)?)?);
        }
        let inputs = [0, 1, 2].map(|n| match backward {
            true => vars[n].as_tensor().clone(),
            false => vars[n].as_detached_tensor(),
        });
        let sink =
            if backward { vars[3].as_tensor().clone() } else { vars[3].as_detached_tensor() };
        let o = f(&inputs, &sink, &device)?;
        let mut found = vec![o.clone()];
        if backward {
            let weight = numbers(o.shape().clone(), 99)?.to_dtype(dtype)?.to_dtype(o.dtype())?;
            let seeded = o.apply_op1(Weighted(weight.to_device(&device)?))?;
            let gradients = seeded.backward()?;
            found.extend(vars.iter().filter_map(|x| gradients.get(x).cloned()));
        }
        results.push(found);
    }
    assert_eq!(results[0].len(), results[1].len(), "{name}: gradients");
    for (n, (wanted, given)) in results[0].iter().zip(&results[1]).enumerate() {
        let what = ["o", "dq", "dk", "dv", "dsink"][n];
        assert_near(&format!("{name}: {what}"), given, wanted, tolerance)?;
    }
    Ok(())
}

fn tensors(q: impl Into<Shape>, kv: impl Into<Shape>) -> Result<[Tensor; 3]> {
    let kv = kv.into();
    Ok([numbers(q, 1)?, numbers(kv.clone(), 2)?, numbers(kv, 3)?])
}

fn slopes(device: &Device) -> Result<Tensor> {
    Tensor::new(&[0.5f32, 0.25, 0.125, 1.0], device)
}

#[test]
fn dense() -> Result<()> {
    let x = tensors((2, 37, 4, 64), (2, 50, 2, 64))?;
    for dtype in [DType::F16, DType::BF16] {
        compare("causal", &x, dtype, true, |[q, k, v], _, _| flash_attn(q, k, v, SCALE, true))?;
    }
    compare("full", &x, DType::F16, false, |[q, k, v], _, _| flash_attn(q, k, v, SCALE, false))?;
    compare("windowed", &x, DType::BF16, true, |[q, k, v], _, _| {
        flash_attn_windowed(q, k, v, SCALE, Some(9), Some(3))
    })?;
    compare("alibi", &x, DType::F16, true, |[q, k, v], _, device| {
        flash_attn_alibi(q, k, v, &slopes(device)?, SCALE, true)
    })?;
    compare("alibi, windowed", &x, DType::F16, false, |[q, k, v], _, device| {
        flash_attn_alibi_windowed(q, k, v, &slopes(device)?, SCALE, Some(11), Some(0))
    })?;
    compare("operation", &x, DType::F16, true, |[q, k, v], _, device| {
        let op = FlashAttn {
            softmax_scale: SCALE,
            alibi_slopes: Some(slopes(device)?),
            window_size_left: None,
            window_size_right: Some(0),
            softcap: None,
        };
        q.apply_op3(k, v, op)
    })?;
    compare("softcap", &x, DType::F16, true, |[q, k, v], _, _| {
        flash_attn_alibi_windowed_softcap(q, k, v, None, SCALE, None, Some(0), 5.0)
    })
}

#[test]
fn heads_to_512() -> Result<()> {
    for dim in [40, 256, 512] {
        let x = tensors((1, 19, 4, dim), (1, 33, 4, dim))?;
        let call =
            |[q, k, v]: &[Tensor; 3], _: &Tensor, _: &Device| flash_attn(q, k, v, 0.05, true);
        compare(&format!("dim {dim}"), &x, DType::BF16, dim <= 256, call)?;
    }
    Ok(())
}

#[test]
fn a_sink_and_its_gradient() -> Result<()> {
    let x = tensors((2, 21, 4, 64), (2, 30, 2, 64))?;
    compare("sink", &x, DType::BF16, true, |[q, k, v], sink, _| {
        Attention::new(SCALE).window(Some(12), Some(0)).sink(sink).forward(q, k, v)
    })
}

/// (batch, heads, seq, dim) in memory, from an offset, which nothing copies.
#[test]
fn strides() -> Result<()> {
    let x = tensors((2, 4, 23, 64), (2, 4, 23, 64))?;
    compare("strides", &x, DType::F16, false, |x, _, _| {
        let [q, k, v] = [&x[0], &x[1], &x[2]].map(|x| x.narrow(0, 1, 1)?.transpose(1, 2));
        flash_attn(&q?, &k?, &v?, SCALE, true)
    })
}

fn sums(of: &[u32], dtype: DType, device: &Device) -> Result<Tensor> {
    match dtype {
        DType::I32 => {
            let of: Vec<i32> = of.iter().map(|&n| n as i32).collect();
            Tensor::new(&of[..], device)
        }
        _ => Tensor::new(of, device),
    }
}

#[test]
fn varlen() -> Result<()> {
    let x = tensors((23, 4, 64), (31, 2, 64))?;
    for dtype in [DType::U32, DType::I32] {
        let ends = |device: &Device| -> Result<[Tensor; 2]> {
            Ok([sums(&[0, 9, 10, 23], dtype, device)?, sums(&[0, 9, 17, 31], dtype, device)?])
        };
        compare("varlen", &x, DType::F16, true, |[q, k, v], _, device| {
            let [sq, sk] = ends(device)?;
            flash_attn_varlen(q, k, v, &sq, &sk, 13, 14, SCALE, true)
        })?;
        compare("varlen, windowed", &x, DType::BF16, true, |[q, k, v], _, device| {
            let [sq, sk] = ends(device)?;
            flash_attn_varlen_windowed(q, k, v, &sq, &sk, 13, 14, SCALE, Some(5), Some(0))
        })?;
        compare("varlen, alibi", &x, DType::F16, false, |[q, k, v], _, device| {
            let ([sq, sk], slopes) = (ends(device)?, slopes(device)?);
            flash_attn_varlen_alibi_windowed_softcap(
                q,
                k,
                v,
                Some(&slopes),
                &sq,
                &sk,
                13,
                14,
                SCALE,
                None,
                Some(0),
                3.0,
            )
        })?;
    }
    Ok(())
}

#[test]
fn paged() -> Result<()> {
    const PAGE: usize = 32;
    let x = tensors((4, 4, 64), (3, PAGE, 2, 64))?;
    for dtype in [DType::U32, DType::I32] {
        compare("paged", &x, DType::F16, false, |[q, k, v], _, device| {
            let (sq, sk) = (sums(&[0, 3, 4], dtype, device)?, sums(&[0, 40, 61], dtype, device)?);
            let table = sums(&[2, 0, 1, 0], dtype, device)?.reshape((2, 2))?;
            flash_attn_varlen_paged_windowed(
                q,
                k,
                v,
                &sq,
                &sk,
                &table,
                None,
                3,
                40,
                SCALE,
                None,
                Some(0),
                PAGE,
                None,
            )
        })?;
    }
    Ok(())
}

#[test]
fn refusals() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let here = numbers((1, 4, 2, 64), 1)?.to_dtype(DType::F16)?;
    let there = here.to_device(&gpu)?;
    let assert_refused = |o: Result<Tensor>, words: &str| {
        let error = o.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    let sink = var(2, 1)?;
    let options = Attention::new(SCALE).sink(&sink);
    assert_refused(options.forward(&there, &there, &there), "sink is on Cpu");
    let narrow = there.narrow(2, 0, 1)?;
    assert_refused(flash_attn(&narrow, &there, &there, SCALE, false), "heads_q = 1");
    assert!(flash_attn(&there, &here, &there, SCALE, false).is_err());
    Ok(())
}
