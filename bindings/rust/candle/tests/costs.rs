//! What a call makes and asks for beside its result, told by the library's log and by the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Mutex;

use candle_core::{Device, Result, Tensor, Var};
use flashattn_candle::flash_attn;

/// Bytes asked for since the start.
static BYTES: AtomicUsize = AtomicUsize::new(0);
struct Counting;
#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the system's allocator, counted. realloc and alloc_zeroed come here by default.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(address, layout) }
    }
}

/// The operations that plans were made for: a line of the log each.
static PLANNED: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn note(_: flashattn::LogLevel, line: &str) {
    if let Some((operation, _)) = line.split_once(": backend ") {
        PLANNED.lock().unwrap().push(operation.to_string());
    }
}

/// The operations planned and the bytes allocated by `f`.
fn cost(f: impl Fn() -> Result<()>) -> Result<(Vec<String>, usize)> {
    PLANNED.lock().unwrap().clear();
    let before = BYTES.load(Relaxed);
    f()?;
    let bytes = BYTES.load(Relaxed) - before;
    Ok((PLANNED.lock().unwrap().clone(), bytes))
}

/// One test, as log and allocator belong to the process.
#[test]
fn plans_and_scratch_memory_are_kept() -> Result<()> {
    flashattn::set_log(flashattn::LogLevel::INFO, Some(note)).map_err(candle_core::Error::wrap)?;
    let dims = (2, 512, 4, 16); // short heads: lse is a sixteenth of o
    let o_bytes = 2 * 512 * 4 * 16 * 4;
    let lse_bytes = 2 * 512 * 4 * 4;
    let x = Tensor::randn(0f32, 1f32, dims, &Device::Cpu)?;
    let forward = || flash_attn(&x, &x, &x, 0.25, true).map(drop);

    // Where nothing is tracked, neither backward nor lse.
    let (planned, _) = cost(forward)?;
    assert_eq!(planned, ["forward"]);
    let (planned, bytes) = cost(forward)?;
    assert!(planned.is_empty(), "{planned:?}");
    assert!(bytes >= o_bytes && bytes < o_bytes + lse_bytes, "{bytes} for an o of {o_bytes}");

    // The order in memory is no part of a plan.
    let swapped = x.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
    assert!(!swapped.is_contiguous());
    let (planned, _) = cost(|| flash_attn(&swapped, &x, &swapped, 0.25, true).map(drop))?;
    assert!(planned.is_empty(), "{planned:?}");

    // A tracked tensor in any place asks for both, once.
    let var = Var::from_tensor(&x)?;
    let (planned, _) = cost(|| flash_attn(&x, &var, &x, 0.25, true).map(drop))?;
    assert_eq!(planned, ["forward", "backward"]);
    let train = || {
        let o = flash_attn(&var, &x, &x, 0.25, true)?;
        o.backward().map(drop)
    };
    train()?;
    let (planned, bytes) = cost(train)?;
    assert!(planned.is_empty(), "{planned:?}");
    // Ours: o, lse, dq, dk, dv. candle's own: the gradient of o, two zeros and three sums.
    let least = 10 * o_bytes + lse_bytes;
    assert!(bytes >= least && bytes < least + lse_bytes, "{bytes}, of which {least} are results");

    // Past the limit the plan that was unused for the longest goes, and no other.
    let (planned, _) = cost(|| {
        (1..200).try_for_each(|n| {
            flash_attn(&x.narrow(1, 0, 1)?, &x, &x, n as f32, true)?;
            forward()
        })
    })?;
    assert_eq!(planned, vec!["forward"; 199]);
    let (planned, _) = cost(train)?;
    assert_eq!(planned, ["forward", "backward"]);
    Ok(())
}
