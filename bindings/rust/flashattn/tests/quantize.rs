//! Arrays of 8 bits made of wider ones: the bits that all languages share, in
//! tests/data/quantized.txt, packed sequences, what is refused.

mod common;

use std::collections::HashMap;

use common::numbers;
use flashattn::{
    DescBuilder, Dtype, Element, QuantizeInputs, QuantizeOutput, Reason, View, ViewMut, F8E4M3,
};

const DIMS: [(&str, [usize; 4]); 3] =
    [("q", [2, 5, 4, 32]), ("k", [2, 9, 2, 32]), ("v", [2, 9, 2, 8])];

/// Numbers that every language makes alike.
fn given(name: &str) -> (Vec<f32>, [usize; 4]) {
    let seed = DIMS.iter().position(|(known, _)| *known == name).unwrap() + 1;
    let dims = DIMS[seed - 1].1;
    let number = |n| (((n * 37 + seed * 11) % 101) as f32 - 50.0) / 16.0;
    ((0..dims.iter().product()).map(number).collect(), dims)
}

/// FNV-1a of an array's bytes.
fn bits<T: Element>(x: &[T]) -> String {
    // SAFETY: the types of elements are plain numbers.
    let bytes =
        unsafe { std::slice::from_raw_parts(x.as_ptr().cast::<u8>(), std::mem::size_of_val(x)) };
    let hash = bytes
        .iter()
        .fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    format!("{hash:08x}")
}

type Words<'a> = HashMap<&'a str, &'a str>;

fn words<'a>(text: &'a str, kind: &str) -> Words<'a> {
    let line = text.lines().find_map(|line| line.strip_prefix(kind)).unwrap_or("");
    line.split_whitespace().map(|word| word.split_once('=').unwrap()).collect()
}

fn run<Q: Element, K: Element>(text: &str) {
    let (options, expected, sums) =
        (words(text, "options "), words(text, "bits "), words(text, "sums "));
    let number = |name| options.get(name).map_or(0, |n| n.parse().unwrap());
    let plan = DescBuilder::new(Q::DTYPE, 4, 32)
        .heads_kv(2)
        .dim_v(8)
        .dtype_kv(K::DTYPE)
        .dtype_o(Dtype::F32)
        .descale_block(number("descale_block"))
        .build()
        .unwrap();
    let (q, q_dims) = given("q");
    let (k, k_dims) = given("k");
    let (v, v_dims) = given("v");
    let (mut q_out, mut k_out, mut v_out) = (
        vec![Q::from_f32(0.0); q.len()],
        vec![K::from_f32(0.0); k.len()],
        vec![K::from_f32(0.0); v.len()],
    );
    let blocks = |tokens: usize| match number("descale_block") {
        0 => 1,
        block => tokens.div_ceil(block),
    };
    let (mut of_q, mut of_k, mut of_v) =
        (vec![0f32; 4 * blocks(5)], vec![0f32; 4 * blocks(9)], vec![0f32; 4 * blocks(9)]);
    let (mut k_mean, mut lse_shift) = ([0f32; 2 * 2 * 32], [0f32; 2 * 4 * 5]);
    let (mut inputs, mut output) = (QuantizeInputs::new(), QuantizeOutput::new());
    let arrays: Vec<&str> = text.lines().next().unwrap().split(' ').skip(2).collect();
    if arrays.contains(&"q") {
        inputs = inputs.q(View::new(&q, q_dims).unwrap());
        output = output.q(ViewMut::new(&mut q_out, q_dims).unwrap());
    }
    if expected.contains_key("descale_q") {
        output = output.descale_q(&mut of_q);
    }
    if arrays.contains(&"k") {
        inputs = inputs.k(View::new(&k, k_dims).unwrap());
        output = output.k(ViewMut::new(&mut k_out, k_dims).unwrap()).descale_k(&mut of_k);
    }
    if arrays.contains(&"v") {
        inputs = inputs.v(View::new(&v, v_dims).unwrap());
        output = output.v(ViewMut::new(&mut v_out, v_dims).unwrap()).descale_v(&mut of_v);
    }
    if number("smooth_k") > 0 {
        inputs = inputs.smooth_k();
        output = output.k_mean(&mut k_mean);
    }
    if sums.contains_key("lse_shift") {
        output = output.lse_shift(&mut lse_shift);
    }
    if let Some(seed) = options.get("rotation_seed") {
        inputs = inputs.rotate(seed.parse().unwrap());
    }
    plan.quantize(&inputs, output).unwrap();
    let made = HashMap::from([
        ("q", bits(&q_out)),
        ("k", bits(&k_out)),
        ("v", bits(&v_out)),
        ("descale_q", bits(&of_q)),
        ("descale_k", bits(&of_k)),
        ("descale_v", bits(&of_v)),
    ]);
    for (name, hash) in expected {
        assert_eq!(made[name], hash, "{name} of {text}");
    }
    let sum = |x: &[f32]| x.iter().map(|x| f64::from(x.abs())).sum::<f64>();
    let made = HashMap::from([("k_mean", sum(&k_mean)), ("lse_shift", sum(&lse_shift))]);
    for (name, wanted) in sums {
        let wanted: f64 = wanted.parse().unwrap();
        assert!((made[name] - wanted).abs() < 1e-4 * wanted, "{name} of {text}");
    }
}

#[test]
fn shared_bits() {
    let Some(all) = common::file::text("quantized.txt") else {
        eprintln!("skipped: tests/data/quantized.txt of the repository is not here");
        return;
    };
    let mut count = 0;
    for text in all.trim().split("\n\n") {
        let options = words(text, "options ");
        if options.contains_key("cache") {
            run::<f32, F8E4M3>(text);
        } else if options.get("dtype_kv") == Some(&"I8") {
            run::<F8E4M3, i8>(text);
        } else {
            run::<F8E4M3, F8E4M3>(text);
        }
        count += 1;
    }
    println!("{count} shared quantisations");
}

#[test]
fn packed_sequences() {
    let plan = DescBuilder::new(Dtype::F8E4M3, 2, 8)
        .varlen()
        .descale_block(4)
        .dtype_o(Dtype::F32)
        .build()
        .unwrap();
    let (x, cu) = (numbers(9 * 2 * 8, 3), [0i32, 3, 9]);
    let mut out = vec![F8E4M3(0); x.len()];
    let mut descale = [f32::NAN; 2 * 2 * 2];
    plan.quantize(
        &QuantizeInputs::new()
            .k(View::new(&x, [9, 2, 8]).unwrap())
            .cu_seqlens_q(&cu)
            .cu_seqlens_kv(&cu),
        QuantizeOutput::<F8E4M3>::new()
            .k(ViewMut::new(&mut out, [9, 2, 8]).unwrap())
            .descale_k(&mut descale),
    )
    .unwrap();
    for (row, head) in (0..9).flat_map(|row| (0..2).map(move |head| (row, head))) {
        let (b, i) = if row < 3 { (0, row) } else { (1, row - 3) };
        let factor = descale[(b * 2 + head) * 2 + i / 4];
        let at = (row * 2 + head) * 8;
        for (x, out) in x[at..at + 8].iter().zip(&out[at..at + 8]) {
            assert_eq!(*out, F8E4M3::from_f32(x * (1.0 / factor)));
        }
    }
}

#[test]
fn refusals() {
    let plan = DescBuilder::new(Dtype::F8E4M3, 2, 8).dtype_o(Dtype::F32).build().unwrap();
    let (x, dims) = (vec![1f32; 3 * 2 * 8], [1, 3, 2, 8]);
    let view = View::new(&x, dims).unwrap();
    let mut narrow = vec![F8E4M3(0); x.len()];
    let mut integers = vec![0i8; x.len()];
    let mut descale = [0f32; 2];
    let refused = |inputs: QuantizeInputs<'_, f32>, output, reason, field: &str| {
        let error = plan.quantize(&inputs, output).unwrap_err();
        assert_eq!((error.reason, error.field.as_str()), (reason, field), "{error}");
    };
    let none = QuantizeOutput::<F8E4M3, i8>::new;
    let out = ViewMut::new(&mut integers, dims).unwrap();
    let inputs = QuantizeInputs::new().k(view);
    refused(inputs.clone(), none().k(out), Reason::DTYPE, "k_out");
    let out = ViewMut::new(&mut narrow, dims).unwrap();
    refused(inputs.clone(), none().q(out), Reason::NULL_POINTER, "q_out");
    refused(inputs.clone(), none(), Reason::NULL_POINTER, "k_out.data");
    refused(inputs.clone(), none().descale_k(&mut descale[..1]), Reason::SIZE, "descale_k");
    let shorter = View::new(&x[16..], [1, 2, 2, 8]).unwrap();
    refused(inputs.clone().v(shorter), none(), Reason::SIZE, "v");
    let two = View::new(&x[16..], [2, 1, 2, 8]).unwrap();
    refused(inputs.clone().q(two), none(), Reason::SIZE, "batch");
    refused(inputs.max_seqlen_kv(3), none(), Reason::VALUE, "max_seqlen_kv");
}
