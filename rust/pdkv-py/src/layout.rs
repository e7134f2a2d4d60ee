//! Where the bytes of a KV cache are, as a value to look at and to compare.

use pdkv_core::layout::KvLayout;
use pyo3::prelude::*;

use crate::memory;
use crate::number;

/// Where the bytes of (layer, block, k|v, head, token) are in a KV cache.
///
/// Made by `Engine.register_kv_cache`, or by `pdkv.resolve_layout` without an engine.
#[pyclass(name = "KvLayout", module = "pdkv", frozen, eq)]
#[derive(PartialEq)]
pub(crate) struct PyKvLayout(pub(crate) KvLayout);

#[pymethods]
impl PyKvLayout {
    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype().as_str()
    }

    /// Blocks in the cache.
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.0.num_blocks()
    }

    /// Layers in the cache.
    #[getter]
    fn num_layers(&self) -> u32 {
        self.0.num_layers()
    }

    /// KV heads in every block.
    #[getter]
    fn num_heads(&self) -> u32 {
        self.0.num_heads()
    }

    /// Tokens a block holds.
    #[getter]
    fn block_tokens(&self) -> u32 {
        self.0.block_tokens()
    }

    /// 1 where keys and values are joined, 2 where they are apart.
    #[getter]
    fn num_planes(&self) -> u32 {
        self.0.num_planes()
    }

    /// Contiguous bytes of one token and head.
    #[getter]
    fn content_bytes(&self) -> u64 {
        self.0.content_bytes()
    }

    /// Bytes of one block over all layers.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.0.block_bytes()
    }

    /// Names of the layers, in model order.
    #[getter]
    fn layer_names(&self) -> Vec<String> {
        self.0.layer_names().to_vec()
    }

    /// Returns the layout in words.
    fn describe(&self) -> String {
        self.0.describe()
    }

    /// Returns what makes the bytes of two caches mean different things: (field, ours, theirs) of each.
    fn differences(&self, other: &Self) -> Vec<(&'static str, String, String)> {
        let found = self.0.differences(&other.0);
        found
            .into_iter()
            .map(|difference| (difference.field, difference.ours, difference.theirs))
            .collect()
    }

    fn __repr__(&self) -> String {
        format!("<pdkv.KvLayout {}>", self.0.describe())
    }
}

/// Finds the layout of tensors without registering them.
///
/// Args:
///     tensors: A mapping from layer name to a tensor or a `(keys, values)` pair, in model order.
///     layout: Axes such as `"BHNC"`, or a layout name of vLLM's.
///     block_tokens: Tokens a block holds.
///
/// Raises:
///     LayoutError: A tensor contradicts the layout.
#[pyfunction]
#[pyo3(signature = (tensors, *, layout, block_tokens))]
pub(crate) fn resolve_layout(
    tensors: &Bound<'_, PyAny>,
    layout: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = number::block_tokens)] block_tokens: u32,
) -> PyResult<PyKvLayout> {
    memory::layout(tensors, layout, block_tokens).map(PyKvLayout)
}
