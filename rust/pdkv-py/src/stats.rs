//! Figures of one transfer, by attribute or by key.

use pdkv_engine::TransferStats;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

/// Figures of one transfer; `dict(stats)` gives all of them. Times are in microseconds.
#[pyclass(name = "TransferStats", module = "pdkv", frozen)]
pub(crate) struct PyTransferStats(TransferStats);

const KEYS: [&str; 7] = [
    "bytes",
    "runs",
    "staged_bytes",
    "plan_us",
    "post_us",
    "wire_us",
    "handover_us",
];

impl PyTransferStats {
    pub(crate) fn new(stats: TransferStats) -> Self {
        Self(stats)
    }
}

#[pymethods]
impl PyTransferStats {
    /// Payload bytes placed.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Contiguous copies after merging.
    #[getter]
    fn runs(&self) -> u64 {
        self.0.runs
    }

    /// Payload bytes copied anywhere but from source page to destination page.
    #[getter]
    fn staged_bytes(&self) -> u64 {
        self.0.staged_bytes
    }

    /// Time to build the plan.
    #[getter]
    fn plan_us(&self) -> f64 {
        self.0.plan_us
    }

    /// Time inside the submitting call.
    #[getter]
    fn post_us(&self) -> f64 {
        self.0.post_us
    }

    /// Time from the first byte requested to the last byte placed.
    #[getter]
    fn wire_us(&self) -> f64 {
        self.0.wire_us
    }

    /// Time from the last byte placed to the owner's word that they are valid.
    #[getter]
    fn handover_us(&self) -> f64 {
        self.0.handover_us
    }

    /// Returns the names of the figures.
    #[staticmethod]
    fn keys() -> Vec<&'static str> {
        KEYS.to_vec()
    }

    fn __getitem__<'py>(slf: &Bound<'py, Self>, key: &str) -> PyResult<Bound<'py, PyAny>> {
        if KEYS.contains(&key) {
            slf.getattr(key)
        } else {
            Err(PyKeyError::new_err(key.to_owned()))
        }
    }

    fn __repr__(&self) -> String {
        let TransferStats {
            bytes,
            runs,
            staged_bytes,
            plan_us,
            post_us,
            wire_us,
            handover_us,
            ..
        } = self.0;
        format!(
            "<pdkv.TransferStats bytes={bytes} runs={runs} staged_bytes={staged_bytes} plan_us={plan_us:.1} \
             post_us={post_us:.1} wire_us={wire_us:.1} handover_us={handover_us:.1}>"
        )
    }
}
