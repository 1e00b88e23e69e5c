//! Arrays of 8 bits: the numbers that elements and descales mean, a cache beside wider queries,
//! results of 8 bits, gradients of 16 and 32.

mod common;

use common::{assert_near, numbers};
use flashattn::{
    AppendInputs, AppendOutput, Array, DescBuilder, Dtype, Element, Gradients, Inputs, Output,
    Plan, Upstream, View, ViewMut, Workspace, F8E4M3,
};

const DIMS: [usize; 4] = [2, 19, 3, 16];
const LEN: usize = 2 * 19 * 3 * 16;
const ROWS: usize = 2 * 3 * 19;

fn eight(seed: u64) -> Vec<F8E4M3> {
    numbers(LEN, seed).into_iter().map(F8E4M3::from_f32).collect()
}

fn wide(x: &[F8E4M3], factor: f32) -> Vec<f32> {
    x.iter().map(|x| x.to_f32() * factor).collect()
}

fn view<T: Element>(x: &[T]) -> View<'_, T> {
    View::new(x, DIMS).unwrap()
}

fn forward<T: Element, K: Element>(plan: &Plan, inputs: &Inputs<'_, T, K>) -> (Vec<f32>, Vec<f32>) {
    let (mut o, mut lse) = (vec![f32::NAN; LEN], vec![f32::NAN; ROWS]);
    let output = Output::new(ViewMut::new(&mut o, DIMS).unwrap()).lse(&mut lse);
    plan.forward(inputs, output, &mut Workspace::new()).unwrap();
    (o, lse)
}

fn builder(dtype: Dtype) -> DescBuilder {
    DescBuilder::new(dtype, 3, 16).causal().lse()
}

#[test]
fn the_numbers_meant_and_their_gradients() {
    let (q, k, v) = (eight(1), eight(2), eight(3));
    let descale = [0.5f32; 6];
    let plan = builder(Dtype::F8E4M3).backward().dtype_o(Dtype::F32).build().unwrap();
    let inputs = Inputs::new(view(&q), view(&k), view(&v)).descale_k(&descale).descale_v(&descale);
    let (o, lse) = forward(&plan, &inputs);
    let (wq, wk, wv) = (wide(&q, 1.0), wide(&k, 0.5), wide(&v, 0.5));
    let plain = builder(Dtype::F32).backward().build().unwrap();
    let meant = Inputs::new(view(&wq), view(&wk), view(&wv));
    let (wanted, wanted_lse) = forward(&plain, &meant);
    assert_near(&o, &wanted, 1e-5);
    assert_near(&lse, &wanted_lse, 1e-5);

    let dout = numbers(LEN, 4);
    let mut all = vec![];
    let zeros = || vec![0f32; LEN];
    let (mut dq, mut dk, mut dv) = (zeros(), zeros(), zeros());
    let (mut xq, mut xk, mut xv) = (zeros(), zeros(), zeros());
    let write = |x| ViewMut::new(x, DIMS).unwrap();
    let gradients = Gradients::new(write(&mut dq), write(&mut dk), write(&mut dv));
    let upstream = Upstream::new(view(&o), &lse, view(&dout));
    plan.backward(&inputs, &upstream, gradients, &mut Workspace::new()).unwrap();
    let gradients = Gradients::new(write(&mut xq), write(&mut xk), write(&mut xv));
    plain.backward(&meant, &upstream, gradients, &mut Workspace::new()).unwrap();
    all.extend([(dq, xq), (dk, xk), (dv, xv)]);
    for (got, wanted) in &all {
        assert_near(got, wanted, 1e-4);
    }

    // Bytes have no room for the gradients that this plan writes.
    let (mut a, mut b, mut c) = (eight(1), eight(1), eight(1));
    let gradients = Gradients::new(
        ViewMut::new(&mut a, DIMS).unwrap(),
        ViewMut::new(&mut b, DIMS).unwrap(),
        ViewMut::new(&mut c, DIMS).unwrap(),
    );
    let refused = plan.backward(&inputs, &upstream, gradients, &mut Workspace::new());
    assert_eq!(refused.unwrap_err().field, "dq");
}

#[test]
fn a_cache_and_results_of_8_bits() {
    let (q, k, v) = (numbers(LEN, 1), eight(2), eight(3));
    let plan = builder(Dtype::F32).dtype_kv(Dtype::F8E4M3).build().unwrap();
    let (o, _) = forward(&plan, &Inputs::new(view(&q), view(&k), view(&v)));
    let (wk, wv) = (wide(&k, 1.0), wide(&v, 1.0));
    let plain = builder(Dtype::F32).build().unwrap();
    let (wanted, _) = forward(&plain, &Inputs::new(view(&q), view(&wk), view(&wv)));
    assert_near(&o, &wanted, 1e-5);

    // Integers, with a descale for each token.
    let narrow = |seed| -> Vec<i8> {
        numbers(LEN, seed).into_iter().map(|x| i8::from_f32(40.0 * x)).collect()
    };
    let (k8, v8, descale) = (narrow(2), narrow(3), [0.025f32; 6 * 19]);
    let plan = builder(Dtype::F32).dtype_kv(Dtype::I8).descale_block(1).build().unwrap();
    let inputs = Inputs::new(view(&q), view(&k8), view(&v8));
    let (o, _) = forward(&plan, &inputs.descale_k(&descale).descale_v(&descale));
    let meant = |x: &[i8]| -> Vec<f32> { x.iter().map(|x| x.to_f32() * 0.025).collect() };
    let (wk8, wv8) = (meant(&k8), meant(&v8));
    let (same, _) = forward(&plain, &Inputs::new(view(&q), view(&wk8), view(&wv8)));
    assert_near(&o, &same, 1e-5);

    // append_kv makes such integers, too, and a descale for each token and head.
    let (mut k_cache, mut v_cache) = (vec![0i8; LEN], vec![0i8; LEN]);
    let (mut descale_k, mut descale_v) = ([f32::NAN; 6 * 19], [f32::NAN; 6 * 19]);
    plan.append_kv(
        &AppendInputs::new(view(&wk8), view(&wv8)).lens_kv(&[0, 0]),
        AppendOutput::new(
            ViewMut::new(&mut k_cache, DIMS).unwrap(),
            ViewMut::new(&mut v_cache, DIMS).unwrap(),
        )
        .descale_k(&mut descale_k)
        .descale_v(&mut descale_v),
    )
    .unwrap();
    assert!(descale_k.iter().chain(&descale_v).all(|x| *x > 0.0 && *x < 0.1));
    assert!(k_cache.iter().filter(|x| x.unsigned_abs() == 127).count() >= 6 * 19);
    let inputs = Inputs::new(view(&q), view(&k_cache), view(&v_cache));
    let (same, _) = forward(&plan, &inputs.descale_k(&descale_k).descale_v(&descale_v));
    assert_near(&o, &same, 2e-2);

    let plan = DescBuilder::new(Dtype::F32, 3, 16)
        .causal()
        .dtype_kv(Dtype::F8E4M3)
        .dtype_o(Dtype::F8E4M3)
        .build()
        .unwrap();
    let (scale, mut amax) = ([64f32; 6], [f32::NAN; 6]);
    let mut narrow = vec![F8E4M3(0); LEN];
    let inputs = Inputs::new(view(&q), view(&k), view(&v)).scale_o(Array::from(&scale));
    let output = Output::new(ViewMut::new(&mut narrow, DIMS).unwrap()).amax_o(&mut amax);
    plan.forward(&inputs, output, &mut Workspace::new()).unwrap();
    let most = wanted.iter().fold(0f32, |m, x| m.max(x.abs()));
    assert!((amax.iter().fold(0f32, |m, &x| m.max(x)) - most).abs() < 1e-5 * most);
    for (x, wanted) in narrow.iter().zip(&wanted) {
        assert!((x.to_f32() / 64.0 - wanted).abs() <= wanted.abs() / 15.0 + 2e-5);
    }
}
