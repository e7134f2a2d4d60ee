//! Byte ranges of regions, here or at a peer, and the forms in which Python gives them.

use std::fmt::Display;

use pdkv_core::id::{Incarnation, RegionId};
use pdkv_core::{Error, ErrorKind, Result};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::blocks::type_name;
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
            return Err(self.no_part(offset, len));
        }
        Ok(Self {
            offset: self.offset + offset,
            len,
            ..self
        })
    }

    /// The same of numbers that may be negative.
    fn signed_part(self, offset: i64, len: i64) -> Result<Self> {
        match (u64::try_from(offset), u64::try_from(len)) {
            (Ok(from), Ok(bytes)) => self.part(from, bytes),
            _ => Err(self.no_part(offset, len)),
        }
    }

    fn no_part(self, offset: impl Display, len: impl Display) -> Error {
        let what = format!(
            "`{len}` bytes from offset `{offset}` are not a part of `{}` bytes",
            self.len
        );
        Error::new(ErrorKind::Region, "span", what).with("region", self.region)
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
    if let Ok(buffer) = PyBuffer::<i64>::get(pairs) {
        two_columns(py, &buffer)?;
        let flat = buffer.to_vec(py)?;
        let parts = flat.chunks_exact(2).map(|pair| region.signed_part(pair[0], pair[1]));
        return enter::attached(py, || parts.collect());
    }
    let flat: Vec<u64> = if let Ok(buffer) = PyBuffer::<u64>::get(pairs) {
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
        return Err(refused_pairs(pairs));
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

/// An array of something else than such integers, or no array at all.
fn refused_pairs(pairs: &Bound<'_, PyAny>) -> PyErr {
    let py = pairs.py();
    let Ok(dtype) = pairs.getattr(pyo3::intern!(py, "dtype")) else {
        return refused(pairs);
    };
    let text = format!("the pairs are a `{}` of `{dtype}`", type_name(pairs));
    let error = Error::new(ErrorKind::Layout, "spans", text)
        .with_hint("give (offset, nbytes) as a numpy array of int64 or uint64, or as a list of pairs of integers");
    crate::errors::to_python(py, &error)
}

fn refused(item: &Bound<'_, PyAny>) -> PyErr {
    let error = Error::new(
        ErrorKind::Region,
        "spans",
        format!("a `{}` names no registered bytes", type_name(item)),
    )
    .with_hint(
        "give a Region, a RegionDescriptor, a Span, a list of those, or (region, pairs) with an int64 array of \
         (offset, nbytes)",
    );
    crate::errors::to_python(item.py(), &error)
}
