//! New keys and values into caches: dense, paged and packed, rotated, quantised, in place.

mod common;

use common::{assert_near, numbers};
use flashattn::half::f16;
use flashattn::{
    AppendInputs, AppendOutput, Array, DescBuilder, Dtype, Element, Inputs, Reason, Strides, View,
    ViewMut, Workspace, F8E4M3,
};

const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const DIM: usize = 16;

fn builder(dtype: Dtype) -> DescBuilder {
    DescBuilder::new(dtype, HEADS, DIM).heads_kv(HEADS_KV)
}

/// One head of a token at a position, its first `dim` elements turned.
fn turned(x: &[f32], position: usize, dim: usize, interleaved: bool) -> Vec<f32> {
    let mut y = x.to_vec();
    for c in 0..dim / 2 {
        let angle = position as f64 * 10000f64.powf(-2.0 * c as f64 / dim as f64);
        let (a, b) = if interleaved { (2 * c, 2 * c + 1) } else { (c, c + dim / 2) };
        let (u, w) = (f64::from(x[a]), f64::from(x[b]));
        y[a] = (u * angle.cos() - w * angle.sin()) as f32;
        y[b] = (u * angle.sin() + w * angle.cos()) as f32;
    }
    y
}

/// All heads of tokens, the first at a position.
fn all_turned(x: &[f32], first: usize, heads: usize, dim: usize, interleaved: bool) -> Vec<f32> {
    let head = |(n, x): (usize, &[f32])| turned(x, first + n / heads, dim, interleaved);
    x.chunks(DIM).enumerate().flat_map(head).collect()
}

#[test]
fn dense_rotated_and_seen_by_forward() {
    const ROOM: usize = 24;
    let lens = [5i32, 0];
    let (q, k, v) = (
        numbers(2 * 3 * HEADS * DIM, 1),
        numbers(2 * 3 * HEADS_KV * DIM, 2),
        numbers(2 * 3 * HEADS_KV * DIM, 3),
    );
    for (dim, interleaved) in [(DIM, false), (8, true)] {
        let cache = [2, ROOM, HEADS_KV, DIM];
        let old = numbers(2 * ROOM * HEADS_KV * DIM, 4);
        let (mut k_cache, mut v_cache) = (old.clone(), old.clone());
        let (mut q_out, mut lens_out) = (vec![f32::NAN; q.len()], [-1i32; 2]);
        let plan = builder(Dtype::F32).causal().build().unwrap();
        let new = [2, 3, HEADS_KV, DIM];
        let mut inputs =
            AppendInputs::new(View::new(&k, new).unwrap(), View::new(&v, new).unwrap())
                .q(View::new(&q, [2, 3, HEADS, DIM]).unwrap())
                .lens_kv(&lens)
                .rotary(10000.0, dim);
        if interleaved {
            inputs = inputs.interleaved();
        }
        let output = AppendOutput::new(
            ViewMut::new(&mut k_cache, cache).unwrap(),
            ViewMut::new(&mut v_cache, cache).unwrap(),
        )
        .q_out(ViewMut::new(&mut q_out, [2, 3, HEADS, DIM]).unwrap())
        .lens_out(&mut lens_out);
        plan.append_kv(&inputs, output).unwrap();

        assert_eq!(lens_out, [8, 3]);
        let (mut wanted_k, mut wanted_v) = (old.clone(), old);
        let (row, tokens) = (HEADS_KV * DIM, 3 * HEADS_KV * DIM);
        for (b, &len) in lens.iter().enumerate() {
            let first = (b * ROOM + len as usize) * row;
            let new = all_turned(&k[b * tokens..][..tokens], len as usize, 2, dim, interleaved);
            wanted_k[first..first + tokens].copy_from_slice(&new);
            wanted_v[first..first + tokens].copy_from_slice(&v[b * tokens..][..tokens]);
            let queries = &q[b * 3 * HEADS * DIM..][..3 * HEADS * DIM];
            let wanted = all_turned(queries, len as usize, HEADS, dim, interleaved);
            assert_near(&q_out[b * 3 * HEADS * DIM..][..3 * HEADS * DIM], &wanted, 1e-6);
        }
        assert_near(&k_cache, &wanted_k, 1e-6);
        assert_eq!(v_cache, wanted_v);

        // Forward sees what was appended: the last query of the second sequence takes 3 keys.
        let mut o = vec![f32::NAN; q.len()];
        let seen = Inputs::new(
            View::new(&q_out, [2, 3, HEADS, DIM]).unwrap(),
            View::new(&k_cache, cache).unwrap(),
            View::new(&v_cache, cache).unwrap(),
        );
        let o_view = ViewMut::new(&mut o, [2, 3, HEADS, DIM]).unwrap();
        plan.forward(&seen.lens_kv(&lens_out), o_view, &mut Workspace::new()).unwrap();
        let head = |x: &[f32], heads: usize, first: usize, h: usize| -> Vec<f32> {
            x[first * heads * DIM..]
                .chunks(heads * DIM)
                .take(3)
                .flat_map(|t| t[h * DIM..][..DIM].to_vec())
                .collect()
        };
        let wanted = common::naive::attention(
            &head(&q_out, HEADS, 3, 1),
            &head(&k_cache, HEADS_KV, ROOM, 0),
            &head(&v_cache, HEADS_KV, ROOM, 0),
            DIM,
            DIM,
            true,
        );
        assert_near(&head(&o, HEADS, 3, 1), &wanted, 1e-5);
    }
}

/// Tables of the same angles write the same as a base, whether they lie packed or in wider rows.
#[test]
fn tables_of_angles() {
    const ROOM: usize = 6;
    let (cache, new) = ([1, ROOM, HEADS_KV, DIM], [1, 2, HEADS_KV, DIM]);
    let k = numbers(2 * HEADS_KV * DIM, 5);
    let plan = builder(Dtype::F32).build().unwrap();
    let angle = |n: usize| {
        let (position, c) = (n / (DIM / 2), n % (DIM / 2));
        position as f64 * 10000f64.powf(-2.0 * c as f64 / DIM as f64)
    };
    let cos: Vec<f32> = (0..9 * DIM / 2).map(|n| angle(n).cos() as f32).collect();
    let sin: Vec<f32> = (0..9 * DIM / 2).map(|n| angle(n).sin() as f32).collect();
    // (position, cos and sin, dim / 2)
    let both: Vec<f32> =
        cos.chunks(DIM / 2).zip(sin.chunks(DIM / 2)).flat_map(|(c, s)| [c, s].concat()).collect();
    let wide = Strides { batch: 0, head: 0, seq: DIM };
    let with = |inputs: AppendInputs<'_, f32>| {
        let mut k_cache = vec![0f32; ROOM * HEADS_KV * DIM];
        let output = AppendOutput::only_k(ViewMut::new(&mut k_cache, cache).unwrap());
        plan.append_kv(&inputs, output).map(|()| k_cache)
    };
    let inputs = || AppendInputs::only_k(View::new(&k, new).unwrap()).lens_kv(&[3]).positions(&[7]);
    let wanted = with(inputs().rotary(10000.0, DIM)).unwrap();
    assert_near(&wanted[3 * HEADS_KV * DIM..][..k.len()], &all_turned(&k, 7, 2, DIM, false), 1e-6);
    assert!(wanted[..3 * HEADS_KV * DIM].iter().all(|&x| x == 0.0));
    assert_near(&with(inputs().rotary_tables(&cos, &sin, DIM)).unwrap(), &wanted, 1e-6);
    let shaped = Array::from(&cos).dims([9, DIM / 2]);
    assert_near(&with(inputs().rotary_tables(shaped, &sin, DIM)).unwrap(), &wanted, 1e-6);
    let (c, s) =
        (Array::from(&both[..]).strides(wide), Array::from(&both[DIM / 2..]).strides(wide));
    assert_near(&with(inputs().rotary_tables(c, s, DIM)).unwrap(), &wanted, 1e-6);

    // A row short for the position, tables that differ, and sizes that are no rows.
    let error = with(inputs().rotary_tables(&cos, &sin[..8 * DIM / 2], DIM)).unwrap_err();
    assert_eq!((error.reason, error.field.as_str()), (Reason::SIZE, "rotary_sin"));
    let error = with(inputs().rotary_tables(&cos[1..], &sin, DIM)).unwrap_err();
    assert!(error.message.contains("71 elements, which are no rows of 8"), "{error}");
    let shaped = Array::from(&cos).dims([6, 12]);
    assert_eq!(with(inputs().rotary_tables(shaped, &sin, DIM)).unwrap_err().field, "rotary_cos");
}

/// Packed new tokens into pages of 8 bits.
#[test]
fn packed_tokens_into_pages_of_8_bits() {
    const PAGE: usize = 16;
    let (cu, lens, table) = ([0i32, 2, 5], [15i32, 1], [2i32, 0, 1, -1]);
    let k: Vec<f16> = numbers(5 * HEADS_KV * DIM, 6).into_iter().map(f16::from_f32).collect();
    let plan = builder(Dtype::F8E4M3).dtype_o(Dtype::F32).varlen_q().paged(PAGE).build().unwrap();
    let descale = [0.5f32];
    let pool = [3, PAGE, HEADS_KV, DIM];
    let mut caches = [vec![F8E4M3(0x7f); 3 * PAGE * HEADS_KV * DIM], vec![]];
    caches[1] = caches[0].clone();
    let mut lens_kv = lens;
    let [k_cache, v_cache] = &mut caches;
    let new = View::new(&k, [5, HEADS_KV, DIM]).unwrap();
    let inputs = AppendInputs::new(new, new)
        .cu_seqlens_q(&cu)
        .page_table(Array::from(&table).dims([2, 2]))
        .descale_k(Array::from(&descale).dims([1, 1, 1]));
    let output = AppendOutput::<f16, _>::new(
        ViewMut::new(k_cache, pool).unwrap(),
        ViewMut::new(v_cache, pool).unwrap(),
    );
    plan.append_kv(&inputs, output.lens_in_place(&mut lens_kv)).unwrap();
    assert_eq!(lens_kv, [17, 4]);
    let row = HEADS_KV * DIM;
    let mut wanted = [vec![F8E4M3(0x7f); 3 * PAGE * row], vec![F8E4M3(0x7f); 3 * PAGE * row]];
    for (token, place) in [2 * PAGE + 15, 0, PAGE + 1, PAGE + 2, PAGE + 3].into_iter().enumerate() {
        for c in 0..row {
            let x = k[token * row + c].to_f32();
            wanted[0][place * row + c] = F8E4M3::from_f32(x / 0.5);
            wanted[1][place * row + c] = F8E4M3::from_f32(x);
        }
    }
    assert!(caches == wanted);
}

#[test]
fn queries_in_place() {
    let plan = builder(Dtype::F32).build().unwrap();
    let q = numbers(3 * HEADS * DIM, 7);
    let (mut rotated, mut other) = (q.clone(), vec![f32::NAN; q.len()]);
    let dims = [1, 3, HEADS, DIM];
    let output =
        AppendOutput::<f32>::default().q_in_place(ViewMut::new(&mut rotated, dims).unwrap());
    plan.append_kv(&AppendInputs::default().lens_kv(&[4]).rotary(10000.0, DIM), output).unwrap();
    assert_near(&rotated, &all_turned(&q, 4, HEADS, DIM, false), 1e-6);
    let inputs = AppendInputs::only_q(View::new(&q, dims).unwrap()).lens_kv(&[4]);
    let output = AppendOutput::<f32>::only_q(ViewMut::new(&mut other, dims).unwrap());
    plan.append_kv(&inputs.rotary(10000.0, DIM), output).unwrap();
    assert_eq!(rotated, other);
}

#[test]
fn refusals() {
    let plan = builder(Dtype::F32).build().unwrap();
    let (x, dims) = (numbers(2 * HEADS_KV * DIM, 8), [1, 2, HEADS_KV, DIM]);
    let view = View::new(&x, dims).unwrap();
    let mut caches = [vec![0f32; 4 * HEADS_KV * DIM], vec![0f32; 4 * HEADS_KV * DIM]];
    let mut check = |inputs: AppendInputs<'_, f32>, reason: Reason, words: &str| {
        let [k_cache, v_cache] = &mut caches;
        let room = [1, 4, HEADS_KV, DIM];
        let (k, v) = (ViewMut::new(k_cache, room).unwrap(), ViewMut::new(v_cache, room).unwrap());
        let error = plan.append_kv(&inputs, AppendOutput::new(k, v)).unwrap_err();
        assert!(error.reason == reason && error.message.contains(words), "{error}");
        assert!(caches.iter().flatten().all(|&x| x == 0.0));
    };
    let inputs = || AppendInputs::new(view, view).lens_kv(&[1]);
    check(AppendInputs::new(view, view), Reason::NULL_POINTER, "lens_kv");
    check(inputs().lens_kv(&[3]), Reason::LENGTHS, "lens_kv");
    check(inputs().lens_kv(&[1, 1]), Reason::SIZE, "lens_kv holds 2 elements");
    check(inputs().positions(&[1]), Reason::NULL_POINTER, "it goes with rotary_dim");
    check(
        inputs().max_seqlen_q(2),
        Reason::VALUE,
        "max_seqlen_q = 2 has a meaning only with VARLEN_Q",
    );
    check(inputs().rotary(10000.0, 7), Reason::SIZE, "rotary_dim = 7");
    let twice = View::strided(&x, [2, 2, HEADS_KV, DIM], Strides { batch: 0, ..view.strides() });
    let twice = twice.unwrap();
    check(AppendInputs::new(twice, twice), Reason::SIZE, "the cache holds 1 sequences");
    let one = View::new(&x[..HEADS_KV * DIM], [1, 1, HEADS_KV, DIM]).unwrap();
    check(AppendInputs::new(view, one), Reason::SIZE, "q, k and v are the same tokens");

    let [k_cache, v_cache] = &mut caches;
    let (mut lens, room) = ([0i32], [1, 4, HEADS_KV, DIM]);
    let short = AppendOutput::new(
        ViewMut::new(k_cache, room).unwrap(),
        ViewMut::new(&mut v_cache[..3 * HEADS_KV * DIM], [1, 3, HEADS_KV, DIM]).unwrap(),
    );
    let error = plan.append_kv(&inputs(), short).unwrap_err();
    assert!(error.message.contains("only their dim may differ"), "{error}");
    let output = AppendOutput::new(
        ViewMut::new(k_cache, room).unwrap(),
        ViewMut::new(v_cache, room).unwrap(),
    );
    let error = plan.append_kv(&inputs(), output.lens_in_place(&mut lens)).unwrap_err();
    assert_eq!((error.reason, error.field.as_str()), (Reason::OVERLAP, "lens_kv"));
    let mut eight = vec![F8E4M3(0); 4 * HEADS_KV * DIM];
    let output = AppendOutput::<f32, _>::only_k(ViewMut::new(&mut eight, room).unwrap());
    let error = plan.append_kv(&AppendInputs::only_k(view).lens_kv(&[1]), output).unwrap_err();
    assert_eq!((error.reason, error.field.as_str()), (Reason::DTYPE, "k_cache"));
}
