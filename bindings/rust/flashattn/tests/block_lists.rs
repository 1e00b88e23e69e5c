//! Block masks by lists, and lengths of blocks.

mod common;

use common::{assert_near, numbers};
use flashattn::{
    Array, DescBuilder, Dtype, Inputs, Reason, Result, Strides, View, ViewMut, Workspace,
};

const B: usize = 2;
const S: usize = 19;
const H: usize = 3;
const D: usize = 16;
const DIMS: [usize; 4] = [B, S, H, D];
const LEN: usize = B * S * H * D;
// Of 8 queries and 4 keys a block: 3 by 5.
const ON: [[u8; 5]; 3] = [[1, 0, 0, 0, 1], [0; 5], [0, 1, 1, 1, 0]];
const INDEX: [i32; 9] = [4, 0, -1, -1, -1, -1, 3, 1, 2]; // -1: none
const LENS: [i32; 5] = [4, 4, 1, 0, 2];

fn desc() -> DescBuilder {
    DescBuilder::new(Dtype::F32, H, D).causal().blocks(8, 4)
}

fn lists() -> DescBuilder {
    desc().block_lists()
}

/// q, k and v, the same on every run.
fn three() -> [Vec<f32>; 3] {
    [1, 2, 3].map(|seed| numbers(LEN, seed))
}

fn inputs(data: &[Vec<f32>; 3]) -> Inputs<'_, f32> {
    let [q, k, v] = data.each_ref().map(|x| View::new(x, DIMS).unwrap());
    Inputs::new(q, k, v)
}

fn forward(desc: DescBuilder, inputs: Inputs<'_, f32>) -> Result<Vec<f32>> {
    let mut o = vec![f32::NAN; LEN];
    let output = ViewMut::new(&mut o, DIMS)?;
    desc.build()?.forward(&inputs, output, &mut Workspace::new())?;
    Ok(o)
}

/// Strides of which but that of the rows are 0.
fn rows(seq: usize) -> Strides {
    Strides { batch: 0, head: 0, seq }
}

#[test]
fn lists_are_the_mask_that_they_mean() {
    let data = three();
    let mask = ON.concat();
    let masked = inputs(&data).block_mask(Array::from(&mask).dims([1, 1, 3, 5]));
    let wanted = forward(desc(), masked).unwrap();
    let listed = |index: Array<'_, i32>| {
        assert_eq!(forward(lists(), inputs(&data).block_index(index)).unwrap(), wanted);
    };
    listed(Array::from(&INDEX).dims([1, 1, 3, 3]));
    listed(Array::from(&INDEX.repeat(B * H)));
    listed(Array::from(&INDEX).strides(rows(3)));
    // Rows of 4 entries, of which 3 count.
    listed(Array::from(&[4, 0, -1, 1, -1, -1, -1, 1, 3, 1, 2]).strides(rows(4)));

    // Block-sparse rows: one list, in which each row has its place.
    let (indices, indptr) = ([0, 4, 1, 2, 3], [0, 2, 2, 5]);
    let sparse = inputs(&data)
        .block_index(Array::from(&indices).strides(rows(0)))
        .block_begin(Array::from(&indptr[..3]).dims([1, 1, 3]))
        .block_end(Array::from(&indptr[1..]).dims([1, 1, 3]));
    assert_eq!(forward(lists(), sparse).unwrap(), wanted);
    let none: [i32; 0] = [];
    assert_eq!(forward(lists(), inputs(&data).block_index(&none)).unwrap(), [0.0; LEN]);
}

#[test]
fn lengths_of_blocks() {
    let data = three();
    let visible: Vec<bool> = (0..S * S)
        .map(|at| (at / S, at % S))
        .map(|(i, j)| ON[i / 8][j / 4] == 1 && j % 4 < LENS[j / 4] as usize)
        .collect();
    let bias = inputs(&data).bias(Array::from_bools(&visible).dims([1, 1, S, S]));
    let biased = DescBuilder::new(Dtype::F32, H, D).causal().bias(Dtype::U8);
    let wanted = forward(biased, bias).unwrap();
    let short = || inputs(&data).block_lens(Array::from(&LENS).dims([1, 1, 5]));
    let mask = ON.concat();
    let masked = short().block_mask(Array::from(&mask).dims([1, 1, 3, 5]));
    assert_near(&forward(desc().block_lens(), masked).unwrap(), &wanted, 1e-6);
    let listed = short().block_index(Array::from(&INDEX).dims([1, 1, 3, 3]));
    assert_near(&forward(lists().block_lens(), listed).unwrap(), &wanted, 1e-6);
}

#[test]
fn refusals() {
    let data = three();
    let (mask, index) = (ON.concat(), Array::from(&INDEX));
    let (mask, lens) = (Array::from(&mask).dims([1, 1, 3, 5]), Array::from(&LENS));
    let listed = || inputs(&data).block_index(index.dims([1, 1, 3, 3]));
    for (desc, inputs, reason, field) in [
        // 9 entries are no rows for 18.
        (lists(), inputs(&data).block_index(index), Reason::SIZE, "block_index"),
        (lists(), inputs(&data).block_index(index.dims([1, 3, 3])), Reason::SIZE, "block_index"),
        (lists(), inputs(&data).block_index(index.strides(rows(5))), Reason::SIZE, "block_index"),
        (lists(), listed().block_end(lens), Reason::SIZE, "block_end"),
        (lists().block_lens(), listed().block_lens(lens), Reason::SIZE, "block_lens"),
        (lists(), inputs(&data), Reason::NULL_POINTER, "block_index"),
        (desc(), listed().block_mask(mask), Reason::NULL_POINTER, "block_index"),
        (lists(), listed().block_mask(mask), Reason::NULL_POINTER, "block_mask.data"),
        (desc(), inputs(&data).block_mask(mask).block_end(lens), Reason::SIZE, "block_end"),
        (lists().block_lens(), listed(), Reason::NULL_POINTER, "block_lens.data"),
        (desc().block_lens(), inputs(&data), Reason::NULL_POINTER, "block_mask.data"),
    ] {
        let error = forward(desc, inputs).expect_err(field);
        assert_eq!((error.reason, error.field.as_str()), (reason, field), "{error}");
    }
    for desc in [DescBuilder::block_lists, DescBuilder::block_lens] {
        let error = desc(DescBuilder::new(Dtype::F32, H, D)).check().unwrap_err();
        assert_eq!((error.reason, error.field.as_str()), (Reason::MASK_COMBINATION, "mask"));
    }
}
