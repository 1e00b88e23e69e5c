//! What is refused before anything is read or written.

mod common;

use flashattn::half::f16;
use flashattn::{
    Array, ArrayMut, DescBuilder, Device, Dtype, Error, Gradients, Inputs, Output, Plan, Reason,
    Sizes, Status, Strides, Upstream, View, ViewMut, Workspace,
};

const DIMS: [usize; 4] = [2, 5, 2, 8];
const LEN: usize = 2 * 5 * 2 * 8;

fn builder() -> DescBuilder {
    DescBuilder::new(Dtype::F32, 2, 8)
}

/// Runs forward on packed arrays of DIMS, with what `more` adds.
fn forward_with<'a>(
    plan: &Plan,
    data: &'a [f32],
    more: impl FnOnce(Inputs<'a, f32>) -> Inputs<'a, f32>,
) -> Result<(), Error> {
    let view = View::new(data, DIMS)?;
    let inputs = more(Inputs::new(view, view, view));
    let mut o = vec![0f32; LEN];
    plan.forward(&inputs, ViewMut::new(&mut o, DIMS)?, &mut Workspace::new())
}

#[track_caller]
fn assert_refused(outcome: Result<(), Error>, reason: Reason, field: &str) {
    let error = outcome.expect_err("refused");
    assert_eq!((error.reason, error.field.as_str()), (reason, field), "{error}");
    assert!(!error.message.is_empty());
}

#[test]
fn library_says_status_reason_field_message() {
    let error = builder().heads_kv(3).build().unwrap_err();
    assert_eq!(error.status, Status::ERROR_INVALID_ARGUMENT);
    assert_eq!(error.reason, Reason::HEAD_RATIO);
    assert_eq!(error.field, "heads_kv");
    assert!(error.to_string().contains("heads_kv"), "{error}");
    assert_eq!(builder().heads_kv(3).check().unwrap_err(), error);
    assert!(builder().check().is_ok());
}

#[test]
fn sizes_past_their_field() {
    let error = builder().dim_v(1 << 40).build().unwrap_err();
    assert_eq!((error.reason, error.field.as_str()), (Reason::SIZE, "dim_v"));
    let error = DescBuilder::new(Dtype::F32, usize::MAX, 8).check().unwrap_err();
    assert_eq!(error.field, "heads_q");
}

#[test]
fn raw_keeps_the_structure_size() {
    let plan = builder().raw(|desc| desc.struct_size = 4000).build().unwrap();
    assert!(forward_with(&plan, &[0.5; LEN], |inputs| inputs).is_ok());
}

#[test]
fn views_past_their_slice() {
    let data = [0f32; 12];
    assert!(View::new(&data, [1, 2, 2, 3]).is_ok());
    assert!(View::new(&data, [1, 2, 2, 2]).is_err());
    assert!(View::new(&data, [1, 3, 2, 3]).is_err());
    assert!(View::new(&data, [usize::MAX, 2, usize::MAX, 3]).is_err());
    let strides = |batch, head, seq| Strides { batch, head, seq };
    assert!(View::strided(&data, [2, 2, 1, 3], strides(6, 3, 3)).is_ok());
    assert!(View::strided(&data, [2, 2, 1, 3], strides(7, 3, 3)).is_err());
    assert!(View::strided(&data, [2, 2, 1, 3], strides(usize::MAX, 3, 3)).is_err());
    assert!(View::strided(&data, [0, 2, 1, 3], strides(99, 3, 3)).is_ok());
    assert!(View::strided(&data, [4, 1, 3], strides(1, 3, 3)).is_err()); // VARLEN has no batch
}

#[test]
fn broadcast_reads_but_never_writes() {
    let mut data = [0f32; 12];
    let strides = Strides { batch: 0, head: 3, seq: 6 };
    assert!(View::strided(&data, [5, 2, 2, 3], strides).is_ok());
    assert!(ViewMut::strided(&mut data, [5, 2, 2, 3], strides).is_err());
    let overlapping = Strides { batch: 12, head: 2, seq: 6 };
    assert!(ViewMut::strided(&mut data, [1, 2, 2, 3], overlapping).is_err());
    assert!(View::strided(&data, [5, 2, 2, 3], Strides::default()).is_ok()); // one row for all
}

#[test]
fn heads_out_of_range() {
    let mut data = [0f32; 12];
    let view = View::new(&data, [1, 1, 4, 3]).unwrap();
    assert!(view.heads(0..4).is_ok() && view.heads(4..4).is_ok());
    assert!(view.heads(2..5).is_err());
    assert!(ViewMut::new(&mut data, [1, 1, 4, 3]).unwrap().split_heads(5).is_err());
}

#[test]
fn arrays_that_do_not_fit_the_plan() {
    let data = vec![0.5f32; LEN];
    let plan = DescBuilder::new(Dtype::F32, 4, 8).build().unwrap();
    assert_refused(forward_with(&plan, &data, |i| i), Reason::SIZE, "q");
    let plan = builder().dim_v(16).build().unwrap();
    assert_refused(forward_with(&plan, &data, |i| i), Reason::SIZE, "v");
    let plan = DescBuilder::new(Dtype::F16, 2, 8).build().unwrap();
    assert_refused(forward_with(&plan, &data, |i| i), Reason::DTYPE, "q");
    let plan = builder().varlen().build().unwrap();
    assert_refused(forward_with(&plan, &data, |i| i), Reason::SIZE, "q");
}

/// To the library 0 is a default, which views without elements would not hold.
#[test]
fn arrays_without_heads_or_elements() {
    let (data, none) = (vec![0.5f32; 2 * 5 * 2 * 8], Vec::<f32>::new());
    let plan = DescBuilder::new(Dtype::F32, 2, 8).heads_kv(0).dim_v(0).build().unwrap();
    let whole = || View::new(&data, [2, 5, 2, 8]).unwrap();
    for (dims, words) in [
        ([2, 5, 0, 8], "0 heads; give at least 1"),
        ([2, 5, 2, 0], "heads of 0 elements; give at least 1"),
    ] {
        let empty = || View::new(&none, dims).unwrap();
        let mut o = vec![0f32; data.len()];
        for (field, inputs) in [
            ("q", Inputs::new(empty(), whole(), whole())),
            ("k", Inputs::new(whole(), empty(), whole())),
            ("v", Inputs::new(whole(), whole(), empty())),
        ] {
            let output = Output::new(ViewMut::new(&mut o, [2, 5, 2, 8]).unwrap());
            let error = plan.forward(&inputs, output, &mut Workspace::new()).unwrap_err();
            assert_eq!((error.reason, error.field.as_str()), (Reason::SIZE, field), "{error}");
            assert!(error.message.contains(words), "{error}");
        }
    }
}

#[test]
fn outputs_that_do_not_fit() {
    let data = vec![0.5f32; LEN];
    let view = View::new(&data, DIMS).unwrap();
    let inputs = Inputs::new(view, view, view);
    let workspace = &mut Workspace::new();
    let plan = builder().lse().build().unwrap();
    let mut o = vec![f16::ZERO; LEN];
    let half = ViewMut::new(&mut o, DIMS).unwrap();
    assert_refused(plan.forward(&inputs, half, workspace), Reason::DTYPE, "o");
    let mut o = vec![0f32; LEN];
    let other = ViewMut::new(&mut o, [1, 10, 2, 8]).unwrap();
    assert_refused(plan.forward(&inputs, other, workspace), Reason::SIZE, "o");
    let mut o = ViewMut::new(&mut o, DIMS).unwrap();
    let mut lse = [0f32; 19];
    let output = Output::new(o.reborrow()).lse(&mut lse);
    assert_refused(plan.forward(&inputs, output, workspace), Reason::SIZE, "lse");
    // The plan wants one; the library says so.
    assert_refused(plan.forward(&inputs, o, workspace), Reason::NULL_POINTER, "lse");
}

#[test]
fn small_arrays_beside_the_inputs() {
    let data = vec![0.5f32; LEN];
    let (short, lens, page) = ([0f32; 1], [5i32; 3], [0i32; 2]);
    let plan = builder().alibi().sink().build().unwrap();
    let refused = forward_with(&plan, &data, |i| i.alibi_slopes(&short));
    assert_refused(refused, Reason::SIZE, "alibi_slopes");
    let refused = forward_with(&plan, &data, |i| i.sink(&short));
    assert_refused(refused, Reason::SIZE, "sink");
    let refused = forward_with(&plan, &data, |i| i.lens_kv(&lens));
    assert_refused(refused, Reason::SIZE, "lens_kv");

    let plan = builder().bias(Dtype::F32).build().unwrap();
    let bias = vec![0f32; 2 * 2 * 5 * 5];
    assert!(forward_with(&plan, &data, |i| i.bias(&bias)).is_ok());
    let refused = forward_with(&plan, &data, |i| i.bias(&bias[1..]));
    assert_refused(refused, Reason::SIZE, "bias");
    let bytes = vec![1u8; bias.len()];
    let refused = forward_with(&plan, &data, |i| i.bias(&bytes));
    assert_refused(refused, Reason::DTYPE, "bias");
    let of = |dims: [usize; 4]| Array::from(&bias[..dims.iter().product()]).dims(dims);
    assert!(forward_with(&plan, &data, |i| i.bias(of([1, 2, 1, 5]))).is_ok());
    for dims in [[2, 2, 5, 1], [2, 2, 4, 5], [3, 1, 1, 5]] {
        assert_refused(forward_with(&plan, &data, |i| i.bias(of(dims))), Reason::SIZE, "bias");
    }
    let strided = |seq| Array::from(&bias[..30]).strides(Strides { batch: 0, head: 0, seq });
    assert!(forward_with(&plan, &data, |i| i.bias(strided(6))).is_ok());
    let refused = forward_with(&plan, &data, |i| i.bias(strided(7)));
    assert_refused(refused, Reason::SIZE, "bias");
    let flat = Array::from(&lens[..2]).strides(Strides::default());
    assert_refused(forward_with(&plan, &data, |i| i.lens_q(flat)), Reason::STRIDE, "lens_q");
    let flat = Array::from(&lens[..1]).dims([1]);
    assert_refused(forward_with(&plan, &data, |i| i.lens_q(flat)), Reason::SIZE, "lens_q");

    let plan = builder().blocks(2, 2).build().unwrap();
    let blocks = vec![1u8; 3 * 3];
    let of = |blocks| Array::from(blocks).dims([1, 1, 3, 3]);
    assert!(forward_with(&plan, &data, |i| i.block_mask(of(&blocks[..]))).is_ok());
    let refused = forward_with(&plan, &data, |i| i.block_mask(of(&blocks[1..])));
    assert_refused(refused, Reason::SIZE, "block_mask");
    let refused = forward_with(&plan, &data, |i| i.block_mask(&blocks));
    assert_refused(refused, Reason::SIZE, "block_mask");

    let plan = builder().paged(5).build().unwrap();
    let strided =
        |table, batch| Array::<i32>::from(table).strides(Strides { batch, ..Strides::default() });
    assert!(forward_with(&plan, &data, |i| i.page_table(&page)).is_ok());
    assert!(forward_with(&plan, &data, |i| i.page_table(strided(&page[..], 1))).is_ok());
    let refused = forward_with(&plan, &data, |i| i.page_table(strided(&page[..], 2)));
    assert_refused(refused, Reason::SIZE, "page_table");
    let wrong = [0i32, 2];
    let refused = forward_with(&plan, &data, |i| i.page_table(&wrong));
    assert_refused(refused, Reason::LENGTHS, "page_table");
    let one_row = Array::from(&wrong[..1]).dims([1, 1]);
    assert!(forward_with(&plan, &data, |i| i.page_table(one_row)).is_ok());
    let odd = [0i32; 3];
    let refused = forward_with(&plan, &data, |i| i.page_table(&odd));
    assert_refused(refused, Reason::SIZE, "page_table");
    let refused = forward_with(&plan, &data, |i| i.page_table(&page).max_seqlen_kv(6));
    assert_refused(refused, Reason::SIZE, "page_table");
}

#[test]
fn what_does_not_go_together_is_refused_by_name() {
    for (desc, field) in [
        (builder().tree(257), "tree"),
        (builder().tree(3).backward(), "mask"),
        (builder().descale_block(64), "descale_block"),
    ] {
        let error = desc.build().unwrap_err();
        assert_eq!(error.field, field, "{error}");
    }
    let data = vec![0.5f32; LEN];
    let plan = builder().build().unwrap();
    let descale = [1f32; 4];
    let refused = forward_with(&plan, &data, |i| i.descale_k(&descale));
    assert_refused(refused, Reason::NULL_POINTER, "descale_k.data");
}

#[test]
fn gradients_beside_the_inputs() {
    let data = vec![0.5f32; LEN];
    let view = View::new(&data, DIMS).unwrap();
    let (bias, lse) = (vec![0f32; 100], vec![0f32; 20]);
    let inputs = Inputs::new(view, view, view).bias(&bias);
    let plan = builder().bias(Dtype::F32).backward().dbias().dlse().build().unwrap();
    let run = |dbias: ArrayMut<'_, f32>, dlse: &[f32]| {
        let (mut a, mut b, mut c) = (data.clone(), data.clone(), data.clone());
        let gradients = Gradients::new(
            ViewMut::new(&mut a, DIMS)?,
            ViewMut::new(&mut b, DIMS)?,
            ViewMut::new(&mut c, DIMS)?,
        );
        let upstream = Upstream::new(view, &lse, view).dlse(dlse);
        plan.backward(&inputs, &upstream, gradients.dbias(dbias), &mut Workspace::new())
    };
    let mut dbias = vec![0f32; 100];
    assert!(run((&mut dbias).into(), &lse).is_ok());
    assert!(run(ArrayMut::from(&mut dbias[..50]).dims([1, 2, 5, 5]), &lse).is_ok());
    assert_refused(run((&mut dbias[1..]).into(), &lse), Reason::SIZE, "dbias");
    assert_refused(run((&mut dbias).into(), &lse[1..]), Reason::SIZE, "dlse");
}

#[test]
fn bounds_without_use() {
    let data = vec![0.5f32; LEN];
    let plan = builder().build().unwrap();
    let refused = forward_with(&plan, &data, |i| i.max_seqlen_q(5));
    assert_refused(refused, Reason::VALUE, "max_seqlen_q");
    let refused = forward_with(&plan, &data, |i| i.max_seqlen_kv(5));
    assert_refused(refused, Reason::VALUE, "max_seqlen_kv");
}

#[test]
fn lengths_of_sequences() {
    let data = vec![0.5f32; 10 * 2 * 8];
    let plan = builder().varlen().build().unwrap();
    let run = |cu: &[i32]| {
        let view = View::new(&data, [10, 2, 8])?;
        let inputs = Inputs::new(view, view, view).cu_seqlens_q(cu).cu_seqlens_kv(cu);
        let mut o = vec![0f32; data.len()];
        plan.forward(&inputs, ViewMut::new(&mut o, [10, 2, 8])?, &mut Workspace::new())
    };
    assert!(run(&[0, 3, 3, 10]).is_ok());
    assert!(run(&[4]).is_ok()); // no sequence
    assert_refused(run(&[]), Reason::NULL_POINTER, "cu_seqlens_q");
    assert_refused(run(&[0, 11]), Reason::LENGTHS, "cu_seqlens_q");
    assert_refused(run(&[0, 5, 3]), Reason::LENGTHS, "cu_seqlens_q");
    assert_refused(run(&[-1, 5]), Reason::LENGTHS, "cu_seqlens_q");
    assert_refused(run(&[i32::MAX, i32::MIN]), Reason::LENGTHS, "cu_seqlens_q");
}

#[test]
fn gradients_that_do_not_fit() {
    let data = vec![0.5f32; LEN];
    let view = View::new(&data, DIMS).unwrap();
    let inputs = Inputs::new(view, view, view);
    let lse = vec![0f32; 20];
    let (mut a, mut b, mut c) = (data.clone(), data.clone(), data.clone());
    let mut run = |plan: &Plan, dims: [usize; 4], lse: &[f32]| {
        let gradients = Gradients::new(
            ViewMut::new(&mut a, DIMS)?,
            ViewMut::new(&mut b, dims)?,
            ViewMut::new(&mut c, DIMS)?,
        );
        let upstream = Upstream::new(view, lse, view);
        plan.backward(&inputs, &upstream, gradients, &mut Workspace::new())
    };
    let plan = builder().backward().build().unwrap();
    assert!(run(&plan, DIMS, &lse).is_ok());
    assert_refused(run(&plan, [1, 10, 2, 8], &lse), Reason::SIZE, "dk");
    assert_refused(run(&plan, DIMS, &lse[1..]), Reason::SIZE, "lse");
    let forward_only = builder().lse().build().unwrap();
    assert_refused(run(&forward_only, DIMS, &lse), Reason::OP, "ops");
}

#[test]
fn device_memory_is_not_for_the_cpu() {
    let data = vec![0.5f32; LEN];
    let plan = builder().build().unwrap();
    let view = View::new(&data, DIMS).unwrap();
    // SAFETY: refused before the address is used.
    let far = unsafe { View::<f32>::from_device_ptr(64, DIMS, Strides::packed(DIMS)).unwrap() };
    let mut o = vec![0f32; LEN];
    let o = ViewMut::new(&mut o, DIMS).unwrap();
    let refused = plan.forward(&Inputs::new(view, far, view), o, &mut Workspace::new());
    assert_refused(refused, Reason::NO_DEVICE, "k");
}

#[test]
fn no_gpu_is_said() {
    if flashattn::device_count(Device::CUDA).unwrap() > 0 {
        return;
    }
    let error = builder().device(Device::CUDA, 0).build().unwrap_err();
    assert_eq!(error.status, Status::ERROR_UNSUPPORTED);
    assert!(flashattn::device_info(Device::CUDA, 0).is_err());
}

#[test]
fn dropout_needs_a_seed() {
    let data = vec![0.5f32; LEN];
    let plan = builder().dropout(0.5).backward().build().unwrap();
    let view = View::new(&data, DIMS).unwrap();
    let mut written = [vec![7f32; LEN], vec![7f32; LEN], vec![7f32; LEN]];
    let mut lse = vec![7f32; 20];
    let mut run = |inputs: &Inputs<'_, f32>| -> [Result<(), Error>; 2] {
        let [a, b, c] = &mut written;
        let mut view_mut = [a, b, c].map(|x| ViewMut::new(x, DIMS).unwrap());
        let output = Output::new(view_mut[0].reborrow()).lse(&mut lse);
        let forward = plan.forward(inputs, output, &mut Workspace::new());
        let upstream = Upstream::new(view, &lse, view);
        let [dq, dk, dv] = view_mut;
        let gradients = Gradients::new(dq, dk, dv);
        [forward, plan.backward(inputs, &upstream, gradients, &mut Workspace::new())]
    };
    for outcome in run(&Inputs::new(view, view, view)) {
        assert!(outcome.as_ref().is_err_and(|e| e.message.contains("give Inputs::rng_seed")));
        assert_refused(outcome, Reason::DROPOUT, "rng_seed");
    }
    for outcome in run(&Inputs::new(view, view, view).rng_seed(0)) {
        outcome.unwrap(); // 0 is a seed as any other
    }
    // One in the device's memory will do: it is its place that the CPU refuses.
    let plan = builder().dropout(0.5).build().unwrap();
    // SAFETY: refused before the address is used.
    let refused = forward_with(&plan, &data, |i| {
        i.rng_device(unsafe { flashattn::Array::from_device_ptr(64, 2) })
    });
    assert_refused(refused, Reason::NO_DEVICE, "rng_device");
}

/// Value, limit and remedy, in the words of a user of this crate.
#[test]
fn messages() {
    #[track_caller]
    fn says<T: std::fmt::Debug>(outcome: Result<T, Error>, parts: &[&str]) {
        let message = outcome.expect_err("refused").message;
        for part in parts {
            assert!(message.contains(part), "{message}\nhas no: {part}");
        }
        assert!(!message.contains(" { "), "a structure as Debug prints it: {message}");
    }
    let data = vec![0.5f32; LEN];
    says(
        View::new(&data, [2, 5, 2, 4]),
        &["holds 160", "(batch = 2, seq = 5, heads = 2, dim = 4)", "80"],
    );
    says(View::new(&data, [9, 2, 8]), &["(tokens = 9, heads = 2, dim = 8) are 144", "`strided`"]);
    let strides = Strides { batch: 80, head: 8, seq: 17 };
    says(View::strided(&data, DIMS, strides), &["strides (batch: 80, seq: 17, head: 8) needs 164"]);
    says(View::new(&data, DIMS).unwrap().heads(1..3), &["heads 1..3", "within 0..2"]);
    // PyTorch's order: (batch, heads, seq, dim).
    let plan = builder().build().unwrap();
    let swapped = View::new(&data, [2, 2, 5, 8]).unwrap();
    let mut o = vec![0f32; LEN];
    let mut run = |plan: &Plan, q, k| {
        let o = ViewMut::new(&mut o, DIMS).unwrap();
        plan.forward(&Inputs::new(q, k, k), o, &mut Workspace::new())
    };
    says(run(&plan, swapped, swapped), &["heads = 2 and dim = 8", "Strides::bhsd"]);
    let view = View::new(&data, DIMS).unwrap();
    let single = View::new(&data[..80], [1, 5, 2, 8]).unwrap();
    says(run(&plan, view, single), &["k holds 1", "q holds 2", "stride of 0 repeats"]);
    let repeated = View::strided(&data, DIMS, Strides { batch: 0, head: 8, seq: 16 }).unwrap();
    run(&plan, view, repeated).unwrap(); // as the message says
    let half = DescBuilder::new(Dtype::F16, 2, 8).build().unwrap();
    says(run(&half, view, view), &["q holds F32", "made for F16", "convert it"]);
    let varlen = builder().varlen().build().unwrap();
    let rows = View::new(&data, [10, 2, 8]).unwrap();
    says(run(&varlen, rows, rows), &["cu_seqlens_q is missing", "batch + 1"]);
}

#[test]
fn dropout_mask_of_another_length() {
    let plan = builder().dropout(0.5).build().unwrap();
    let sizes = Sizes { batch: 1, seqlen_q: 3, seqlen_kv: 4, ..Sizes::default() };
    assert!(plan.dropout_mask(&sizes, 1, 2, &mut [0; 24]).is_ok());
    assert_refused(plan.dropout_mask(&sizes, 1, 2, &mut [0; 23]), Reason::SIZE, "keep");
}
