//! Registered memory, and the description of it that a peer needs.

use std::hash::{Hash, Hasher};

use pdkv_core::id::{Incarnation, RegionId};
use pdkv_core::{Error, ErrorKind};
use pdkv_engine::{Region, RegionDescriptor};
use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::enter;
use crate::memory;
use crate::number;
use crate::span::{PySpan, Stretch};

/// Memory registered for raw reads and writes.
#[pyclass(name = "Region", module = "pdkv", frozen, weakref)]
pub(crate) struct PyRegion {
    inner: Region,
    incarnation: Incarnation,
    readonly: bool,
    tensor: Py<PyAny>,
}

impl PyRegion {
    pub(crate) fn new(inner: Region, readonly: bool, tensor: Py<PyAny>) -> Self {
        let incarnation = inner.describe().incarnation;
        Self {
            inner,
            incarnation,
            readonly,
            tensor,
        }
    }

    pub(crate) fn stretch(&self) -> Stretch {
        Stretch {
            incarnation: self.incarnation,
            region: self.inner.id(),
            offset: 0,
            len: self.inner.memory().len(),
            readonly: self.readonly,
            device: memory::device_of(self.inner.memory()),
        }
    }
}

#[pymethods]
impl PyRegion {
    /// Id at its engine.
    #[getter]
    fn id(&self) -> u64 {
        self.inner.id().0
    }

    /// Number of bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.memory().len()
    }

    /// The object that was registered.
    #[getter]
    fn tensor(&self, py: Python<'_>) -> Py<PyAny> {
        self.tensor.clone_ref(py)
    }

    /// Whether the owner of the memory forbids writing: such a region is never a destination.
    #[getter]
    fn readonly(&self) -> bool {
        self.readonly
    }

    /// The number of the GPU that holds the memory; `None` for host memory.
    #[getter]
    fn device(&self) -> Option<u32> {
        memory::device_of(self.inner.memory())
    }

    /// Whether peers on this host can map all of the memory: it is in a pool, was adopted, or is a GPU's that can be shared.
    #[getter]
    fn shared(&self) -> bool {
        self.inner.is_shared()
    }

    /// Returns the bytes from `offset` on.
    ///
    /// Raises:
    ///     RegionError: They are not a part of the region.
    fn span(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::offset)] offset: u64,
        #[pyo3(from_py_with = number::nbytes)] nbytes: u64,
    ) -> PyResult<PySpan> {
        enter::attached(py, || self.stretch().part(offset, nbytes)).map(PySpan)
    }

    /// Returns what a peer needs to name this memory.
    fn describe(&self) -> PyRegionDescriptor {
        PyRegionDescriptor {
            inner: self.inner.describe(),
            readonly: self.readonly,
        }
    }

    /// Takes the region off the books: nothing new begins on it. Transfers that are running keep the memory;
    /// wait until they are quiesced before it is used for something else.
    fn deregister(&self, py: Python<'_>) -> PyResult<()> {
        enter::detached(py, || self.inner.deregister())
    }

    fn __repr__(&self) -> String {
        let described = self.inner.describe();
        format!(
            "<pdkv.Region {} of {} bytes at {}>",
            described.region, described.len, described.engine
        )
    }

    // No `__clear__`: the engine uses the memory until it is deregistered; another member of a cycle breaks it.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.tensor)
    }
}

/// Names a region to a peer. It travels as JSON and it pickles.
#[pyclass(name = "RegionDescriptor", module = "pdkv", frozen, eq, hash)]
#[derive(PartialEq)]
pub(crate) struct PyRegionDescriptor {
    inner: RegionDescriptor,
    readonly: bool,
}

impl PyRegionDescriptor {
    pub(crate) fn stretch(&self) -> Stretch {
        let RegionDescriptor {
            incarnation,
            region,
            len,
            ..
        } = self.inner;
        Stretch {
            incarnation,
            region,
            offset: 0,
            len,
            readonly: self.readonly,
            device: None,
        }
    }
}

impl Hash for PyRegionDescriptor {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.inner.incarnation, self.inner.region, self.inner.len).hash(state);
    }
}

#[pymethods]
impl PyRegionDescriptor {
    /// Reads what `to_json` wrote.
    ///
    /// Raises:
    ///     ConfigError: The text is not a region descriptor; names the field.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: &str) -> PyResult<Self> {
        let fields = py
            .import(intern!(py, "json"))?
            .call_method1(intern!(py, "loads"), (text,))
            .map_err(|error| refused(py, &format!("the text is no JSON: {error}")))?;
        let incarnation: String = field(&fields, "incarnation")?;
        let incarnation = Incarnation::from_hex(&incarnation)
            .ok_or_else(|| refused(py, "`incarnation` is not 32 hexadecimal digits"))?;
        let inner = RegionDescriptor {
            engine: field(&fields, "engine")?,
            incarnation,
            region: RegionId(field(&fields, "region")?),
            len: field(&fields, "nbytes")?,
        };
        Ok(Self {
            inner,
            readonly: field(&fields, "readonly")?,
        })
    }

    /// Returns the descriptor as one line of JSON.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        let fields = PyDict::new(py);
        fields.set_item("engine", &self.inner.engine)?;
        fields.set_item("incarnation", self.inner.incarnation.to_string())?;
        fields.set_item("region", self.inner.region.0)?;
        fields.set_item("nbytes", self.inner.len)?;
        fields.set_item("readonly", self.readonly)?;
        py.import(intern!(py, "json"))?
            .call_method1(intern!(py, "dumps"), (fields,))?
            .extract()
    }

    /// Name of the engine that owns the memory.
    #[getter]
    fn engine(&self) -> &str {
        &self.inner.engine
    }

    /// The life of that engine, in hexadecimal.
    #[getter]
    fn incarnation(&self) -> String {
        self.inner.incarnation.to_string()
    }

    /// Id of the region at its engine.
    #[getter]
    fn id(&self) -> u64 {
        self.inner.region.0
    }

    /// Number of bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.len
    }

    /// Returns the bytes from `offset` on.
    ///
    /// Raises:
    ///     RegionError: They are not a part of the region.
    fn span(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::offset)] offset: u64,
        #[pyo3(from_py_with = number::nbytes)] nbytes: u64,
    ) -> PyResult<PySpan> {
        enter::attached(py, || self.stretch().part(offset, nbytes)).map(PySpan)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.get_type().getattr("from_json")?, (slf.get().to_json(slf.py())?,)))
    }

    fn __repr__(&self) -> String {
        let RegionDescriptor {
            engine, region, len, ..
        } = &self.inner;
        format!("<pdkv.RegionDescriptor {region} of {len} bytes at {engine}>")
    }
}

fn field<'py, T: for<'a> FromPyObject<'a, 'py>>(fields: &Bound<'py, PyAny>, name: &'static str) -> PyResult<T> {
    let value = fields
        .get_item(name)
        .and_then(|value| value.extract::<T>().map_err(Into::into));
    value.map_err(|_| refused(fields.py(), &format!("`{name}` is missing or of the wrong type")))
}

fn refused(py: Python<'_>, what: &str) -> PyErr {
    let error = Error::new(ErrorKind::Config, "region descriptor", what)
        .with_hint("give the text that `region.describe().to_json()` made");
    crate::errors::to_python(py, &error)
}
