//! The cases that all languages share: tests/data/cases.txt and cases.bin of the repository.

mod common;

use common::file::{load, Case};
use flashattn::half::{bf16, f16};
use flashattn::{
    DescBuilder, Dtype, Element, Gradients, Inputs, Output, Plan, RowStrides, Upstream, View,
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
        backward += usize::from(case.backward.is_some());
        let dtypes = (case.desc("dtype"), case.desc("dtype_o"));
        let outcome = match dtypes {
            (1, _) => run::<f32, f32>(case, &mut workspace),
            (2, 1) => run::<f16, f32>(case, &mut workspace),
            (2, _) => run::<f16, f16>(case, &mut workspace),
            (3, 1) => run::<bf16, f32>(case, &mut workspace),
            (3, _) => run::<bf16, bf16>(case, &mut workspace),
            other => Err(format!("dtypes {other:?}")),
        };
        if let Err(sentence) = outcome {
            failures.push(format!("{}: {sentence}", case.name));
        }
    }
    println!("{} shared cases forward, {backward} of them backward", cases.len());
    assert!(!cases.is_empty() && backward > 0);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
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
                bias_dtype,
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

fn run<T: common::Bytes + Element, O: common::Bytes + Element>(
    case: &Case,
    workspace: &mut Workspace,
) -> Result<(), String> {
    run_case::<T, O>(case, workspace).map_err(|error| error.to_string())
}

fn run_case<T: common::Bytes + Element, O: common::Bytes + Element>(
    case: &Case,
    workspace: &mut Workspace,
) -> Result<(), Box<dyn std::error::Error>> {
    let plan = plan(case)?;
    let (q, k, v) = (case.array::<T>("q"), case.array::<T>("k"), case.array::<T>("v"));
    let (dq, dk, dv) = (case.dims("q"), case.dims("k"), case.dims("v"));
    let held = Held::new(case);
    let inputs = held.beside(
        case,
        Inputs::new(common::view(&q, &dq)?, common::view(&k, &dk)?, common::view(&v, &dv)?),
    );

    // o: as q, with the elements of v.
    let mut o_dims = dq.clone();
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
    if case.backward.is_none() {
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
        common::view_mut(&mut gq, &dq)?,
        common::view_mut(&mut gk, &dk)?,
        common::view_mut(&mut gv, &dv)?,
    );
    if !dbias.is_empty() {
        let strides = RowStrides {
            batch: case.backward("dbias_stride_batch"),
            head: case.backward("dbias_stride_head"),
            row: case.backward("dbias_stride_row"),
        };
        gradients = gradients.dbias(&mut dbias, strides);
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

/// The arrays beside q, k, v.
struct Held {
    cu: [Vec<i32>; 2],
    lens: [Vec<i32>; 2],
    pages: Vec<i32>,
    bias: (Vec<f32>, Vec<f16>, Vec<bf16>, Vec<u8>),
    alibi: Vec<f32>,
    sink: Vec<f32>,
    blocks: Vec<u8>,
}

impl Held {
    fn new(case: &Case) -> Self {
        let dtype = case.entry("bias").map_or("", |array| array.dtype.as_str());
        Self {
            cu: [case.array("cu_seqlens_q"), case.array("cu_seqlens_kv")],
            lens: [case.array("lens_q"), case.array("lens_kv")],
            pages: case.array("page_table"),
            bias: (
                if dtype == "f32" { case.array("bias") } else { Vec::new() },
                if dtype == "f16" { case.array("bias") } else { Vec::new() },
                if dtype == "bf16" { case.array("bias") } else { Vec::new() },
                if dtype == "u8" { case.array("bias") } else { Vec::new() },
            ),
            alibi: case.array("alibi_slopes"),
            sink: case.array("sink"),
            blocks: case.array("block_mask"),
        }
    }

    fn beside<'a, T: Element>(&'a self, case: &Case, mut inputs: Inputs<'a, T>) -> Inputs<'a, T> {
        let strides = |name: &str| RowStrides {
            batch: case.input(&format!("{name}_stride_batch")) as usize,
            head: case.input(&format!("{name}_stride_head")) as usize,
            row: case.input(&format!("{name}_stride_row")) as usize,
        };
        inputs = inputs.seed(case.input("rng_seed"), case.input("rng_offset"));
        if !self.cu[0].is_empty() {
            inputs = inputs.cu_seqlens_q(&self.cu[0]).max_seqlen_q(case.shape("seqlen_q"));
        }
        if !self.cu[1].is_empty() {
            inputs = inputs.cu_seqlens_kv(&self.cu[1]).max_seqlen_kv(case.shape("seqlen_kv"));
        }
        if !self.lens[0].is_empty() {
            inputs = inputs.lens_q(&self.lens[0]);
        }
        if !self.lens[1].is_empty() {
            inputs = inputs.lens_kv(&self.lens[1]);
        }
        if !self.pages.is_empty() {
            let stride = case.input("page_table_stride") as usize;
            inputs = inputs.page_table(&self.pages, stride);
            inputs = inputs.max_seqlen_kv(case.shape("seqlen_kv"));
        }
        let bias = &self.bias;
        if !bias.0.is_empty() {
            inputs = inputs.bias(&bias.0, strides("bias"));
        }
        if !bias.1.is_empty() {
            inputs = inputs.bias(&bias.1, strides("bias"));
        }
        if !bias.2.is_empty() {
            inputs = inputs.bias(&bias.2, strides("bias"));
        }
        if !bias.3.is_empty() {
            inputs = inputs.bias(&bias.3, strides("bias"));
        }
        if !self.alibi.is_empty() {
            let stride = case.input("alibi_stride_batch") as usize;
            inputs = inputs.alibi_slopes(&self.alibi, stride);
        }
        if !self.sink.is_empty() {
            inputs = inputs.sink(&self.sink);
        }
        if !self.blocks.is_empty() {
            inputs = inputs.block_mask(&self.blocks, strides("block_mask"));
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
