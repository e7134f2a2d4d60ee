//! What a consumer needs to claim an export, as a value that travels as JSON.

use std::hash::{DefaultHasher, Hash, Hasher};

use pdkv_core::hex;
use pdkv_core::reference::Reference;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::enter;

/// Names exported (or offered) blocks of one engine and proves that the engine issued it.
///
/// It travels as JSON, for example inside `kv_transfer_params`, and it pickles. The owner trusts
/// nothing in it beyond a keyed checksum over all of it.
#[pyclass(name = "Reference", module = "pdkv", frozen, eq)]
#[derive(PartialEq)]
pub(crate) struct PyReference(pub(crate) Reference);

/// A reference given as the object or as its JSON.
pub(crate) fn read(reference: &Bound<'_, PyAny>) -> PyResult<Reference> {
    if let Ok(object) = reference.cast::<PyReference>() {
        return Ok(object.get().0.clone());
    }
    let text = reference.cast::<PyString>()?.to_cow()?;
    enter::attached(reference.py(), || Reference::from_json(&text))
}

#[pymethods]
impl PyReference {
    /// Reads what `to_json` wrote.
    ///
    /// Raises:
    ///     ConfigError: The text is not a reference; names the field.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: &str) -> PyResult<Self> {
        enter::attached(py, || Reference::from_json(text)).map(Self)
    }

    /// Returns the reference as one line of JSON.
    fn to_json(&self) -> String {
        self.0.to_json()
    }

    /// `"export"` (the peer reads) or `"offer"` (the peer writes).
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind.as_str()
    }

    /// Name of the engine that issued it.
    #[getter]
    fn engine(&self) -> &str {
        &self.0.engine
    }

    /// Where that engine listens, `host:port`.
    #[getter]
    fn address(&self) -> &str {
        &self.0.address
    }

    /// The life of that engine, in hexadecimal.
    #[getter]
    fn incarnation(&self) -> String {
        self.0.incarnation.to_string()
    }

    /// The random id of the export, in hexadecimal.
    #[getter]
    fn export_id(&self) -> String {
        self.0.export_id.to_string()
    }

    /// The digest of the prefix, as given to `export`.
    #[getter]
    fn digest(&self) -> &[u8] {
        &self.0.digest
    }

    /// What the bytes mean (model, layout, shard), in hexadecimal.
    #[getter]
    fn fingerprint(&self) -> String {
        hex::encode(&self.0.fingerprint)
    }

    /// Tokens whose KV the blocks hold.
    #[getter]
    fn num_tokens(&self) -> u64 {
        self.0.num_tokens
    }

    /// Blocks exported.
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.0.num_blocks
    }

    /// How many consumers may have it.
    #[getter]
    fn consumers(&self) -> u32 {
        self.0.consumers
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.0.export_id, self.0.tag).hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.get_type().getattr("from_json")?, (slf.get().to_json(),)))
    }

    fn __repr__(&self) -> String {
        let Reference {
            engine,
            address,
            num_blocks,
            export_id,
            ..
        } = &self.0;
        format!(
            "<pdkv.Reference {} of {num_blocks} blocks at {engine} ({address}), {export_id}>",
            self.kind()
        )
    }
}
