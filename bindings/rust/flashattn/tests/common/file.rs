//! Reads tests/data/cases.txt and cases.bin.

use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;

use super::Bytes;

type Fields = HashMap<String, String>;

pub struct Entry {
    pub dtype: String,
    pub dims: Vec<usize>,
    offset: usize,
}

pub struct Expected {
    pub dims: Vec<usize>,
    pub values: Vec<f64>,
    tolerance: f64,
}

#[derive(Default)]
pub struct Case {
    pub name: String,
    pub desc: Fields,
    pub arrays: HashMap<String, Entry>,
    args: Fields,
    expected: HashMap<String, Expected>,
    bytes: Rc<Vec<u8>>,
}

/// All cases; nothing where the crate stands outside the repository.
pub fn load() -> Option<Vec<Case>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/data");
    let text = std::fs::read_to_string(folder.join("cases.txt")).ok()?;
    let bytes = Rc::new(std::fs::read(folder.join("cases.bin")).ok()?);
    let mut cases: Vec<Case> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let mut words = line.split(' ');
        let kind = words.next().unwrap();
        let rest: Vec<&str> = words.collect();
        if kind == "case" {
            cases.push(Case {
                name: rest[0].to_string(),
                bytes: Rc::clone(&bytes),
                ..Case::default()
            });
            continue;
        }
        let case = cases.last_mut().unwrap();
        match kind {
            "desc" => case.desc = fields(&rest),
            "args" => case.args = fields(&rest),
            "array" => {
                case.arrays.insert(rest[0].to_string(), entry(&rest[1..]));
            }
            "expect" => {
                let place = entry(&rest[1..]);
                let values = read(&bytes, &place);
                let tolerance = rest[4].parse().unwrap();
                let expected = Expected { dims: place.dims, values, tolerance };
                case.expected.insert(rest[0].to_string(), expected);
            }
            other => panic!("cases.txt: {other}"),
        }
    }
    Some(cases)
}

fn fields(words: &[&str]) -> Fields {
    let pairs = words.iter().map(|word| word.split_once('=').unwrap());
    pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn entry(words: &[&str]) -> Entry {
    Entry {
        dtype: words[0].to_string(),
        dims: words[1].split(',').map(|n| n.parse().unwrap()).collect(),
        offset: words[2].parse().unwrap(),
    }
}

fn read<T: Bytes>(bytes: &[u8], entry: &Entry) -> Vec<T> {
    assert_eq!(entry.dtype, T::NAME);
    let (count, size) = (entry.dims.iter().product::<usize>(), std::mem::size_of::<T>());
    let bytes = &bytes[entry.offset..entry.offset + count * size];
    bytes.chunks_exact(size).map(T::read).collect()
}

fn number<N: std::str::FromStr + Default>(fields: &Fields, name: &str) -> N {
    let parse = |text: &String| text.parse().ok().expect("a number");
    fields.get(name).map_or_else(N::default, parse)
}

impl Case {
    pub fn desc(&self, field: &str) -> u32 {
        number(&self.desc, field)
    }

    pub fn args(&self, field: &str) -> u64 {
        number(&self.args, field)
    }

    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.arrays.get(name)
    }

    pub fn expected(&self, name: &str) -> Option<&Expected> {
        self.expected.get(name)
    }

    pub fn dims(&self, name: &str) -> &[usize] {
        &self.arrays[name].dims
    }

    /// An array of the case; empty when it has none of this name.
    pub fn array<T: Bytes>(&self, name: &str) -> Vec<T> {
        self.entry(name).map_or_else(Vec::new, |entry| read(&self.bytes, entry))
    }

    /// Compares a result with its float64 values. NaN there: not written, not looked at.
    pub fn compare<T: Bytes>(&self, name: &str, given: &[T]) -> Result<(), String> {
        let Some(expected) = self.expected.get(name) else {
            return Ok(());
        };
        if given.len() != expected.values.len() {
            return Err(format!(
                "{name}: {} elements, expected {}",
                given.len(),
                expected.values.len()
            ));
        }
        for (i, (a, &b)) in given.iter().zip(&expected.values).enumerate() {
            let a = a.to_f64();
            let fits = b.is_nan() || a == b || (a - b).abs() <= expected.tolerance;
            if !fits {
                return Err(format!("{name}[{i}] = {a}, expected {b} +- {}", expected.tolerance));
            }
        }
        Ok(())
    }
}
