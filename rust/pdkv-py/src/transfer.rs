//! A posted transfer: state, path, figures, waiting, cancelling.

use std::sync::Arc;
use std::time::Duration;

use pdkv_core::{Error, ErrorKind};
use pdkv_engine::Transfer;
use pyo3::prelude::*;

use crate::engine::{Handle, PyEngine};
use crate::enter;
use crate::errors;
use crate::number;
use crate::path::PyPath;
use crate::stats::PyTransferStats;

/// One transfer, from submission to its end.
///
/// Dropping the object neither cancels nor waits: the engine owns the transfer and ends it by its
/// deadline. In a coroutine, `await transfer` waits for it.
#[pyclass(name = "Transfer", module = "pdkv", frozen)]
pub(crate) struct PyTransfer {
    inner: Transfer,
    handle: Arc<Handle>,
}

impl PyTransfer {
    pub(crate) fn new(inner: Transfer, handle: &Arc<Handle>) -> Self {
        Self {
            inner,
            handle: Arc::clone(handle),
        }
    }
}

#[pymethods]
impl PyTransfer {
    /// The id, unique within the engine that started it.
    #[getter]
    fn id(&self) -> u64 {
        self.inner.id().0
    }

    /// Where it stands: `"claiming"`, `"moving"`, `"fencing"`, `"done"`, `"failed"` or `"cancelled"`.
    #[getter]
    fn state(&self) -> &'static str {
        self.inner.state().as_str()
    }

    /// Whether it ended, in whatever way.
    #[getter]
    fn done(&self) -> bool {
        self.inner.poll()
    }

    /// Which transport moves the bytes, and why not a better one. Compares equal to its name.
    #[getter]
    fn path(&self) -> PyPath {
        PyPath::new(self.inner.path().clone())
    }

    /// The figures so far; final once the transfer ended.
    #[getter]
    fn stats(&self) -> PyTransferStats {
        PyTransferStats::new(self.inner.stats())
    }

    /// What the destination holds: `"pending"`, `"untouched"`, `"invalid"` or `"valid"`.
    #[getter]
    fn destination(&self) -> &'static str {
        self.inner.destination()
    }

    /// Whether nothing touches the memory of this transfer any more.
    #[getter]
    fn quiesced(&self) -> bool {
        self.inner.quiesced()
    }

    /// The exception that `wait` raises, or `None` while it runs and after success.
    #[getter]
    fn error<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.inner
            .error()
            .map(|error| errors::exception(py, &error))
            .transpose()
    }

    /// The engine that started it.
    #[getter]
    fn engine(&self) -> PyEngine {
        PyEngine(Arc::clone(&self.handle))
    }

    /// Returns whether the transfer ended, without waiting.
    fn poll(&self) -> bool {
        self.inner.poll()
    }

    /// Waits until the transfer ended.
    ///
    /// Args:
    ///     timeout_s: The longest to wait; `None` waits for the transfer's own deadline.
    ///
    /// Raises:
    ///     TransferTimeoutError: It is still running; nothing about it changes.
    ///     TransferCancelledError: It was cancelled.
    ///     PdkvError: It failed; the class names the cause.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::optional_seconds)] timeout_s: Option<f64>,
    ) -> PyResult<()> {
        let timeout = enter::timeout(py, "timeout_s", timeout_s)?;
        let ended = enter::waiting(py, timeout, |slice| {
            if !self.inner.poll() {
                if slice.is_zero() {
                    return Ok(false);
                }
                // The outcome is read below; here only the waiting counts.
                let _ = self.inner.wait(Some(slice));
            }
            if !self.inner.poll() {
                return Ok(false);
            }
            self.inner.error().map_or(Ok(true), Err)
        })?;
        if ended {
            Ok(())
        } else {
            Err(self.still_running(py, timeout))
        }
    }

    /// Waits until nothing touches the memory any more.
    ///
    /// Args:
    ///     timeout_s: The longest to wait.
    ///
    /// Returns:
    ///     Whether it is quiesced now.
    #[pyo3(signature = (timeout_s=None))]
    fn wait_quiesced(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::optional_seconds)] timeout_s: Option<f64>,
    ) -> PyResult<bool> {
        let timeout = enter::timeout(py, "timeout_s", timeout_s)?;
        enter::waiting(py, timeout, |slice| Ok(self.inner.wait_quiesced(Some(slice))))
    }

    /// Asks the transfer to end. Its memory may be reused only once `quiesced` is true.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        enter::detached(py, || {
            self.inner.cancel();
            Ok(())
        })
    }

    fn __await__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        let py = slf.py();
        py.import(pyo3::intern!(py, "pdkv.aio"))?
            .call_method1(pyo3::intern!(py, "wait"), (slf,))?
            .call_method0(pyo3::intern!(py, "__await__"))
    }

    fn __repr__(&self) -> String {
        format!(
            "<pdkv.Transfer {} {} over {}>",
            self.inner.id(),
            self.inner.state().as_str(),
            self.inner.path()
        )
    }
}

impl PyTransfer {
    fn still_running(&self, py: Python<'_>, timeout: Option<Duration>) -> PyErr {
        let waited = timeout.unwrap_or_default().as_secs_f64();
        let what = format!(
            "transfer `{}` is still `{}` after {waited} s",
            self.inner.id(),
            self.inner.state().as_str()
        );
        let error = Error::new(ErrorKind::TransferTimeout, "wait", what)
            .with_hint("it goes on until its own deadline; cancel() ends it");
        errors::to_python(py, &error)
    }
}
