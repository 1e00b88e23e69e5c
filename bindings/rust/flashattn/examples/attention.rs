//! Causal attention on slices, with grouped heads and the lse. `cargo run --example attention`

use flashattn::{DescBuilder, Dtype, Inputs, Op, Output, Sizes, View, ViewMut, Workspace};

fn main() -> Result<(), flashattn::Error> {
    let (batch, seq, heads, heads_kv, dim) = (2, 77, 8, 2, 64);
    let wave = |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
    let q = wave(batch * seq * heads * dim, 0.37);
    let k = wave(batch * seq * heads_kv * dim, 0.71);
    let v = wave(batch * seq * heads_kv * dim, 0.13);
    let (mut o, mut lse) = (vec![0f32; q.len()], vec![0f32; batch * heads * seq]);

    let plan =
        DescBuilder::new(Dtype::F32, heads, dim).heads_kv(heads_kv).causal().lse().build()?;
    let sizes = Sizes { batch, seqlen_q: seq, seqlen_kv: seq, ..Sizes::default() };
    let info = plan.info(Op::FORWARD, Some(&sizes))?;
    println!("{} on {}: {}", info.kernel, info.isa, info.why);

    let inputs = Inputs::new(
        View::new(&q, [batch, seq, heads, dim])?,
        View::new(&k, [batch, seq, heads_kv, dim])?,
        View::new(&v, [batch, seq, heads_kv, dim])?,
    );
    let output = Output::new(ViewMut::new(&mut o, [batch, seq, heads, dim])?).lse(&mut lse);
    plan.forward(&inputs, output, &mut Workspace::new())?;

    // The first query sees the first key only, and takes its value.
    assert!(o[..dim].iter().zip(&v[..dim]).all(|(o, v)| (o - v).abs() < 1e-6));
    println!("o[0, 0, 0, ..4] = {:.4?}, lse[0, 0, ..4] = {:.4?}", &o[..4], &lse[..4]);

    let error = DescBuilder::new(Dtype::F32, 8, 64).heads_kv(3).build().unwrap_err();
    println!("refused ({:?}, {}): {error}", error.reason, error.field);
    Ok(())
}
