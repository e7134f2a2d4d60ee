//! The plain loop over UCX that `pdkv bench` measures against. Private to the package, as is `bench.rs`.

use std::path::PathBuf;

use pdkv_core::{Error, ErrorKind};
use pdkv_ucx::find::{Search, find};
use pdkv_ucx::limit::{Job, LoopEnd, Peer};
use pdkv_ucx::{Context, Direction, Features, Settings};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

use crate::bench::Words;
use crate::{buffers, enter, ucx};

/// One end of the loop: a thread with a UCX worker of its own, over a buffer that it keeps.
#[pyclass(name = "UcxLoop", module = "pdkv._core", frozen)]
pub(crate) struct PyUcxLoop {
    end: LoopEnd,
    version: String,
}

#[pymethods]
impl PyUcxLoop {
    #[new]
    #[pyo3(signature = (memory, *, library=None, wheels=Vec::new(), settings=Vec::new()))]
    fn new(
        memory: &Bound<'_, PyAny>,
        library: Option<PathBuf>,
        wheels: Vec<(String, PathBuf)>,
        settings: Vec<(String, String)>,
    ) -> PyResult<Self> {
        let py = memory.py();
        // The view, not the object: what has lent memory out neither moves nor resizes it.
        let view = PyMemoryView::from(memory)?;
        let buffer = PyUntypedBuffer::get(&view)?;
        let (address, length) = (buffer.buf_ptr().addr() as u64, buffer.len_bytes() as u64);
        let read_only = buffer.readonly();
        let keep = view.into_any().unbind();
        enter::detached(py, || {
            if read_only {
                return Err(Error::new(
                    ErrorKind::Config,
                    "limit_ucx",
                    "the memory is read-only, and the loop writes",
                ));
            }
            let search = Search {
                explicit: library,
                wheels: ucx::places(wheels),
            };
            let library = find(&search).0?;
            let context = Context::open(&library, &Settings::new(settings), Features { one_sided: true })?;
            Ok(Self {
                end: LoopEnd::open(&context, &buffers::foreign(address, length, false, keep)?)?,
                version: library.version().to_string(),
            })
        })
    }

    /// The version of UCX.
    #[getter]
    fn version(&self) -> &str {
        &self.version
    }

    /// What the other end needs: the worker's address, the memory's key, where it begins, its length.
    fn describe<'py>(&self, py: Python<'py>) -> (Bound<'py, PyBytes>, Bound<'py, PyBytes>, u64, u64) {
        let peer = self.end.describe();
        (
            PyBytes::new(py, &peer.address),
            PyBytes::new(py, &peer.key),
            peer.base,
            peer.len,
        )
    }

    /// Connects to what the other end's `describe` gave.
    fn connect(&self, py: Python<'_>, worker: Vec<u8>, key: Vec<u8>, base: u64, length: u64) -> PyResult<()> {
        let peer = Peer {
            address: worker,
            key,
            base,
            len: length,
        };
        enter::detached(py, || self.end.connect(peer))
    }

    /// Copies equal blocks one by one; returns the seconds it took.
    fn run(
        &self,
        py: Python<'_>,
        verb: &str,
        local: Words,
        remote: Words,
        block_bytes: u64,
        window: usize,
    ) -> PyResult<f64> {
        let (local, remote) = (local.into_inner(), remote.into_inner());
        enter::detached(py, || {
            let direction = match verb {
                "put" => Direction::Put,
                "get" => Direction::Get,
                _ => {
                    return Err(Error::new(
                        ErrorKind::Config,
                        "limit_ucx",
                        format!("`{verb}` is no verb"),
                    ));
                }
            };
            let job = Job {
                direction,
                local,
                remote,
                block_bytes,
                window,
            };
            self.end.run(job).map(|took| took.as_secs_f64())
        })
    }

    /// Ends the thread; idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        enter::detached(py, || {
            self.end.close();
            Ok(())
        })
    }
}
