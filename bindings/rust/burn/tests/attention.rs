//! Against the formula in float64 by burn's own operations: values and gradients, strides, types,
//! refusals.

use burn::tensor::{activation, DType, Device, Gradients, Tensor, TensorData};
use flashattn_burn::{attention, Attention};

fn device() -> Device {
    Device::flex().autodiff()
}

/// Numbers in [-1.5, 1.5], the same on every run, others for each seed.
fn numbers<const D: usize>(shape: [usize; D], seed: u32, dtype: DType) -> Tensor<D> {
    let number = |n: usize| 1.5 * ((n + 1) as f64 * (n as f64 + 0.7 * f64::from(seed))).sin();
    let all: Vec<f32> = (0..shape.iter().product()).map(|n| number(n) as f32).collect();
    Tensor::<D>::from_data(TensorData::new(all, shape), (&device(), DType::F32)).cast(dtype)
}

/// What scores go through.
#[derive(Clone, Copy, Default)]
struct Scores {
    scale: Option<f64>,
    left: Option<usize>,
    right: Option<usize>,
    softcap: f64,
}

/// The formula, with every score in memory, of tensors of float64.
fn formula(
    [q, k, v]: [Tensor<4>; 3],
    bias: Option<Tensor<4>>,
    sink: Option<Tensor<1>>,
    how: Scores,
) -> Tensor<4> {
    let ([batch, heads, sq, dim], [_, heads_kv, sk, _]) = (q.dims(), k.dims());
    let each = heads / heads_kv;
    let repeated = |x: Tensor<4>| {
        let [_, _, _, dim] = x.dims();
        let x = x.reshape([batch, heads_kv, 1, sk * dim]).repeat_dim(2, each);
        x.reshape([batch, heads, sk, dim])
    };
    let scale = how.scale.unwrap_or(1.0 / (dim as f64).sqrt());
    let mut scores = q.matmul(repeated(k).transpose()) * scale;
    if how.softcap > 0.0 {
        scores = (scores / how.softcap).tanh() * how.softcap;
    }
    if let Some(bias) = bias {
        scores = scores + bias;
    }
    let mut hidden = vec![0f64; sq * sk];
    for (n, hidden) in hidden.iter_mut().enumerate() {
        let after = (n % sk) as i64 - ((n / sk) as i64 + sk as i64 - sq as i64);
        let far = |after: i64, side: Option<usize>| side.is_some_and(|side| after > side as i64);
        if far(-after, how.left) || far(after, how.right) {
            *hidden = f64::NEG_INFINITY;
        }
    }
    let mask = TensorData::new(hidden, [1, 1, sq, sk]);
    scores = scores + Tensor::<4>::from_data(mask, (&device(), DType::F64));
    if let Some(sink) = sink {
        let column = sink.reshape([1, heads, 1, 1]).expand([batch, heads, sq, 1]);
        scores = Tensor::cat(vec![scores, column], 3);
    }
    activation::softmax(scores, 3).narrow(3, 0, sk).matmul(repeated(v))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.cast(DType::F64).into_data().try_to_vec::<f64>().unwrap()
}

#[track_caller]
fn assert_near<const D: usize>(what: &str, given: Tensor<D>, wanted: Tensor<D>, tolerance: f64) {
    assert_eq!(given.dims(), wanted.dims(), "{what}");
    let (given, wanted) = (values(given), values(wanted));
    let most = wanted.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    for (x, y) in given.iter().zip(&wanted) {
        assert!((x - y).abs() <= tolerance * most, "{what}: {x} for {y}, the largest {most}");
    }
}

struct Case {
    q: [usize; 4],
    k: [usize; 4],
    dim_v: usize,
    bias: Option<[usize; 4]>,
    sink: bool,
    how: Scores,
}

impl Default for Case {
    fn default() -> Self {
        let (q, k) = ([2, 4, 13, 16], [2, 2, 17, 16]);
        Self { q, k, dim_v: 16, bias: None, sink: false, how: Scores::default() }
    }
}

/// Compares o, and the gradients of everything under a weighted sum of it.
#[track_caller]
fn compare(case: &Case, dtype: DType, tolerance: f64) {
    let [batch, heads_kv, seq, _] = case.k;
    // Leaves of float64; the library gets them rounded, and burn carries gradients back to them.
    let leaf = |shape, seed| {
        let rounded = numbers(shape, seed, DType::F32).cast(dtype).cast(DType::F64);
        rounded.detach().require_grad()
    };
    let leaves = [
        leaf(case.q, 1),
        leaf(case.k, 2),
        leaf([batch, heads_kv, seq, case.dim_v], 3),
        leaf(case.bias.unwrap_or([1; 4]), 4),
    ];
    let sink = numbers([case.q[1]], 5, DType::F64).detach().require_grad();
    let [q, k, v, bias] = leaves.clone();
    let bias = case.bias.map(|_| bias);

    let how = case.how;
    let wanted = formula(
        [q.clone(), k.clone(), v.clone()],
        bias.clone(),
        case.sink.then(|| sink.clone()),
        how,
    );
    let mut options = Attention::new().window(how.left, how.right).softcap(how.softcap as f32);
    if let Some(scale) = how.scale {
        options = options.scale(scale as f32);
    }
    if let Some(bias) = bias {
        options = options.bias(bias.cast(dtype));
    }
    if case.sink {
        options = options.sink(sink.clone());
    }
    let given = attention(q.cast(dtype), k.cast(dtype), v.cast(dtype), &options).unwrap();
    assert_eq!(given.dtype(), dtype);
    assert_near("o", given.clone(), wanted.clone(), tolerance);

    let weight = numbers(wanted.dims(), 99, dtype);
    let given = (given * weight.clone()).sum().backward();
    let wanted = (wanted * weight.cast(DType::F64)).sum().backward();
    let names = ["dq", "dk", "dv", "dbias"];
    let check = |grads: &Gradients, other: &Gradients| {
        for (leaf, name) in leaves.iter().zip(names) {
            if name != "dbias" || case.bias.is_some() {
                let (x, y) = (leaf.grad(grads).unwrap(), leaf.grad(other).unwrap());
                assert_near(name, x, y, 4.0 * tolerance);
            }
        }
        if case.sink {
            let (x, y) = (sink.grad(grads).unwrap(), sink.grad(other).unwrap());
            assert_near("dsink", x, y, 4.0 * tolerance);
        }
    };
    check(&given, &wanted);
}

#[test]
fn values_and_gradients() {
    for right in [None, Some(0)] {
        let how = Scores { right, ..Scores::default() };
        compare(&Case { how, ..Case::default() }, DType::F32, 4e-6);
        let (q, k) = ([1, 6, 20, 32], [1, 2, 71, 32]);
        compare(&Case { q, k, dim_v: 24, how, ..Case::default() }, DType::F32, 4e-6);
    }
    let how = Scores { scale: Some(0.1), left: Some(5), right: Some(2), softcap: 3.0 };
    compare(&Case { how, ..Case::default() }, DType::F32, 6e-6);
    let (q, k) = ([1, 1, 5, 320], [1, 1, 5, 320]);
    compare(&Case { q, k, dim_v: 320, ..Case::default() }, DType::F32, 4e-6);
}

#[test]
fn half_precision() {
    for (dtype, tolerance) in [(DType::F16, 4e-3), (DType::BF16, 3e-2)] {
        let how = Scores { right: Some(0), ..Scores::default() };
        let bias = Some([1, 4, 13, 17]);
        compare(&Case { how, bias, ..Case::default() }, dtype, tolerance);
    }
}

#[test]
fn biases_and_sinks() {
    for bias in [[2, 4, 13, 17], [1, 4, 13, 17], [2, 1, 1, 17], [1, 1, 13, 17]] {
        for sink in [false, true] {
            let how = Scores { left: Some(9), ..Scores::default() };
            compare(&Case { bias: Some(bias), sink, how, ..Case::default() }, DType::F32, 6e-6);
        }
    }
    compare(&Case { sink: true, ..Case::default() }, DType::F32, 6e-6);
}

/// Gradients of some of the tensors only, and twice of one graph.
#[test]
fn what_is_tracked() {
    let [q, k, v] = [1, 2, 3].map(|seed| numbers([1, 2, 9, 8], seed, DType::F32));
    let tracked = k.clone().require_grad();
    let sink = numbers([2], 4, DType::F32);
    let options = Attention::new().sink(sink.clone());
    let o = attention(q.clone(), tracked.clone(), v.clone(), &options).unwrap();
    let dk = tracked.grad(&o.sum().backward()).unwrap();
    let all = [q, k, v].map(|x| x.cast(DType::F64).detach().require_grad());
    let sink = sink.cast(DType::F64);
    let wanted = formula(all.clone(), None, Some(sink), Scores::default()).sum().backward();
    assert_near("dk", dk, all[1].grad(&wanted).unwrap(), 2e-5);
}

/// (batch, seq, heads, dim) in memory, and q, k, v of one tensor: read where they lie. A copied call
/// gives the same bits.
#[test]
fn strides() {
    let qkv = numbers([2, 19, 12, 8], 4, DType::F32).require_grad();
    let part = |n: usize| qkv.clone().narrow(2, 4 * n, 4).swap_dims(1, 2);
    let options = Attention::new().causal();
    let o = attention(part(0), part(1), part(2), &options).unwrap();
    let copied = |n: usize| {
        let data = part(n).into_data();
        Tensor::<4>::from_data(data, (&device(), DType::F32))
    };
    let wanted = attention(copied(0), copied(1), copied(2), &options).unwrap();
    assert_eq!(o.clone().into_data(), wanted.into_data());
    let given = qkv.grad(&o.sum().backward()).unwrap();
    let wide = qkv.clone().cast(DType::F64).detach().require_grad();
    let part = |n: usize| wide.clone().narrow(2, 4 * n, 4).swap_dims(1, 2);
    let how = Scores { right: Some(0), ..Scores::default() };
    let wanted = formula([part(0), part(1), part(2)], None, None, how).sum().backward();
    assert_near("dqkv", given, wide.grad(&wanted).unwrap(), 2e-5);
    // Heads whose elements do not follow each other, and rows in reverse.
    let x = numbers([1, 2, 8, 8], 5, DType::F32);
    let odd = [x.clone().transpose(), x.clone().flip([2]), x];
    let packed =
        odd.clone().map(|x| Tensor::<4>::from_data(x.into_data(), (&device(), DType::F32)));
    let call = |[q, k, v]: [Tensor<4>; 3]| attention(q, k, v, &Attention::new()).unwrap();
    assert_eq!(call(odd).into_data(), call(packed).into_data());
}

#[test]
fn without_autodiff() {
    let x = numbers([1, 2, 9, 8], 1, DType::F32);
    let plain = Tensor::<4>::from_data(x.clone().into_data(), (&Device::flex(), DType::F32));
    let bias = numbers([1, 1, 9, 9], 2, DType::F32).expand([1, 2, 9, 9]);
    let given = Tensor::<4>::from_data(bias.clone().into_data(), (&Device::flex(), DType::F32));
    let [a, b] = [(x, bias), (plain, given)].map(|(x, bias)| {
        attention(x.clone(), x.clone(), x, &Attention::new().bias(bias)).unwrap().into_data()
    });
    assert_eq!(a, b);
}

#[test]
fn refusals_keep_the_message() {
    let zeros = |heads: usize, dtype| numbers([1, heads, 4, 8], 1, dtype).require_grad();
    let (q, kv) = (zeros(3, DType::F32), zeros(2, DType::F32));
    let call = |[q, k, v]: [&Tensor<4>; 3], options: Attention| {
        attention(q.clone(), k.clone(), v.clone(), &options)
    };
    #[track_caller]
    fn assert_refused(result: flashattn::Result<Tensor<4>>, words: &str) {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    let options = Attention::new;
    assert_refused(call([&q, &kv, &kv], options()), "heads_q = 3");
    assert_refused(call([&kv, &kv, &kv], options().scale(0.0)), "scale = 0 would");
    assert_refused(call([&kv, &kv, &kv], options().softcap(-1.0)), "softcap = -1");
    let half = zeros(2, DType::F16);
    assert_refused(call([&kv, &kv, &half], options()), "v holds F16");
    let wide = zeros(2, DType::F64);
    assert_refused(call([&wide, &wide, &wide], options()), "q holds F64");
    let sink = numbers([3], 1, DType::F32);
    assert_refused(call([&kv, &kv, &kv], options().sink(sink)), "sink holds 3 elements");
    let bias = numbers([1, 1, 4, 5], 1, DType::F32);
    assert_refused(call([&kv, &kv, &kv], options().bias(bias)), "bias is (1, 1, 4, 5)");
    let plain = Tensor::<4>::from_data(kv.into_data(), (&Device::flex(), DType::F32));
    assert_refused(call([&plain, &plain, &plain], options().scale(0.0)), "scale = 0 would");
}
