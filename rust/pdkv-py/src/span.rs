//! Byte ranges of regions, here or at a peer, and the forms in which Python gives them.

use pdkv_core::id::{Incarnation, RegionId};
use pdkv_core::{Error, ErrorKind, Result};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::enter;
use crate::number;
use crate::region::{PyRegion, PyRegionDescriptor};

/// A stretch of one engine's registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stretch {
    pub(crate) incarnation: Incarnation,
    pub(crate) region: RegionId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Whether the owner forbids writing.
    pub(crate) readonly: bool,
    /// The number of the GPU that holds it; unknown of a peer's memory.
    pub(crate) device: Option<u32>,
}

impl Stretch {
    /// A part of this stretch.
    pub(crate) fn part(self, offset: u64, len: u64) -> Result<Self> {
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > self.len) {
            let what = format!(
                "`{len}` bytes from offset `{offset}` are not a part of `{}` bytes",
                self.len
            );
            return Err(Error::new(ErrorKind::Region, "span", what).with("region", self.region));
        }
        Ok(Self {
            offset: self.offset + offset,
            len,
            ..self
        })
    }
}

/// A byte range of a region, here or at a peer. Made by `span()` of `Region` and `RegionDescriptor`.
#[pyclass(name = "Span", module = "pdkv", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PySpan(pub(crate) Stretch);

#[pymethods]
impl PySpan {
    /// First byte in the region.
    #[getter]
    fn offset(&self) -> u64 {
        self.0.offset
    }

    /// Number of bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len
    }

    /// Id of the region at its engine.
    #[getter]
    fn region(&self) -> u64 {
        self.0.region.0
    }

    fn __repr__(&self) -> String {
        format!(
            "<pdkv.Span of {} bytes from {} in region {}>",
            self.0.len, self.0.offset, self.0.region
        )
    }
}

/// Reads spans: a region, a descriptor, a span, a list of those, or `(region, pairs)` with an
/// N x 2 integer array of (offset, nbytes).
pub(crate) fn read(spans: &Bound<'_, PyAny>) -> PyResult<Vec<Stretch>> {
    if let Some(whole) = one(spans) {
        return Ok(vec![whole]);
    }
    if let Ok(pair) = spans.cast::<PyTuple>()
        && pair.len() == 2
        && let Some(region) = one(&pair.get_item(0)?)
        && one(&pair.get_item(1)?).is_none()
    {
        return pairs(region, &pair.get_item(1)?);
    }
    let Ok(items) = spans.try_iter() else {
        return Err(refused(spans));
    };
    let mut stretches = Vec::with_capacity(spans.len().unwrap_or(0));
    for item in items {
        let item = item?;
        stretches.push(one(&item).ok_or_else(|| refused(&item))?);
    }
    Ok(stretches)
}

fn one(item: &Bound<'_, PyAny>) -> Option<Stretch> {
    if let Ok(span) = item.cast::<PySpan>() {
        return Some(span.get().0);
    }
    if let Ok(region) = item.cast::<PyRegion>() {
        return Some(region.get().stretch());
    }
    item.cast::<PyRegionDescriptor>()
        .ok()
        .map(|descriptor| descriptor.get().stretch())
}

fn pairs(region: Stretch, pairs: &Bound<'_, PyAny>) -> PyResult<Vec<Stretch>> {
    let py = pairs.py();
    let flat: Vec<u64> = if let Ok(buffer) = PyBuffer::<i64>::get(pairs) {
        two_columns(py, &buffer)?;
        // A negative offset becomes one that no region reaches.
        buffer
            .to_vec(py)?
            .into_iter()
            .map(|value| u64::try_from(value).unwrap_or(u64::MAX))
            .collect()
    } else if let Ok(buffer) = PyBuffer::<u64>::get(pairs) {
        two_columns(py, &buffer)?;
        buffer.to_vec(py)?
    } else if let Ok(list) = pairs.cast::<PyList>() {
        let mut flat = Vec::with_capacity(2 * list.len());
        for pair in list {
            let (offset, len): (Bound<'_, PyAny>, Bound<'_, PyAny>) = pair.extract()?;
            flat.extend([number::offset(&offset)?, number::nbytes(&len)?]);
        }
        flat
    } else {
        return Err(refused(pairs));
    };
    enter::attached(py, || {
        flat.chunks_exact(2).map(|pair| region.part(pair[0], pair[1])).collect()
    })
}

fn two_columns<T: pyo3::buffer::Element>(py: Python<'_>, buffer: &PyBuffer<T>) -> PyResult<()> {
    let shape = buffer.shape();
    if shape.len() == 2 && shape[1] == 2 {
        return Ok(());
    }
    let error = Error::new(
        ErrorKind::Layout,
        "spans",
        format!("the pairs have the shape {shape:?}, not [n, 2]"),
    );
    Err(crate::errors::to_python(py, &error))
}

fn refused(item: &Bound<'_, PyAny>) -> PyErr {
    let name = item
        .get_type()
        .name()
        .map_or_else(|_| "?".to_owned(), |name| name.to_string());
    let error = Error::new(
        ErrorKind::Region,
        "spans",
        format!("a `{name}` names no registered bytes"),
    )
    .with_hint(
        "give a Region, a RegionDescriptor, a Span, a list of those, or (region, pairs) with an int64 array of \
         (offset, nbytes)",
    );
    crate::errors::to_python(item.py(), &error)
}
