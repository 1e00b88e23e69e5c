//! Thread pools of the caller's.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::Mutex;

use flashattn_sys as sys;

/// A thread pool that runs the tasks of calls on the CPU in place of the library's own threads: see
/// [`Output::parallel`](crate::Output::parallel). With the feature `rayon`, [`Rayon`] and
/// `rayon::ThreadPool` are such.
///
/// # Safety
///
/// `run` calls `task(index)` exactly once for each index in `0..count`, on any threads, in any order,
/// and returns when all those calls have returned. It may also panic, when no task runs any more.
pub unsafe trait Parallel: Sync {
    /// Runs all tasks.
    fn run(&self, count: i32, task: &(dyn Fn(i32) + Sync));
}

/// rayon's current pool: the global one, or the one on whose thread the call is made.
#[cfg(feature = "rayon")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Rayon;

#[cfg(feature = "rayon")]
mod pools {
    use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

    // SAFETY: an iterator visits every index once, and for_each waits for all.
    unsafe impl super::Parallel for super::Rayon {
        fn run(&self, count: i32, task: &(dyn Fn(i32) + Sync)) {
            // A task is worth a thread.
            (0..count).into_par_iter().with_max_len(1).for_each(task);
        }
    }

    // SAFETY: as above, on the threads of this pool.
    unsafe impl super::Parallel for rayon::ThreadPool {
        fn run(&self, count: i32, task: &(dyn Fn(i32) + Sync)) {
            self.install(|| super::Rayon.run(count, task));
        }
    }
}

/// What the library's callback gets: the pool, and the panic that must not unwind into C.
struct User<'a> {
    pool: &'a dyn Parallel,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A task of the library and its context.
struct Task {
    run: unsafe extern "C" fn(*mut c_void, i32),
    context: *mut c_void,
}

// SAFETY: the library's tasks may run on any thread, and its context is shared by them.
unsafe impl Sync for Task {}

impl Task {
    fn call(&self, index: i32) {
        // SAFETY: the library gave both, and waits until all tasks have returned.
        unsafe { (self.run)(self.context, index) }
    }
}

unsafe extern "C" fn run(
    user: *mut c_void,
    count: i32,
    task: sys::flashattn_task_fn,
    context: *mut c_void,
) {
    // SAFETY: with_pool gave a User that outlives the call.
    let user = unsafe { &*user.cast::<User<'_>>() };
    let Some(run) = task else { return };
    let task = Task { run, context };
    let outcome = catch_unwind(AssertUnwindSafe(|| user.pool.run(count, &|i| task.call(i))));
    if let Err(panic) = outcome {
        if let Ok(mut first) = user.panic.lock() {
            first.get_or_insert(panic);
        }
    }
}

/// Makes a call with the pool's callback and its user pointer. A panic of the pool goes on when the
/// library has returned.
pub(crate) fn with_pool<R>(
    pool: Option<&dyn Parallel>,
    call: impl FnOnce(sys::flashattn_parallel_fn, *mut c_void) -> R,
) -> R {
    let Some(pool) = pool else { return call(None, std::ptr::null_mut()) };
    let user = User { pool, panic: Mutex::new(None) };
    let result = call(Some(run), std::ptr::from_ref(&user).cast_mut().cast());
    if let Some(panic) = user.panic.into_inner().ok().flatten() {
        resume_unwind(panic);
    }
    result
}
