//! Which way the bytes of a transfer went, and why not a better one.

use pdkv_core::capability::TransportKind;
use pdkv_engine::Path;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// The transport of a transfer. `str(path)` is its name, and it compares equal to that name.
#[pyclass(name = "Path", module = "pdkv", frozen)]
pub(crate) struct PyPath(Path);

impl PyPath {
    pub(crate) fn new(path: Path) -> Self {
        Self(path)
    }
}

#[pymethods]
impl PyPath {
    /// The name of the transport: `"inproc"`, `"cuda"`, `"shm"`, `"cma"`, `"tcp"` or `"ucx"`.
    #[getter]
    fn transport(&self) -> &'static str {
        self.0.transport.as_str()
    }

    /// Whether the bytes go by remote direct memory access, without either host's processor.
    #[getter]
    fn rdma(&self) -> bool {
        self.0.rdma
    }

    /// What it rides on, in words.
    #[getter]
    fn detail(&self) -> &str {
        &self.0.detail
    }

    /// One line for each transport looked at, the chosen one first: what it would cost, or why it can't be used.
    #[getter]
    fn reasons(&self) -> Vec<String> {
        self.0.reasons.clone()
    }

    fn __str__(&self) -> &'static str {
        self.transport()
    }

    fn __repr__(&self) -> String {
        format!("<pdkv.Path {}: {}>", self.transport(), self.0.detail)
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        if let Ok(path) = other.cast::<Self>() {
            return self.0 == path.get().0;
        }
        other.extract::<&str>().is_ok_and(|name| name == self.transport())
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        PyString::new(py, self.transport()).hash()
    }
}

/// Returns the names of all transports of this release, in the order in which they are tried at equal costs.
#[pyfunction]
pub(crate) fn transport_names() -> Vec<&'static str> {
    TransportKind::ALL.iter().map(|kind| kind.as_str()).collect()
}
