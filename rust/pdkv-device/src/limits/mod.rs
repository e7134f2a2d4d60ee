//! The smallest loops that move the same blocks, for a benchmark to hold pdkv against.
//!
//! No planning, no merging, no protocol, no stop flag: what remains is the machine. Every range is checked
//! before the clock starts. Each thread takes an equal consecutive part of the list.

mod cma;
mod copy;
mod stream;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};

pub use cma::cma_read;
pub use copy::scattered_copy;
pub use stream::{stream_recv, stream_send};

/// Spans or ranges in one system call.
const BATCH: usize = 1024;
/// More threads than this are a mistake of the caller.
const MAX_THREADS: usize = 256;

/// Runs `work` over equal consecutive parts of `0..count` and tells how long the slowest took.
fn timed(
    operation: &'static str,
    count: usize,
    threads: usize,
    work: impl Fn(usize, std::ops::Range<usize>) -> Result<()> + Sync,
) -> Result<Duration> {
    if threads == 0 || threads > MAX_THREADS {
        let message = format!("`{threads}` threads, between 1 and {MAX_THREADS} are possible");
        return Err(Error::new(ErrorKind::Config, operation, message));
    }
    let part = |index: usize| (count * index / threads)..(count * (index + 1) / threads);
    if threads == 1 {
        let start = Instant::now();
        work(0, part(0))?;
        return Ok(start.elapsed());
    }
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let run = |index: usize| {
            let (work, barrier) = (&work, &barrier);
            move || {
                barrier.wait();
                let start = Instant::now();
                work(index, part(index)).map(|()| (start, Instant::now()))
            }
        };
        let others: Vec<_> = (1..threads).map(|index| scope.spawn(run(index))).collect();
        let mut span = run(0)()?;
        for other in others {
            let (start, end) = other
                .join()
                .map_err(|_| Error::new(ErrorKind::Internal, operation, "a copy thread panicked"))??;
            span = (span.0.min(start), span.1.max(end));
        }
        Ok(span.1 - span.0)
    })
}

fn same_length(operation: &'static str, left: usize, right: usize) -> Result<()> {
    if left == right {
        return Ok(());
    }
    let message = format!("`{left}` blocks on one side, `{right}` on the other");
    Err(Error::new(ErrorKind::Config, operation, message))
}
