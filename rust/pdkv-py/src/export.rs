//! Blocks pinned for somebody else: to be read (export) or to be written (offer).

use pdkv_engine::Export;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::enter;
use crate::errors;
use crate::number;
use crate::reference::PyReference;

/// Blocks pinned under a lease, for consumers to pull or for a producer to push into.
///
/// Dropping the object does not release the blocks: call `release`, use it in a `with` block, or let the
/// lease end.
#[pyclass(name = "Export", module = "pdkv", frozen, weakref)]
pub(crate) struct PyExport(Export);

impl PyExport {
    pub(crate) fn new(export: Export) -> Self {
        Self(export)
    }
}

#[pymethods]
impl PyExport {
    /// What the other side needs to claim it.
    #[getter]
    fn reference(&self) -> PyReference {
        PyReference(self.0.reference().clone())
    }

    /// The random id, in hexadecimal: `reference.export_id`.
    #[getter]
    fn id(&self) -> String {
        self.0.reference().export_id.to_string()
    }

    /// Where it stands, in a word.
    #[getter]
    fn state(&self) -> &'static str {
        self.0.state().as_str()
    }

    /// Makes the lease end `lease_s` from now, 3600 at most, unless it lasts longer already.
    ///
    /// Returns:
    ///     The seconds that remain.
    ///
    /// Raises:
    ///     StaleReferenceError: It ended already.
    ///     ConfigError: That is longer than a lease may be.
    fn renew(&self, py: Python<'_>, #[pyo3(from_py_with = number::seconds)] lease_s: f64) -> PyResult<f64> {
        let lease = enter::duration(py, "lease_s", lease_s)?;
        enter::detached(py, || self.0.renew(lease)).map(|left| left.as_secs_f64())
    }

    /// Ends the export. Transfers under way are told to stop; the blocks of an offer may be reused once
    /// `quiesced` is true. Releasing twice is fine.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        enter::detached(py, || self.0.release())
    }

    /// Whether no peer touches the blocks any more, so that they may be reused.
    #[getter]
    fn quiesced(&self) -> bool {
        self.0.quiesced()
    }

    /// Waits until no peer touches the blocks any more.
    ///
    /// Returns:
    ///     Whether it is so now.
    #[pyo3(signature = (timeout_s=None))]
    fn wait_quiesced(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::optional_seconds)] timeout_s: Option<f64>,
    ) -> PyResult<bool> {
        let timeout = enter::timeout(py, "timeout_s", timeout_s)?;
        enter::waiting(py, timeout, |slice| Ok(self.0.wait_quiesced(Some(slice))))
    }

    /// Waits until the export ended, in whatever way.
    ///
    /// Returns:
    ///     The state: `"done"`, when every consumer had it, or another way to end, after which peers may not be out of the
    ///     blocks of an offer yet: see `quiesced`.
    ///
    /// Raises:
    ///     TransferTimeoutError: `timeout_s` passed first, which changes nothing about the export.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::optional_seconds)] timeout_s: Option<f64>,
    ) -> PyResult<&'static str> {
        let timeout = enter::timeout(py, "timeout_s", timeout_s)?;
        let ended = enter::waiting(py, timeout, |slice| {
            Ok(self.0.state().is_ended() || self.0.wait(Some(slice)).is_ok())
        })?;
        if !ended {
            let error = self.0.not_ended(timeout.unwrap_or_default());
            return Err(errors::to_python(py, &error));
        }
        Ok(self.0.state().as_str())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py)
    }

    fn __repr__(&self) -> String {
        let reference = self.0.reference();
        format!(
            "<pdkv.Export {} of {} blocks, {}>",
            reference.export_id,
            reference.num_blocks,
            self.state()
        )
    }
}
