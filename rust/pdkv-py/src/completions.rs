//! News of ended transfers, for event loops.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, PoisonError};

use pdkv_core::{Error, ErrorKind, Result};
use pdkv_engine::Completions;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::enter;

/// The transfers of an engine that end after this was made by `Engine.completions()`.
///
/// Give it to a selector or an event loop, which wants `fileno()`: it is readable while there are ids to take, and for good once the engine is
/// closed. It is its caller's alone: others have their own. Close it, or leave its `with` block, after the selector has let go of it.
#[pyclass(name = "Completions", module = "pdkv", frozen, weakref)]
pub(crate) struct PyCompletions(Mutex<Option<Completions>>);

impl PyCompletions {
    pub(crate) fn new(completions: Completions) -> Self {
        Self(Mutex::new(Some(completions)))
    }

    fn with<T>(&self, py: Python<'_>, call: impl FnOnce(&Completions) -> Result<T>) -> PyResult<T> {
        enter::attached(py, || -> Result<T> {
            match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
                Some(completions) => call(completions),
                None => Err(Error::new(ErrorKind::Closed, "completions", "they are closed")),
            }
        })
    }
}

#[pymethods]
impl PyCompletions {
    /// Returns the descriptor, which stays this object's.
    ///
    /// Raises:
    ///     ClosedError: It is closed.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.with(py, |completions| Ok(completions.as_fd().as_raw_fd()))
    }

    /// Takes the ids of the transfers that ended since the last call, oldest first, the last 65,536 of them. Never blocks. There are
    /// none in a forked child.
    ///
    /// Raises:
    ///     ClosedError: It is closed, or the engine is and what ended before has been taken.
    fn take(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.with(py, |completions| {
            Ok(completions.take()?.into_iter().map(|id| id.0).collect())
        })
    }

    /// Closes the descriptor. Doing it twice is fine.
    fn close(&self) {
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.close();
    }

    fn __repr__(&self) -> String {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(completions) => format!("<pdkv.Completions on descriptor {}>", completions.as_fd().as_raw_fd()),
            None => "<pdkv.Completions, closed>".to_owned(),
        }
    }
}
