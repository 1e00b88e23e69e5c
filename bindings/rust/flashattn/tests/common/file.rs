//! Reads tests/data/cases.txt, cases.bin and refusals.txt.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::Bytes;

type Fields = HashMap<String, String>;

#[derive(Clone)]
pub struct Entry {
    pub dtype: String,
    pub dims: Vec<usize>,
    offset: usize,
}

#[derive(Clone)]
pub struct Expected {
    pub dims: Vec<usize>,
    pub values: Vec<f64>,
    tolerance: f64,
}

#[derive(Clone, Default)]
pub struct Case {
    pub name: String,
    pub desc: Fields,
    pub arrays: HashMap<String, Entry>,
    args: Fields,
    expected: HashMap<String, Expected>,
    bytes: Rc<Vec<u8>>,
}

/// A case that is refused with some fields and values changed, and what is then said.
pub struct Refusal {
    pub name: String,
    pub case: Case,
    /// Names of the status, without ERROR_, and of the reason; the field.
    pub expected: [String; 3],
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/data")
}

/// A file of tests/data; nothing where the crate stands outside the repository.
pub fn text(name: &str) -> Option<String> {
    std::fs::read_to_string(folder().join(name)).ok()
}

/// All cases; nothing where the crate stands outside the repository.
pub fn load() -> Option<Vec<Case>> {
    let folder = folder();
    let text = text("cases.txt")?;
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

/// Every paragraph of refusals.txt, applied to its case.
pub fn load_refusals(cases: &[Case]) -> Vec<Refusal> {
    let text = std::fs::read_to_string(folder().join("refusals.txt")).expect("refusals.txt");
    text.trim().split("\n\n").map(|paragraph| refusal(paragraph, cases)).collect()
}

fn refusal(paragraph: &str, cases: &[Case]) -> Refusal {
    let mut lines = paragraph.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let first = lines.next().unwrap();
    let base = cases.iter().find(|case| case.name == first[2]).expect(first[2]);
    let mut case = base.clone();
    let mut expected = Default::default();
    for words in lines {
        let rest = &words[1..];
        match words[0] {
            "desc" => case.desc.extend(fields(rest)),
            "values" => case.replace(rest[0], rest[1]),
            "expect" => expected = [0, 1, 2].map(|n| rest[n].to_string()),
            other => panic!("refusals.txt: {other}"),
        }
    }
    Refusal { name: first[1].to_string(), case, expected }
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

    /// Gives an array of i32 other values: "3,99,0".
    fn replace(&mut self, name: &str, values: &str) {
        let values = values.split(',').map(|n| n.parse::<i32>().unwrap());
        let values: Vec<u8> = values.flat_map(i32::to_le_bytes).collect();
        let bytes = Rc::make_mut(&mut self.bytes);
        let entry = self.arrays.get_mut(name).expect(name);
        assert_eq!((entry.dtype.as_str(), entry.dims[..] == [values.len() / 4]), ("i32", true));
        entry.offset = bytes.len();
        bytes.extend(values);
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
