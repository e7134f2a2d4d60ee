//! Block ids from Python: integer buffers are read as a whole, other sequences item by item.

use pdkv_core::block_table::BlockTable;
use pdkv_core::{Error, ErrorKind, Result};
use pyo3::buffer::{Element, ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::enter;

/// Above this many ids the table is built with the interpreter free: a switch costs about what
/// this many ids cost.
const DETACH_AT: usize = 16_384;

/// Physical block ids, in one of the widths the core takes.
enum Ids {
    Narrow(Vec<u32>),
    Signed(Vec<i32>),
    Wide(Vec<i64>),
}

impl Ids {
    fn len(&self) -> usize {
        match self {
            Self::Narrow(ids) => ids.len(),
            Self::Signed(ids) => ids.len(),
            Self::Wide(ids) => ids.len(),
        }
    }

    fn table(&self) -> Result<BlockTable> {
        match self {
            Self::Narrow(ids) => Ok(BlockTable::from_ids(ids)),
            Self::Signed(ids) => BlockTable::from_ids_i32(ids),
            Self::Wide(ids) => BlockTable::from_ids_i64(ids),
        }
    }
}

/// Builds a block table from numpy or torch integers, any integer buffer, or a sequence of ints.
pub(crate) fn table(ids: &Bound<'_, PyAny>) -> PyResult<BlockTable> {
    let py = ids.py();
    let ids = read(ids)?;
    if ids.len() < DETACH_AT {
        enter::attached(py, || ids.table())
    } else {
        enter::detached(py, || ids.table())
    }
}

fn read(ids: &Bound<'_, PyAny>) -> PyResult<Ids> {
    if let Ok(buffer) = PyUntypedBuffer::get(ids) {
        return from_buffer(ids.py(), &buffer);
    }
    // torch tensors have no buffer of their own, but hand out a numpy view of their memory.
    if let Ok(view) = ids.call_method0(pyo3::intern!(ids.py(), "numpy")) {
        return from_buffer(ids.py(), &PyUntypedBuffer::get(&view)?);
    }
    from_items(ids)
}

fn from_buffer(py: Python<'_>, buffer: &PyUntypedBuffer) -> PyResult<Ids> {
    if buffer.dimensions() != 1 {
        return Err(refused(
            py,
            format!("block ids have `{}` dimensions", buffer.dimensions()),
        ));
    }
    match ElementType::from_format(buffer.format()) {
        ElementType::UnsignedInteger { bytes: 4 } => Ok(Ids::Narrow(buffer.as_typed::<u32>()?.to_vec(py)?)),
        ElementType::SignedInteger { bytes: 8 } => Ok(Ids::Wide(buffer.as_typed::<i64>()?.to_vec(py)?)),
        ElementType::SignedInteger { bytes: 4 } => Ok(Ids::Signed(buffer.as_typed::<i32>()?.to_vec(py)?)),
        ElementType::SignedInteger { bytes: 2 } => widen::<i16>(py, buffer),
        ElementType::SignedInteger { bytes: 1 } => widen::<i8>(py, buffer),
        ElementType::UnsignedInteger { bytes: 2 } => widen::<u16>(py, buffer),
        ElementType::UnsignedInteger { bytes: 1 } => widen::<u8>(py, buffer),
        ElementType::UnsignedInteger { bytes: 8 } => {
            let ids = buffer.as_typed::<u64>()?.to_vec(py)?;
            // What does not fit stays far out of range, so that the core refuses it and names the index.
            Ok(Ids::Wide(
                ids.into_iter()
                    .map(|id| i64::try_from(id).unwrap_or(i64::MAX))
                    .collect(),
            ))
        }
        _ => Err(refused(
            py,
            format!(
                "block ids have the buffer format `{}`",
                buffer.format().to_string_lossy()
            ),
        )),
    }
}

fn widen<T: Element + Into<i64>>(py: Python<'_>, buffer: &PyUntypedBuffer) -> PyResult<Ids> {
    Ok(Ids::Wide(
        buffer
            .as_typed::<T>()?
            .to_vec(py)?
            .into_iter()
            .map(Into::into)
            .collect(),
    ))
}

fn from_items(ids: &Bound<'_, PyAny>) -> PyResult<Ids> {
    let py = ids.py();
    let items = ids
        .try_iter()
        .map_err(|_| refused(py, format!("block ids are a `{}`", type_name(ids))))?;
    let mut wide = Vec::with_capacity(ids.len().unwrap_or(0));
    for (index, item) in items.enumerate() {
        let item = item?;
        // To Python a bool is an integer; in a list of block ids it is a mask, which means something else.
        if item.is_instance_of::<PyBool>() {
            return Err(refused(py, format!("block id at index `{index}` is a `bool`")));
        }
        let id = item.extract::<i64>().map_err(|error| {
            if error.is_instance_of::<PyOverflowError>(py) {
                refused(py, format!("block id `{item}` at index `{index}` is out of range"))
            } else if error.is_instance_of::<PyTypeError>(py) {
                refused(py, format!("block id at index `{index}` is a `{}`", type_name(&item)))
            } else {
                error
            }
        })?;
        wide.push(id);
    }
    Ok(Ids::Wide(wide))
}

/// The name of an object's class, for messages.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object
        .get_type()
        .name()
        .map_or_else(|_| "?".to_owned(), |name| name.to_string())
}

fn refused(py: Python<'_>, message: String) -> PyErr {
    let error = Error::new(ErrorKind::Layout, "block ids", message)
        .with_hint("give one dimension of integers: a numpy array of int32, int64 or uint32 is fastest");
    crate::errors::to_python(py, &error)
}
