//! What `pdkv bench` measures against: the smallest loops, and its pattern. Private to the package:
//! these take addresses, and the caller answers for them.

use std::time::Duration;

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::pattern::{self, Pages};
use pdkv_device::{HostRegion, Process, limits};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::buffers::{self, Descriptors};
use crate::enter;

/// Unsigned 64-bit integers from a buffer, such as a numpy array.
pub(crate) struct Words(Vec<u64>);

impl Words {
    pub(crate) fn into_inner(self) -> Vec<u64> {
        self.0
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Words {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        PyBuffer::<u64>::get(&object)?.to_vec(object.py()).map(Self)
    }
}

/// The longest address range that any of the blocks reach.
fn reach(offsets: &[u64], block_bytes: u64) -> Result<u64> {
    let last = offsets.iter().max().copied().unwrap_or(0);
    last.checked_add(block_bytes).ok_or_else(|| {
        Error::new(
            ErrorKind::Region,
            "bench",
            format!("a block at `{last}` ends past 2^64"),
        )
    })
}

fn region(address: u64, offsets: &[u64], block_bytes: u64) -> Result<std::sync::Arc<HostRegion>> {
    buffers::bare(address, reach(offsets, block_bytes)?)
}

/// Copies blocks with the C library's copy; returns the seconds it took.
#[pyfunction]
pub(crate) fn limit_copy(
    py: Python<'_>,
    dst_address: u64,
    src_address: u64,
    dst_offsets: Words,
    src_offsets: Words,
    block_bytes: u64,
    threads: usize,
) -> PyResult<f64> {
    let (to, from) = (dst_offsets.0, src_offsets.0);
    enter::detached(py, || {
        let (dst, src) = (
            region(dst_address, &to, block_bytes)?,
            region(src_address, &from, block_bytes)?,
        );
        limits::scattered_copy(&dst, &to, &src, &from, block_bytes, threads).map(seconds)
    })
}

/// Reads blocks of another process with `process_vm_readv`; returns the seconds it took.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "private to pdkv.bench")]
pub(crate) fn limit_cma(
    py: Python<'_>,
    pid: u32,
    dst_address: u64,
    src_address: u64,
    dst_offsets: Words,
    src_offsets: Words,
    block_bytes: u64,
    threads: usize,
) -> PyResult<f64> {
    let (to, from) = (dst_offsets.0, src_offsets.0);
    enter::detached(py, || {
        let dst = region(dst_address, &to, block_bytes)?;
        let from: Vec<u64> = from.iter().map(|offset| src_address.wrapping_add(*offset)).collect();
        let process = Process::open(pid)?;
        limits::cma_read(&process, &dst, &to, &from, block_bytes, threads).map(seconds)
    })
}

/// Sends blocks over connected sockets, each an equal part; returns the seconds it took.
#[pyfunction]
pub(crate) fn limit_tcp_send(
    py: Python<'_>,
    sockets: Vec<i32>,
    address: u64,
    offsets: Words,
    block_bytes: u64,
) -> PyResult<f64> {
    let offsets = offsets.0;
    enter::detached(py, || {
        let (region, sockets) = (region(address, &offsets, block_bytes)?, Descriptors::new(sockets)?);
        limits::stream_send(&sockets.borrow(), &region, &offsets, block_bytes).map(seconds)
    })
}

/// Receives blocks from connected sockets, each an equal part; returns the seconds it took.
#[pyfunction]
pub(crate) fn limit_tcp_recv(
    py: Python<'_>,
    sockets: Vec<i32>,
    address: u64,
    offsets: Words,
    block_bytes: u64,
) -> PyResult<f64> {
    let offsets = offsets.0;
    enter::detached(py, || {
        let (region, sockets) = (region(address, &offsets, block_bytes)?, Descriptors::new(sockets)?);
        limits::stream_recv(&sockets.borrow(), &region, &offsets, block_bytes).map(seconds)
    })
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

/// Writes the pattern page of each key at its offset.
#[pyfunction]
pub(crate) fn pattern_fill(
    py: Python<'_>,
    address: u64,
    offsets: Words,
    page_bytes: u64,
    keys: Words,
    threads: usize,
) -> PyResult<()> {
    let (offsets, keys) = (offsets.0, keys.0);
    enter::detached(py, || {
        let pages = Pages::new(&offsets, &keys, page_bytes)?;
        pattern::fill(&*region(address, &offsets, page_bytes)?, &pages, threads)
    })
}

/// Returns the positions of the pages that differ from the pattern of their key.
#[pyfunction]
pub(crate) fn pattern_verify(
    py: Python<'_>,
    address: u64,
    offsets: Words,
    page_bytes: u64,
    keys: Words,
    threads: usize,
) -> PyResult<Vec<usize>> {
    let (offsets, keys) = (offsets.0, keys.0);
    enter::detached(py, || {
        let pages = Pages::new(&offsets, &keys, page_bytes)?;
        pattern::verify(&*region(address, &offsets, page_bytes)?, &pages, threads)
    })
}
