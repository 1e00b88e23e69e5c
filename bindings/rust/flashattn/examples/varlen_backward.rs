//! Three sequences of different lengths in one row of tokens, forward and backward, in bfloat16.
//! `cargo run --example varlen_backward`

use flashattn::half::bf16;
use flashattn::{
    DescBuilder, Dtype, Gradients, Inputs, Output, Upstream, View, ViewMut, Workspace,
};

fn main() -> Result<(), flashattn::Error> {
    let (heads, dim) = (4, 32);
    let cu_seqlens = [0, 5, 5 + 17, 5 + 17 + 9]; // where sequences start, and the end
    let tokens = 31;
    let dims = [tokens, heads, dim];
    let wave = |step: f32| -> Vec<bf16> {
        (0..tokens * heads * dim).map(|i| bf16::from_f32((i as f32 * step).sin())).collect()
    };
    let (q, k, v, dout) = (wave(0.37), wave(0.71), wave(0.13), wave(0.91));
    let zeros = || vec![bf16::ZERO; q.len()];
    let (mut o, mut dq, mut dk, mut dv) = (zeros(), zeros(), zeros(), zeros());
    let mut lse = vec![0f32; heads * tokens];

    let plan = DescBuilder::new(Dtype::BF16, heads, dim).varlen().causal().backward().build()?;
    let mut workspace = Workspace::new();
    let inputs = Inputs::new(View::new(&q, dims)?, View::new(&k, dims)?, View::new(&v, dims)?)
        .cu_seqlens_q(&cu_seqlens)
        .cu_seqlens_kv(&cu_seqlens);
    let output = Output::new(ViewMut::new(&mut o, dims)?).lse(&mut lse);
    plan.forward(&inputs, output, &mut workspace)?;

    let upstream = Upstream::new(View::new(&o, dims)?, &lse, View::new(&dout, dims)?);
    let gradients = Gradients::new(
        ViewMut::new(&mut dq, dims)?,
        ViewMut::new(&mut dk, dims)?,
        ViewMut::new(&mut dv, dims)?,
    );
    plan.backward(&inputs, &upstream, gradients, &mut workspace)?;

    // A first query sees one key: its weight is 1 whatever q is, so its gradient is 0.
    for &start in &cu_seqlens[..3] {
        let first = start as usize * heads * dim;
        assert!(dq[first..first + heads * dim].iter().all(|x| x.to_f32().abs() < 1e-2));
    }
    let norm = |x: &[bf16]| x.iter().map(|x| x.to_f32().powi(2)).sum::<f32>().sqrt();
    println!("|dq| = {:.3}, |dk| = {:.3}, |dv| = {:.3}", norm(&dq), norm(&dk), norm(&dv));
    Ok(())
}
