//! The calls of mistral.rs's `flash_attn`, with candle-flash-attn's names.

use candle_core::{Device, Result, Tensor};

fn numbers(shape: (usize, usize, usize, usize)) -> Result<Tensor> {
    Tensor::arange(0f32, (shape.0 * shape.1 * shape.2 * shape.3) as f32, &Device::Cpu)?
        .sin()?
        .reshape(shape)
}

fn main() -> Result<()> {
    let (q, k, v) = (numbers((2, 5, 4, 16))?, numbers((2, 9, 2, 16))?, numbers((2, 9, 2, 16))?);
    let (scale, left, right, softcap) = (0.25, Some(6), Some(0), 4.0);
    let plain = candle_flash_attn::flash_attn_windowed(&q, &k, &v, scale, left, right)?;
    let capped = candle_flash_attn::flash_attn_alibi_windowed_softcap(
        &q, &k, &v, None, scale, left, right, softcap,
    )?;
    // The sequences are now packed.
    let ends = |length: u32| Tensor::new(&[0, length, 2 * length], &Device::Cpu);
    let (sums_q, sums_k) = (ends(5)?, ends(9)?);
    let (flat_q, flat_k, flat_v) = (q.flatten_to(1)?, k.flatten_to(1)?, v.flatten_to(1)?);
    let packed = candle_flash_attn::flash_attn_varlen_windowed(
        &flat_q, &flat_k, &flat_v, &sums_q, &sums_k, 5, 9, scale, left, right,
    )?;
    let packed_capped = candle_flash_attn::flash_attn_varlen_alibi_windowed_softcap(
        &flat_q, &flat_k, &flat_v, None, &sums_q, &sums_k, 5, 9, scale, left, right, softcap,
    )?;
    let most = |a: &Tensor, b: &Tensor| -> Result<f32> {
        (a.flatten_all()? - b.flatten_all()?)?.abs()?.max(0)?.to_scalar()
    };
    assert!(most(&plain, &packed)? < 1e-6 && most(&capped, &packed_capped)? < 1e-6);
    assert!(most(&plain, &capped)? > 1e-4);
    println!("candle-flash-attn by libflashattn: {:?}", plain.dims());
    Ok(())
}
