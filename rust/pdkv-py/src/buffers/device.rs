//! Memory of a GPU and streams that another library made, and what the bench does with them.

use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{
    CopyQueue, DeviceRegion, Event, Gpu, Stream, Ticket, copy_async, copy_batch_async, copy_each_async,
};
use pdkv_device::kernels::{Jobs, Wishes};
use pyo3::prelude::*;

/// Wraps memory on a GPU as a region that holds `keep` for as long as pdkv may touch it.
pub(crate) fn on_device(gpu: &Gpu, address: u64, len: u64, keep: Py<PyAny>) -> Result<Arc<DeviceRegion>> {
    // SAFETY: `pdkv.memory.describe` took the range from an object that owns it, and `keep` holds that object. That the
    // driver knows all of the range is checked there. A read-only range is never used as a destination.
    unsafe { DeviceRegion::from_raw(gpu, address, len, Box::new(keep)) }
}

/// An event behind all that a stream was asked so far, for another stream to wait for. The stream need not outlive the call.
pub(crate) fn recorded(gpu: &Gpu, handle: u64) -> Result<Event> {
    record(gpu, handle, Event::new(gpu.context())?)
}

/// Waits here, sleeping, for all that a stream was asked so far.
pub(crate) fn waited_for(gpu: &Gpu, handle: u64) -> Result<()> {
    record(gpu, handle, Event::to_wait_for(gpu.context())?)?.synchronize()
}

fn record(gpu: &Gpu, handle: u64, event: Event) -> Result<Event> {
    // SAFETY: that the handle is of a live stream of this GPU is the duty of whoever gives it: for `stream=` the docstrings of
    // `export` and `read` say so, which the other calls refer to, and docs/guides/gpu.md; for the stream of a tensor the
    // protocol that named it. The caller holds the object it came from during this call, and nothing of the stream is kept.
    let stream = unsafe { Stream::foreign(gpu.context(), handle) };
    if stream.capturing()? {
        // The event would be the graph's, and what waits for it a part of the graph.
        let error = Error::new(ErrorKind::Config, "stream", "the stream captures a CUDA graph");
        return Err(error.with_hint("call before the capture begins or after it has ended"));
    }
    event.record(&stream)?;
    Ok(event)
}

/// Asks a stream for a copy between memory that the caller of a private function answers for.
pub(crate) fn copied(stream: &Stream, dst: u64, src: u64, nbytes: u64) -> Result<()> {
    // SAFETY: whoever has a `CudaLoop` passes memory that it holds until it has waited for the stream: `gpu_check`, `pdkv.bench` and
    // `pdkv.doctor`, as tests/repo/test_layering.py says, and tests.
    unsafe { copy_async(stream, dst, src, nbytes as usize) }
}

/// The same for pieces of one size, one by one.
pub(crate) fn copied_each(stream: &Stream, pieces: impl Iterator<Item = (u64, u64)>, nbytes: u64) -> Result<()> {
    // SAFETY: as for `copied`; their blocks do not overlap.
    unsafe { copy_each_async(stream, pieces, nbytes as usize) }
}

/// The same in one batch.
pub(crate) fn batched(stream: &Stream, dsts: &[u64], srcs: &[u64], sizes: &[usize]) -> Result<()> {
    // SAFETY: as for `copied`; their blocks do not overlap.
    unsafe { copy_batch_async(stream, dsts, srcs, sizes) }
}

/// Posts a copy of memory that the caller of a private function answers for; with checksums, it is verified.
pub(crate) fn posted(queue: &mut CopyQueue, jobs: &Jobs, wishes: Wishes) -> Result<Option<Ticket>> {
    if wishes.sums {
        // SAFETY: as for `copied`.
        return unsafe { queue.post_verified(jobs, wishes) };
    }
    // SAFETY: as for `copied`.
    unsafe { queue.post(jobs, wishes) }
}
