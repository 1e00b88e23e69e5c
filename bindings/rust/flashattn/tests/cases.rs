//! The cases and refusals that all languages share: tests/data of the repository.

mod common;

use std::collections::HashMap;
use std::error::Error;

use common::file::{load, load_refusals, Case};
use flashattn::half::{bf16, f16};
use flashattn::{
    Array, ArrayMut, DescBuilder, Dtype, Element, Gradients, Inputs, Output, Plan, Upstream, View,
    ViewMut, Workspace,
};

#[test]
fn shared_cases() {
    let Some(cases) = load() else {
        eprintln!("skipped: tests/data/cases.txt of the repository is not here");
        return;
    };
    let mut workspace = Workspace::new();
    let (mut backward, mut failures) = (0, Vec::new());
    for case in &cases {
        backward += usize::from(case.expected("dq").is_some());
        if let Err(message) = run(case, &mut workspace) {
            failures.push(format!("{}: {message}", case.name));
        }
    }
    println!("{} shared cases forward, {backward} of them backward", cases.len());
    assert!(!cases.is_empty() && backward > 0);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The status, reason and field of a refusal are the same in all languages.
#[test]
fn shared_refusals() {
    let Some(cases) = load() else {
        eprintln!("skipped: tests/data/cases.txt of the repository is not here");
        return;
    };
    let refusals = load_refusals(&cases);
    for refusal in &refusals {
        let outcome = run(&refusal.case, &mut Workspace::new());
        let error = outcome.expect_err(&refusal.name);
        let error = error.downcast::<flashattn::Error>().expect(&refusal.name);
        let [status, reason, field] = &refusal.expected;
        let said = [format!("{:?}", error.status), format!("{:?}", error.reason)];
        assert_eq!(said, [format!("ERROR_{status}"), reason.clone()], "{}: {error}", refusal.name);
        assert_eq!(&error.field, field, "{}: {error}", refusal.name);
        assert!(error.message.contains(field), "{}: {error}", refusal.name);
    }
    println!("{} shared refusals", refusals.len());
    assert!(!refusals.is_empty());
}

/// The descriptor's fields by their names in the header.
fn plan(case: &Case) -> Result<Plan, flashattn::Error> {
    DescBuilder::new(Dtype::F32, 1, 1)
        .raw(|d| {
            macro_rules! fields {
                ($($field:ident),*) => {
                    for (name, value) in &case.desc {
                        match name.as_str() {
                            $(stringify!($field) => d.$field = value.parse().unwrap(),)*
                            other => panic!("{}: unknown field {other}", case.name),
                        }
                    }
                };
            }
            fields!(
                ops,
                dtype,
                dtype_kv,
                dtype_o,
                heads_q,
                heads_kv,
                dim_qk,
                dim_v,
                layout,
                page_size,
                mask,
                window_left,
                window_right,
                chunk,
                block_q,
                block_kv,
                bias,
                dtype_bias,
                features,
                determinism,
                scale,
                softcap,
                dropout,
                splits,
                max_batch,
                max_seqlen_q,
                max_seqlen_kv,
                max_total_q,
                max_total_kv,
                threads
            );
        })
        .build()
}

fn run(case: &Case, workspace: &mut Workspace) -> Result<(), Box<dyn Error>> {
    match (case.desc("dtype"), case.desc("dtype_o")) {
        (1, _) => run_case::<f32, f32>(case, workspace),
        (2, 1) => run_case::<f16, f32>(case, workspace),
        (2, _) => run_case::<f16, f16>(case, workspace),
        (3, 1) => run_case::<bf16, f32>(case, workspace),
        (3, _) => run_case::<bf16, bf16>(case, workspace),
        other => Err(format!("dtypes {other:?}").into()),
    }
}

fn run_case<T: common::Bytes + Element, O: common::Bytes + Element>(
    case: &Case,
    workspace: &mut Workspace,
) -> Result<(), Box<dyn Error>> {
    let plan = plan(case)?;
    let (q, k, v) = (case.array::<T>("q"), case.array::<T>("k"), case.array::<T>("v"));
    let (dq, dk, dv) = (case.dims("q"), case.dims("k"), case.dims("v"));
    let held = Held::new(case);
    let inputs = Inputs::new(common::view(&q, dq)?, common::view(&k, dk)?, common::view(&v, dv)?);
    let inputs = held.beside(case, inputs);

    // o: as q, with the elements of v.
    let mut o_dims = dq.to_vec();
    *o_dims.last_mut().unwrap() = *dv.last().unwrap();
    let rows: usize = o_dims[..o_dims.len() - 1].iter().product();
    let nan = O::from_f32(f32::NAN);
    let mut o = vec![nan; o_dims.iter().product()];
    let mut lse = vec![f32::NAN; rows];
    let has_lse = case.desc("features") & 1 != 0;
    let mut output = Output::new(common::view_mut(&mut o, &o_dims)?);
    if has_lse {
        output = output.lse(&mut lse);
    }
    plan.forward(&inputs, output, workspace)?;
    case.compare("o", &o)?;
    if has_lse {
        case.compare("lse", &lse)?;
    }
    if case.expected("dq").is_none() {
        return Ok(());
    }

    let dout = case.array::<O>("dout");
    let dlse = case.array::<f32>("dlse");
    let nan = T::from_f32(f32::NAN);
    let (mut gq, mut gk, mut gv) = (vec![nan; q.len()], vec![nan; k.len()], vec![nan; v.len()]);
    let mut dbias = vec![f32::NAN; case.expected("dbias").map_or(0, |e| e.values.len())];
    let mut dsink = vec![f32::NAN; case.expected("dsink").map_or(0, |e| e.values.len())];
    let mut upstream =
        Upstream::new(common::view(&o, &o_dims)?, &lse, common::view(&dout, &o_dims)?);
    if !dlse.is_empty() {
        upstream = upstream.dlse(&dlse);
    }
    let mut gradients = Gradients::new(
        common::view_mut(&mut gq, dq)?,
        common::view_mut(&mut gk, dk)?,
        common::view_mut(&mut gv, dv)?,
    );
    if !dbias.is_empty() {
        let dims = case.expected("dbias").unwrap().dims.clone();
        let dims = <[usize; 4]>::try_from(dims).unwrap();
        gradients = gradients.dbias(ArrayMut::from(&mut dbias).dims(dims));
    }
    if !dsink.is_empty() {
        gradients = gradients.dsink(&mut dsink);
    }
    plan.backward(&inputs, &upstream, gradients, workspace)?;
    case.compare("dq", &gq)?;
    case.compare("dk", &gk)?;
    case.compare("dv", &gv)?;
    case.compare("dbias", &dbias)?;
    case.compare("dsink", &dsink)?;
    Ok(())
}

/// The arrays beside q, k, v, by their names.
#[derive(Default)]
struct Held {
    i32: HashMap<String, Vec<i32>>,
    f32: HashMap<String, Vec<f32>>,
    f16: HashMap<String, Vec<f16>>,
    bf16: HashMap<String, Vec<bf16>>,
    u8: HashMap<String, Vec<u8>>,
}

/// An array in the shape that the case says.
fn shaped<'a, T>(case: &Case, name: &str, array: &'a [T]) -> Array<'a, T> {
    let array = Array::from(array);
    match *case.dims(name) {
        [heads] if name == "alibi_slopes" => array.dims([1, heads]), // the same for all sequences
        [_] => array,
        [a, b] => array.dims([a, b]),
        [a, b, c, d] => array.dims([a, b, c, d]),
        ref dims => panic!("{name}: {dims:?}"),
    }
}

/// Gives the inputs every array of the header's table that the case has.
macro_rules! beside {
    ($({ $index:literal, $name:ident, $type:tt, $doc:literal })*) => {
        fn beside<'a, T: Element>(held: &'a Held, case: &Case, mut inputs: Inputs<'a, T>) -> Inputs<'a, T> {
            $(beside!(@ $type $name held case inputs);)*
            inputs
        }
    };
    (@ any $name:ident $held:ident $case:ident $inputs:ident) => {
        beside!(@ f32 $name $held $case $inputs);
        beside!(@ f16 $name $held $case $inputs);
        beside!(@ bf16 $name $held $case $inputs);
        beside!(@ u8 $name $held $case $inputs);
    };
    // No case has any.
    (@ u32 $name:ident $held:ident $case:ident $inputs:ident) => {};
    (@ u64 $name:ident $held:ident $case:ident $inputs:ident) => {};
    (@ $type:ident $name:ident $held:ident $case:ident $inputs:ident) => {
        if let Some(array) = $held.$type.get(stringify!($name)) {
            $inputs = $inputs.$name(shaped($case, stringify!($name), array));
        }
    };
}

flashattn::sys::arrays!(flashattn_args, input => beside);

impl Held {
    fn new(case: &Case) -> Self {
        let mut held = Self::default();
        for (name, entry) in &case.arrays {
            let name = name.clone();
            match entry.dtype.as_str() {
                "i32" => drop(held.i32.insert(name.clone(), case.array(&name))),
                "f32" => drop(held.f32.insert(name.clone(), case.array(&name))),
                "f16" => drop(held.f16.insert(name.clone(), case.array(&name))),
                "bf16" => drop(held.bf16.insert(name.clone(), case.array(&name))),
                "u8" => drop(held.u8.insert(name.clone(), case.array(&name))),
                other => panic!("{name}: {other}"),
            }
        }
        held
    }

    fn beside<'a, T: Element>(&'a self, case: &Case, inputs: Inputs<'a, T>) -> Inputs<'a, T> {
        let mut inputs = beside(self, case, inputs);
        inputs = inputs.rng_seed(case.args("rng_seed")).rng_offset(case.args("rng_offset"));
        if self.i32.contains_key("cu_seqlens_q") {
            inputs = inputs.max_seqlen_q(case.args("seqlen_q") as usize);
        }
        if ["cu_seqlens_kv", "page_table"].iter().any(|&name| self.i32.contains_key(name)) {
            inputs = inputs.max_seqlen_kv(case.args("seqlen_kv") as usize);
        }
        inputs
    }
}

#[test]
fn views_of_dims_given_at_run_time() {
    let data = [0f32; 12];
    assert!(common::view(&data, &[1, 2, 2, 3]).unwrap().dims() == [1, 2, 2, 3].into());
    assert!(common::view(&data, &[2, 2, 3]).unwrap().dims() == [2, 2, 3].into());
    let _: View<'_, f32> = View::new(&data, [12, 1, 1]).unwrap();
    assert!(ViewMut::new(&mut [0f32; 3], [2, 1, 1]).is_err());
}
