//! What there is between two engines: one transport, and what it does.

use pdkv_engine::LinkInfo;
use pyo3::prelude::*;
use pyo3::types::PyIterator;

/// One transport towards a peer, or why there is none. Unpacks into `(transport, usable, why)`.
#[pyclass(name = "Link", module = "pdkv", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyLink(LinkInfo);

impl PyLink {
    pub(crate) fn new(info: LinkInfo) -> Self {
        Self(info)
    }
}

#[pymethods]
impl PyLink {
    /// The name of the transport, as in `Path`.
    #[getter]
    fn transport(&self) -> &'static str {
        self.0.transport.as_str()
    }

    /// Whether it can be used with this peer at all.
    #[getter]
    fn usable(&self) -> bool {
        self.0.usable
    }

    /// What it rides on, or the reason against it.
    #[getter]
    fn why(&self) -> &str {
        &self.0.detail
    }

    /// How it moves memory of GPUs: `"direct"`, `"staged"` through memory of a host, `"refused"`, or `"untried"` where
    /// only a try tells and none has ended. What can't be used refuses.
    #[getter]
    fn gpu(&self) -> &'static str {
        self.0.gpu.as_str()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let parts = (self.transport(), self.usable(), self.why()).into_pyobject(py)?;
        parts.try_iter()
    }

    fn __repr__(&self) -> String {
        let usable = if self.0.usable { "usable" } else { "not usable" };
        format!("<pdkv.Link {}: {usable}, {}>", self.transport(), self.0.detail)
    }
}
