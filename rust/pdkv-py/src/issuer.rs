//! What mints references of a cache in another process than its engine's.

use pdkv_core::hex;
use pdkv_engine::{Issuer, issue};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::enter;
use crate::number;
use crate::reference::PyReference;

/// Mints references of one cache ahead of their exports, in a process that has no engine.
///
/// It holds the key of the engine's seals: hand its bytes only to processes of the same instance, and keep them out
/// of logs and files.
#[pyclass(name = "Issuer", module = "pdkv", frozen)]
pub(crate) struct PyIssuer(pub(crate) Issuer);

#[pymethods]
impl PyIssuer {
    /// Reads what `to_bytes` wrote.
    ///
    /// Raises:
    ///     ConfigError: The bytes are no issuer.
    ///     UnsupportedError: A later release wrote them.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        enter::attached(py, || Issuer::from_bytes(data)).map(Self)
    }

    /// Returns the issuer as bytes, the key included: a secret.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    /// Name of the engine.
    #[getter]
    fn engine(&self) -> &str {
        self.0.engine()
    }

    /// Where the engine listens, `host:port`; empty when it does not.
    #[getter]
    fn address(&self) -> &str {
        self.0.address()
    }

    /// The life of the engine, in hexadecimal.
    #[getter]
    fn incarnation(&self) -> String {
        self.0.incarnation().to_string()
    }

    /// What the bytes of the cache mean (model, layout, shard), in hexadecimal.
    #[getter]
    fn fingerprint(&self) -> String {
        hex::encode(&self.0.fingerprint())
    }

    /// Mints the reference of an export that the engine is going to make by `KvCache.export(..., reference=...)`.
    ///
    /// Args:
    ///     num_blocks: Blocks that will be exported.
    ///     num_tokens: Tokens whose KV they will hold.
    ///     digest: What the tokens are, at most 64 bytes.
    ///     consumers: How many may have it.
    ///
    /// Raises:
    ///     ConfigError: `consumers` is 0, or the digest is too long.
    #[pyo3(
        signature = (*, num_blocks, num_tokens, digest=b"".as_slice(), consumers=1),
        text_signature = "($self, *, num_blocks, num_tokens, digest=b'', consumers=1)"
    )]
    fn issue(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::num_blocks)] num_blocks: u32,
        #[pyo3(from_py_with = number::issued_tokens)] num_tokens: u64,
        digest: &[u8],
        #[pyo3(from_py_with = number::consumers)] consumers: u32,
    ) -> PyResult<PyReference> {
        enter::attached(py, || issue(&self.0, num_blocks, num_tokens, digest, consumers)).map(PyReference)
    }

    fn __repr__(&self) -> String {
        format!(
            "<pdkv.Issuer of cache {} at {} ({})>",
            self.0.cache(),
            self.0.engine(),
            self.0.address()
        )
    }
}
