//! The token index of the lookup buffer. Tokens are read as a whole from memory; nothing of Python's is kept.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pdkv_core::lookup::{EntryId, Found, LookupIndex, Match};
use pdkv_core::{Error, ErrorKind};
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::prelude::*;

use crate::blocks::type_name;
use crate::{enter, errors, number};

/// Above this many tokens the index works with the interpreter free.
const DETACH_AT: usize = 16_384;

/// Finds entries by their tokens, first in first out, as `pdkv.LookupBuffer` gives them out.
///
/// Two sequences match when one is a prefix of the other and neither is empty. Entries are numbers that are never
/// used twice. Tokens are one dimension of int64: a buffer, a numpy array, or a tensor with a `numpy()` view.
#[pyclass(name = "LookupIndex", module = "pdkv._core", frozen)]
pub(crate) struct PyLookupIndex(Mutex<LookupIndex>);

impl PyLookupIndex {
    /// Nothing under the lock waits for anything, so it may be held with or without the interpreter.
    fn lock(&self) -> MutexGuard<'_, LookupIndex> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        tokens: &[i64],
        call: impl FnOnce(&mut LookupIndex, &[i64]) -> T + Send,
    ) -> PyResult<T> {
        if tokens.len() < DETACH_AT {
            enter::attached(py, || Ok(call(&mut self.lock(), tokens)))
        } else {
            enter::detached(py, || Ok(call(&mut self.lock(), tokens)))
        }
    }
}

#[pymethods]
impl PyLookupIndex {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }

    /// Adds an entry at the end of the order; returns its number.
    ///
    /// Raises:
    ///     LayoutError: The tokens are not one dimension of int64.
    fn insert(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<u64> {
        let tokens = read(tokens)?;
        self.with(py, &tokens, |index, tokens| index.insert(tokens).0)
    }

    /// Finds the first entry in the order that matches, or the one with the most tokens in common.
    ///
    /// Returns:
    ///     The entry and the number of tokens that agree, or `None`. Nothing changes.
    ///
    /// Raises:
    ///     LayoutError: The tokens are not one dimension of int64.
    #[pyo3(signature = (tokens, *, longest=false))]
    fn find(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>, longest: bool) -> PyResult<Option<(u64, usize)>> {
        let tokens = read(tokens)?;
        let how = if longest { Match::LongestPrefix } else { Match::Either };
        let found = self.with(py, &tokens, |index, tokens| index.find(tokens, how))?;
        Ok(found.map(|Found { entry, matched }| (entry.0, matched)))
    }

    /// Returns the first entry in the order, whatever its tokens.
    fn front(&self) -> Option<u64> {
        self.lock().front().map(|entry| entry.0)
    }

    /// Takes an entry out of sight. The order then begins behind it, with those before it at the end.
    fn take(&self, py: Python<'_>, #[pyo3(from_py_with = number::entry)] entry: u64) -> PyResult<()> {
        enter::attached(py, || self.lock().take(EntryId(entry)))
    }

    /// Puts an entry that was taken back at its old place.
    fn put_back(&self, py: Python<'_>, #[pyo3(from_py_with = number::entry)] entry: u64) -> PyResult<()> {
        enter::attached(py, || self.lock().put_back(EntryId(entry)))
    }

    /// Removes an entry for good, taken or not.
    fn remove(&self, py: Python<'_>, #[pyo3(from_py_with = number::entry)] entry: u64) -> PyResult<()> {
        enter::attached(py, || self.lock().remove(EntryId(entry)))
    }

    /// Returns all entries in sight, in order.
    fn entries(&self) -> Vec<u64> {
        self.lock().entries().into_iter().map(|entry| entry.0).collect()
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }
}

fn read(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let py = tokens.py();
    let buffer = match PyUntypedBuffer::get(tokens) {
        Ok(buffer) => buffer,
        // torch tensors have no buffer of their own, but hand out a numpy view of their memory.
        Err(_) => match tokens.call_method0(pyo3::intern!(py, "numpy")) {
            Ok(view) => PyUntypedBuffer::get(&view)?,
            Err(_) => return Err(refused(py, format!("the tokens are a `{}`", type_name(tokens)))),
        },
    };
    if buffer.dimensions() != 1 {
        return Err(refused(
            py,
            format!("the tokens have `{}` dimensions", buffer.dimensions()),
        ));
    }
    match ElementType::from_format(buffer.format()) {
        ElementType::SignedInteger { bytes: 8 } => buffer.as_typed::<i64>()?.to_vec(py),
        _ => Err(refused(
            py,
            format!(
                "the tokens have the buffer format `{}`",
                buffer.format().to_string_lossy()
            ),
        )),
    }
}

fn refused(py: Python<'_>, message: String) -> PyErr {
    let error = Error::new(ErrorKind::Layout, "lookup", message).with_hint("give one dimension of int64");
    errors::to_python(py, &error)
}
