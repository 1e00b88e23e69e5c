//! Results, against the formula and against each other.

mod common;

use common::{assert_near, naive, numbers};
use flashattn::half::{bf16, f16};
use flashattn::{
    Array, DescBuilder, Device, Dtype, Element, Gradients, Inputs, LogLevel, Op, Output, Parallel,
    Part, Plan, Reason, Sizes, Strides, Upstream, View, ViewMut, Workspace,
};

const B: usize = 2;
const S: usize = 19;
const H: usize = 3;
const D: usize = 16;
const DIMS: [usize; 4] = [B, S, H, D];
const LEN: usize = B * S * H * D;

fn three() -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    (numbers(LEN, 1), numbers(LEN, 2), numbers(LEN, 3))
}

fn plan() -> Plan {
    DescBuilder::new(Dtype::F32, H, D).causal().backward().build().unwrap()
}

/// o and lse of packed arrays of DIMS.
fn forward(plan: &Plan, q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let view = |x| View::new(x, DIMS).unwrap();
    let (mut o, mut lse) = (vec![f32::NAN; LEN], vec![f32::NAN; B * H * S]);
    let output = Output::new(ViewMut::new(&mut o, DIMS).unwrap()).lse(&mut lse);
    let inputs = Inputs::new(view(q), view(k), view(v));
    plan.forward(&inputs, output, &mut Workspace::new()).unwrap();
    (o, lse)
}

/// The rows of one sequence and head of a packed array.
fn head(x: &[f32], b: usize, h: usize) -> Vec<f32> {
    (0..S).flat_map(|s| x[((b * S + s) * H + h) * D..][..D].to_vec()).collect()
}

#[test]
fn formula() {
    let (q, k, v) = three();
    let (o, _) = forward(&plan(), &q, &k, &v);
    for (b, h) in (0..B).flat_map(|b| (0..H).map(move |h| (b, h))) {
        let (q, k, v) = (head(&q, b, h), head(&k, b, h), head(&v, b, h));
        assert_near(&head(&o, b, h), &naive::attention(&q, &k, &v, D, D, true), 1e-6);
    }
}

/// A tree whose every token follows the one before sees what a causal mask shows.
#[test]
fn trees() {
    let (q, k, v) = three();
    let view = |x| View::new(x, DIMS).unwrap();
    let bits: Vec<u32> = (0..S).map(|i| (2 << i) - 1).collect();
    let run = |desc: DescBuilder, bits: &[u32]| {
        let mut o = vec![f32::NAN; LEN];
        let mut inputs = Inputs::new(view(&q), view(&k), view(&v));
        if !bits.is_empty() {
            inputs = inputs.tree_bits(Array::from(bits).dims([1, S, 1]));
        }
        let output = ViewMut::new(&mut o, DIMS).unwrap();
        desc.build().unwrap().forward(&inputs, output, &mut Workspace::new()).unwrap();
        o
    };
    let desc = || DescBuilder::new(Dtype::F32, H, D);
    assert_near(&run(desc().tree(S), &bits), &run(desc().causal(), &[]), 1e-6);
}

fn half_precision<T: Element>(tolerance: f32) {
    let (q, k, v) = three();
    let narrow = |x: &[f32]| x.iter().map(|&x| T::from_f32(x)).collect::<Vec<T>>();
    let wide = |x: &[T]| x.iter().map(|&x| x.to_f32()).collect::<Vec<f32>>();
    let (q, k, v) = (narrow(&q), narrow(&k), narrow(&v));
    let view = |x| View::new(x, DIMS).unwrap();
    let inputs = Inputs::new(view(&q), view(&k), view(&v));
    let workspace = &mut Workspace::new();
    let wanted = forward(&plan(), &wide(&q), &wide(&k), &wide(&v)).0;

    let mut o = vec![T::from_f32(f32::NAN); LEN];
    let plan = DescBuilder::new(T::DTYPE, H, D).causal().build().unwrap();
    plan.forward(&inputs, ViewMut::new(&mut o, DIMS).unwrap(), workspace).unwrap();
    assert_near(&wide(&o), &wanted, tolerance);

    let mut o = vec![f32::NAN; LEN];
    let plan = DescBuilder::new(T::DTYPE, H, D).causal().dtype_o(Dtype::F32).build().unwrap();
    plan.forward(&inputs, ViewMut::new(&mut o, DIMS).unwrap(), workspace).unwrap();
    assert_near(&o, &wanted, tolerance);
}

#[test]
fn f16_and_bf16() {
    half_precision::<f16>(2e-3);
    half_precision::<bf16>(2e-2);
}

#[test]
fn transposed_arrays_give_the_same_bits() {
    let (q, k, v) = three();
    let plan = plan();
    let (wanted, _) = forward(&plan, &q, &k, &v);
    let turned = |x: &[f32]| -> Vec<f32> {
        (0..B).flat_map(|b| (0..H).flat_map(move |h| head(x, b, h))).collect()
    };
    let (tq, tk, tv, twanted) = (turned(&q), turned(&k), turned(&v), turned(&wanted));
    let view = |x| View::strided(x, DIMS, Strides::bhsd(DIMS)).unwrap();
    let (mut o, mut lse) = (vec![f32::NAN; LEN], vec![0f32; B * H * S]);
    let out = ViewMut::strided(&mut o, DIMS, Strides::bhsd(DIMS)).unwrap();
    let inputs = Inputs::new(view(&tq), view(&tk), view(&tv));
    plan.forward(&inputs, Output::new(out).lse(&mut lse), &mut Workspace::new()).unwrap();
    assert_eq!(o, twanted);
}

#[test]
fn packed_qkv_forward_and_backward() {
    let (q, k, v) = three();
    let plan = plan();
    let (o, lse) = forward(&plan, &q, &k, &v);
    let dout = numbers(LEN, 4);
    let view = |x| View::new(x, DIMS).unwrap();
    let (mut dq, mut dk, mut dv) = (vec![0f32; LEN], vec![0f32; LEN], vec![0f32; LEN]);
    let gradients = Gradients::new(
        ViewMut::new(&mut dq, DIMS).unwrap(),
        ViewMut::new(&mut dk, DIMS).unwrap(),
        ViewMut::new(&mut dv, DIMS).unwrap(),
    );
    let upstream = Upstream::new(view(&o), &lse, view(&dout));
    let workspace = &mut Workspace::new();
    let inputs = Inputs::new(view(&q), view(&k), view(&v));
    plan.backward(&inputs, &upstream, gradients, workspace).unwrap();

    // (batch, seq, 3 * heads, dim): the heads of q, then k, then v.
    let row = H * D;
    let packed = |q: &[f32], k: &[f32], v: &[f32]| -> Vec<f32> {
        let rows = (0..B * S).map(|t| t * row);
        rows.flat_map(|t| [&q[t..t + row], &k[t..t + row], &v[t..t + row]].concat()).collect()
    };
    let qkv = packed(&q, &k, &v);
    let all = View::new(&qkv, [B, S, 3 * H, D]).unwrap();
    let part = |n: usize| all.heads(n * H..(n + 1) * H).unwrap();
    let inputs = Inputs::new(part(0), part(1), part(2));
    let mut dqkv = vec![f32::NAN; 3 * LEN];
    let (gq, rest) = ViewMut::new(&mut dqkv, [B, S, 3 * H, D]).unwrap().split_heads(H).unwrap();
    let (gk, gv) = rest.split_heads(H).unwrap();
    plan.backward(&inputs, &upstream, Gradients::new(gq, gk, gv), workspace).unwrap();
    assert_eq!(dqkv, packed(&dq, &dk, &dv));
}

#[test]
fn parts_merge_into_the_whole() {
    let (q, k, v) = three();
    let plan = DescBuilder::new(Dtype::F32, H, D).lse().build().unwrap();
    let (wanted, wanted_lse) = forward(&plan, &q, &k, &v);
    let (mut o, mut lse) = (vec![vec![0f32; LEN]; 2], vec![vec![0f32; B * H * S]; 2]);
    for (n, (first, count)) in [(0, 7), (7, 12)].into_iter().enumerate() {
        let part = [&k, &v].map(|x| {
            View::strided(&x[first * H * D..], [B, count, H, D], Strides::packed(DIMS)).unwrap()
        });
        let inputs = Inputs::new(View::new(&q, DIMS).unwrap(), part[0], part[1]);
        let output = Output::new(ViewMut::new(&mut o[n], DIMS).unwrap()).lse(&mut lse[n]);
        plan.forward(&inputs, output, &mut Workspace::new()).unwrap();
    }
    let part = |n: usize| Part::new(View::new(&o[n], DIMS).unwrap(), &lse[n]);
    let parts = [part(0), part(1)];
    let (mut o, mut lse) = (vec![0f32; LEN], vec![0f32; B * H * S]);
    plan.merge(&parts, Output::new(ViewMut::new(&mut o, DIMS).unwrap()).lse(&mut lse)).unwrap();
    assert_near(&o, &wanted, 1e-6);
    assert_near(&lse, &wanted_lse, 1e-5);
    plan.merge(&parts, ViewMut::new(&mut o, DIMS).unwrap()).unwrap();
    assert!(plan.merge::<f32, f32>(&[], ViewMut::new(&mut o, DIMS).unwrap()).is_err());
}

#[test]
fn pages_in_any_order() {
    let (q, k, v) = three();
    let plan = DescBuilder::new(Dtype::F32, H, D).causal().lse().build().unwrap();
    let (wanted, _) = forward(&plan, &q, &k, &v);
    let (size, row) = (4, H * D);
    let each = S.div_ceil(size);
    let pages = B * each;
    // Page p of sequence b lies at the mirrored place.
    let table: Vec<i32> = (0..pages as i32).rev().collect();
    let pool = |x: &[f32]| -> Vec<f32> {
        let mut pool = vec![f32::NAN; pages * size * row];
        for (b, s) in (0..B).flat_map(|b| (0..S).map(move |s| (b, s))) {
            let page = table[b * each + s / size] as usize;
            pool[(page * size + s % size) * row..][..row]
                .copy_from_slice(&x[(b * S + s) * row..][..row]);
        }
        pool
    };
    let (pk, pv) = (pool(&k), pool(&v));
    let paged = DescBuilder::new(Dtype::F32, H, D).causal().paged(size).build().unwrap();
    let view = |x| View::new(x, [pages, size, H, D]).unwrap();
    let lens = [S as i32; B];
    let strides = Strides { batch: each, head: 0, seq: 0 };
    for table in [Array::from(&table), Array::from(&table).strides(strides)] {
        let mut o = vec![0f32; LEN];
        let inputs = Inputs::new(View::new(&q, DIMS).unwrap(), view(&pk), view(&pv))
            .page_table(table)
            .lens_kv(&lens);
        let sizes = inputs.sizes(&paged).unwrap();
        assert_eq!((sizes.batch, sizes.seqlen_q, sizes.seqlen_kv), (B, S, each * size));
        let out = ViewMut::new(&mut o, DIMS).unwrap();
        paged.forward(&inputs, out, &mut Workspace::new()).unwrap();
        assert_near(&o, &wanted, 1e-6);
    }
}

/// Keys before starts_kv do not exist: the same as a call without them.
#[test]
fn left_padding() {
    let (q, k, v) = three();
    let plan = plan();
    let starts = [4i32, 0];
    let workspace = &mut Workspace::new();
    let dout = numbers(LEN, 4);
    let view = |x| View::new(x, DIMS).unwrap();
    let inputs = Inputs::new(view(&q), view(&k), view(&v)).starts_kv(&starts);
    let (mut o, mut lse) = (vec![f32::NAN; LEN], vec![f32::NAN; B * H * S]);
    let output = Output::new(ViewMut::new(&mut o, DIMS).unwrap()).lse(&mut lse);
    plan.forward(&inputs, output, workspace).unwrap();
    for (b, h) in (0..B).flat_map(|b| (0..H).map(move |h| (b, h))) {
        let skip = starts[b] as usize * D;
        let (q, k, v) = (head(&q, b, h), head(&k, b, h), head(&v, b, h));
        let wanted = naive::attention(&q, &k[skip..], &v[skip..], D, D, true);
        assert_near(&head(&o, b, h), &wanted, 1e-6);
    }
    // dk of a key that does not exist is not written; those of the others are those of a shorter call.
    let mut grads = [vec![f32::NAN; LEN], vec![f32::NAN; LEN], vec![f32::NAN; LEN]];
    let [dq, dk, dv] = grads.each_mut().map(|x| ViewMut::new(x, DIMS).unwrap());
    let upstream = Upstream::new(view(&o), &lse, view(&dout));
    plan.backward(&inputs, &upstream, Gradients::new(dq, dk, dv), workspace).unwrap();
    let (start, row) = (4usize, H * D);
    let short = [1, S - start, H, D];
    fn part<T>(x: &[T], rows: std::ops::Range<usize>) -> View<'_, T> {
        let dims = [1, rows.len(), H, D];
        View::new(&x[rows.start * H * D..rows.end * H * D], dims).unwrap()
    }
    let inputs = Inputs::new(part(&q, 0..S), part(&k, start..S), part(&v, start..S));
    let mut other =
        [vec![0f32; S * row], vec![0f32; (S - start) * row], vec![0f32; (S - start) * row]];
    let [dq, dk, dv] = &mut other;
    let gradients = Gradients::new(
        ViewMut::new(dq, [1, S, H, D]).unwrap(),
        ViewMut::new(dk, short).unwrap(),
        ViewMut::new(dv, short).unwrap(),
    );
    let upstream = Upstream::new(part(&o, 0..S), &lse[..H * S], part(&dout, 0..S));
    plan.backward(&inputs, &upstream, gradients, workspace).unwrap();
    assert_near(&grads[0][..S * row], &other[0], 1e-5);
    for (all, some) in grads[1..].iter().zip(&other[1..]) {
        assert!(all[..start * row].iter().all(|x| x.is_nan()));
        assert_near(&all[start * row..S * row], some, 1e-5);
    }
}

#[test]
fn a_pool_of_the_callers_gives_the_same_bits() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    /// Runs the tasks from the last to the first.
    struct Backwards(AtomicUsize);
    // SAFETY: every index once, and all are done at the end.
    unsafe impl Parallel for Backwards {
        fn run(&self, count: i32, task: &(dyn Fn(i32) + Sync)) {
            self.0.fetch_add(count as usize, Ordering::Relaxed);
            (0..count).rev().for_each(task);
        }
    }
    struct Panics;
    // SAFETY: no task runs any more when it panics.
    unsafe impl Parallel for Panics {
        fn run(&self, _: i32, _: &(dyn Fn(i32) + Sync)) {
            panic!("no thread");
        }
    }
    let (seq, heads) = (300, 4);
    let dims = [1, seq, heads, D];
    let x = numbers(seq * heads * D, 5);
    let plan = DescBuilder::new(Dtype::F32, heads, D).lse().build().unwrap();
    let view = View::new(&x, dims).unwrap();
    let inputs = Inputs::new(view, view, view);
    let run = |pool: Option<&dyn Parallel>| {
        let (mut o, mut lse) = (vec![f32::NAN; x.len()], vec![f32::NAN; heads * seq]);
        let mut output = Output::new(ViewMut::new(&mut o, dims).unwrap()).lse(&mut lse);
        if let Some(pool) = pool {
            output = output.parallel(pool);
        }
        plan.forward(&inputs, output, &mut Workspace::new()).unwrap();
        (o, lse)
    };
    let wanted = run(None);
    let backwards = Backwards(AtomicUsize::new(0));
    assert_eq!(run(Some(&backwards)), wanted);
    assert!(backwards.0.load(Ordering::Relaxed) > 0);
    let panicked = std::panic::catch_unwind(|| run(Some(&Panics)));
    assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"no thread"));
    #[cfg(feature = "rayon")]
    {
        assert_eq!(run(Some(&flashattn::Rayon)), wanted);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        assert_eq!(run(Some(&pool)), wanted);
    }
}

#[test]
fn plans_know_their_defaults() {
    let plan = DescBuilder::new(Dtype::F16, 6, 32).splits(2).threads(7).build().unwrap();
    let desc = plan.desc();
    assert_eq!((desc.heads_kv, desc.dim_v, desc.splits, desc.threads), (6, 32, 2, 7));
    assert_eq!((desc.dtype_kv, desc.dtype_o), (Dtype::F16.0, Dtype::F16.0));
    assert_eq!(desc.scale, 1.0 / 32f32.sqrt());
    let error = DescBuilder::new(Dtype::F16, 6, 32).multiprocessors(7).build().unwrap_err();
    assert_eq!(error.field, "multiprocessors"); // of a GPU
    let least = DescBuilder::new(Dtype::F32, 6, 32).backward().workspace_limit(1);
    let error = least.max_batch(1).max_seqlen_q(999).max_seqlen_kv(999).build().unwrap_err();
    assert_eq!((error.reason, error.field.as_str()), (Reason::WORKSPACE_LIMIT, "workspace_limit"));
}

#[test]
fn threads_share_a_plan() {
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<Plan>();
    is_send_and_sync::<View<'_, f32>>();
    is_send_and_sync::<ViewMut<'_, f32>>();
    is_send_and_sync::<Inputs<'_, f32>>();
    let (q, k, v) = three();
    let plan = plan();
    let wanted = forward(&plan, &q, &k, &v);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    assert_eq!(forward(&plan, &q, &k, &v), wanted);
                }
            });
        }
    });
}

#[test]
fn dropout_keeps_what_its_mask_says() {
    // With v = the identity, o holds the weights.
    let n = 16;
    let plan = DescBuilder::new(Dtype::F32, 1, n).dropout(0.5).build().unwrap();
    let q = vec![0f32; n * n];
    let v: Vec<f32> = (0..n * n).map(|i| f32::from(i % (n + 1) == 0)).collect();
    let dims = [1, n, 1, n];
    let view = |x| View::new(x, dims).unwrap();
    let (mut o, mut keep) = (vec![0f32; n * n], vec![0u8; n * n]);
    let inputs = Inputs::new(view(&q), view(&q), view(&v)).rng_seed(7).rng_offset(9);
    plan.forward(&inputs, ViewMut::new(&mut o, dims).unwrap(), &mut Workspace::new()).unwrap();
    let sizes = Sizes { batch: 1, seqlen_q: n, seqlen_kv: n, ..Sizes::default() };
    plan.dropout_mask(&sizes, 7, 9, &mut keep).unwrap();
    let wanted: Vec<f32> = keep.iter().map(|&k| f32::from(k) * 2.0 / n as f32).collect();
    assert_near(&o, &wanted, 1e-6);
    assert!(keep.contains(&0) && keep.contains(&1));
}

#[test]
fn empty_calls() {
    let plan = DescBuilder::new(Dtype::F32, H, D).build().unwrap();
    let none: [f32; 0] = [];
    let mut o: [f32; 0] = [];
    let dims = [0, S, H, D];
    let view = View::new(&none, dims).unwrap();
    let inputs = Inputs::new(view, view, view);
    plan.forward(&inputs, ViewMut::new(&mut o, dims).unwrap(), &mut Workspace::new()).unwrap();
    // No key: o = 0.
    let q = [1f32; H * D];
    let mut o = [f32::NAN; H * D];
    let keys = View::new(&none, [1, 0, H, D]).unwrap();
    let inputs = Inputs::new(View::new(&q, [1, 1, H, D]).unwrap(), keys, keys);
    let out = ViewMut::new(&mut o, [1, 1, H, D]).unwrap();
    plan.forward(&inputs, out, &mut Workspace::new()).unwrap();
    assert_eq!(o, [0f32; H * D]);
}

#[test]
fn plans_say_what_they_do() {
    let sizes = Sizes { batch: B, seqlen_q: S, seqlen_kv: S, ..Sizes::default() };
    let plan = DescBuilder::new(Dtype::F32, H, D)
        .max_batch(B)
        .max_seqlen_q(S)
        .max_seqlen_kv(S)
        .build()
        .unwrap();
    let info = plan.info(Op::FORWARD, Some(&sizes)).unwrap();
    assert_eq!(info.backend, "cpu");
    assert!(info.flops > 0 && info.tile_q > 0 && !info.why.is_empty() && !info.kernel.is_empty());
    let bytes = plan.workspace_size(Op::FORWARD, Some(&sizes)).unwrap();
    assert_eq!(bytes as i64, info.workspace);
    assert!(plan.workspace_size(Op::FORWARD, None).unwrap() >= bytes);
    assert!(plan.info(Op::BACKWARD, None).is_err());
    assert!(!plan.as_raw().is_null());
}

#[test]
fn library_describes_itself() {
    assert!(flashattn::version().starts_with("0."));
    assert!(flashattn::build_info().contains(&flashattn::version()));
    assert!(flashattn::device_count(Device::CPU).unwrap() >= 1);
    let cpu = flashattn::device_info(Device::CPU, 0).unwrap();
    assert!(cpu.threads > 0 && cpu.multiprocessors == 0 && cpu.memory > 0 && !cpu.isa.is_empty());
    assert!(flashattn::device_count(Device(77)).is_err());
    assert_eq!(
        format!("{:?} {:?}", Op::FORWARD | Op::BACKWARD, Dtype(99)),
        "FORWARD | BACKWARD 99"
    );
}

#[test]
fn log_lines_arrive_and_a_panic_stays_inside() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static LINES: AtomicUsize = AtomicUsize::new(0);
    fn count(_: LogLevel, line: &str) {
        assert!(!line.is_empty());
        LINES.fetch_add(1, Ordering::Relaxed);
        panic!("the library must not see this");
    }
    flashattn::set_log(LogLevel::ERROR, Some(count)).unwrap();
    assert!(DescBuilder::new(Dtype::F32, 0, 0).check().is_err());
    flashattn::set_log(LogLevel::OFF, None).unwrap();
    assert!(LINES.load(Ordering::Relaxed) >= 1);
    assert!(flashattn::set_log(LogLevel(99), None).is_err());
}
