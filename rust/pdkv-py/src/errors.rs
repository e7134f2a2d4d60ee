//! From the Rust error to the Python exception. The classes live in `pdkv.errors`, so that they have
//! docstrings, builtin bases and pickle; this module only looks them up and fills them in.

use pdkv_core::{Error, ErrorKind, Retry};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Makes the exception for `error`. Should the class be out of reach (an interpreter going down, a
/// broken installation), what Python said about that is returned instead.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).map_or_else(|failure| failure, PyErr::from_value)
}

/// The exception as an object, for results that carry an error instead of raising it.
pub(crate) fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let class = py
        .import(intern!(py, "pdkv.errors"))?
        .getattr(error.kind().python_class())?;
    let context = PyDict::new(py);
    for (key, value) in error.context() {
        context.set_item(key, value)?;
    }
    let facts = PyDict::new(py);
    facts.set_item(intern!(py, "kind"), error.kind().slug())?;
    facts.set_item(intern!(py, "scope"), error.scope().as_str())?;
    facts.set_item(intern!(py, "retryable"), error.retry() == Retry::Later)?;
    facts.set_item(intern!(py, "operation"), error.operation())?;
    facts.set_item(intern!(py, "context"), context)?;
    facts.set_item(intern!(py, "hint"), hint(error))?;
    class.call((text(error),), Some(&facts))
}

/// The message with the chain of sources, without the operation, which is an attribute of its own.
fn text(error: &Error) -> String {
    let mut text = error.message().to_owned();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

fn hint(error: &Error) -> Option<String> {
    let hint = error.hint().map(str::to_owned);
    if error.kind() != ErrorKind::Internal {
        return hint;
    }
    let report = format!(
        "this is a bug of pdkv: please report it with this text ({})",
        crate::build::line()
    );
    Some(hint.map_or_else(|| report.clone(), |hint| format!("{hint}; {report}")))
}

/// The table of kinds: (name, slug, class, scope, retryable) of each.
#[pyfunction]
pub(crate) fn error_kinds() -> Vec<(String, &'static str, &'static str, &'static str, bool)> {
    ErrorKind::ALL
        .iter()
        .map(|kind| {
            let retryable = kind.retry() == Retry::Later;
            (
                format!("{kind:?}"),
                kind.slug(),
                kind.python_class(),
                kind.scope().as_str(),
                retryable,
            )
        })
        .collect()
}
