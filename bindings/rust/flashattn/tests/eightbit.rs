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

/// A key is its value, of 8 bits, and elements behind it; dense and in pages.
#[test]
fn the_quantised_cache_of_latent_attention() {
    let (q, k) = (numbers(2 * 3 * 4 * 24, 1), numbers(2 * 70 * 2 * 8, 2));
    let rows = 2 * 70 * 2;
    let v: Vec<_> = numbers(rows * 16, 3).into_iter().map(F8E4M3::from_f32).collect();
    let descale: Vec<f32> = numbers(rows * 2, 4).into_iter().map(|x| 0.5 + x.abs()).collect();
    let value = |row: usize, c: usize| v[row * 16 + c].to_f32() * descale[row * 2 + c / 8];
    let meant: Vec<f32> = (0..rows * 16).map(|n| value(n / 16, n % 16)).collect();
    let key = |row: usize, c: usize| if c < 16 { value(row, c) } else { k[row * 8 + c - 16] };
    let keys: Vec<f32> = (0..rows * 24).map(|n| key(n / 24, n % 24)).collect();
    let build = || DescBuilder::new(Dtype::F32, 4, 24).heads_kv(2).dim_v(16).causal();
    let run = |plan: &Plan, inputs: &Inputs<'_, f32, F8E4M3>| {
        let mut o = vec![f32::NAN; 2 * 3 * 4 * 16];
        let output = ViewMut::new(&mut o, [2, 3, 4, 16]).unwrap();
        plan.forward(inputs, output, &mut Workspace::new()).map(|()| o)
    };
    let q = View::new(&q, [2, 3, 4, 24]).unwrap();
    let mut wanted = vec![f32::NAN; 2 * 3 * 4 * 16];
    let all = Inputs::new(
        q,
        View::new(&keys, [2, 70, 2, 24]).unwrap(),
        View::new(&meant, [2, 70, 2, 16]).unwrap(),
    );
    let output = ViewMut::new(&mut wanted, [2, 3, 4, 16]).unwrap();
    build().build().unwrap().forward(&all, output, &mut Workspace::new()).unwrap();

    let latent = || build().dtype_kv(Dtype::F8E4M3).latent_kv().descale_dim(8);
    let plan = latent().build().unwrap();
    let (dense_k, dense_v) =
        (View::new(&k, [2, 70, 2, 8]).unwrap(), View::new(&v, [2, 70, 2, 16]).unwrap());
    let inputs = Inputs::latent(q, dense_k, dense_v);
    assert_near(&run(&plan, &inputs.clone().descale_latent(&descale)).unwrap(), &wanted, 1e-5);
    let dims = Array::from(&descale).dims([2, 70, 2, 2]);
    assert_near(&run(&plan, &inputs.clone().descale_latent(dims)).unwrap(), &wanted, 1e-5);
    assert_eq!(
        run(&plan, &inputs.descale_latent(&descale[1..])).unwrap_err().field,
        "descale_latent"
    );
    let refused = run(&plan, &Inputs::new(q, dense_v, dense_v)).unwrap_err();
    assert_eq!(refused.field, "layout");

    let plan = latent().paged(35).build().unwrap();
    let pages = Inputs::latent(
        q,
        View::new(&k, [4, 35, 2, 8]).unwrap(),
        View::new(&v, [4, 35, 2, 16]).unwrap(),
    );
    let paged = pages.page_table(&[0, 1, 2, 3]).lens_kv(&[70, 70]).descale_latent(&descale);
    assert_near(&run(&plan, &paged).unwrap(), &wanted, 1e-5);
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
