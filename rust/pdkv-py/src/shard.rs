//! Which part of the whole model a cache holds.

use pdkv_core::shard::Shard;
use pyo3::prelude::*;

use crate::enter;
use crate::number;

/// Which layers, heads and ranks of the whole model a KV cache holds.
///
/// Args:
///     num_layers: Layers held here.
///     num_heads: KV heads held here.
///     first_layer: Index of the first layer held here.
///     total_layers: Layers of the whole model; by default all of them are here.
///     first_head: Index of the first KV head held here.
///     total_heads: KV heads of the whole model; by default all of them are here.
///     tp_rank: Rank among the tensor-parallel workers.
///     tp_size: Number of tensor-parallel workers.
///     pp_rank: Rank among the pipeline stages.
///     pp_size: Number of pipeline stages.
///
/// Raises:
///     LayoutError: A range leaves the model, or a rank is not below its size.
#[pyclass(name = "Shard", module = "pdkv", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyShard(pub(crate) Shard);

#[pymethods]
impl PyShard {
    #[new]
    #[pyo3(signature = (
        num_layers, num_heads, *, first_layer=0, total_layers=None, first_head=0, total_heads=None,
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = number::num_layers)] num_layers: u32,
        #[pyo3(from_py_with = number::num_heads)] num_heads: u32,
        #[pyo3(from_py_with = number::first_layer)] first_layer: u32,
        #[pyo3(from_py_with = number::total_layers)] total_layers: Option<u32>,
        #[pyo3(from_py_with = number::first_head)] first_head: u32,
        #[pyo3(from_py_with = number::total_heads)] total_heads: Option<u32>,
        #[pyo3(from_py_with = number::tp_rank)] tp_rank: u32,
        #[pyo3(from_py_with = number::tp_size)] tp_size: u32,
        #[pyo3(from_py_with = number::pp_rank)] pp_rank: u32,
        #[pyo3(from_py_with = number::pp_size)] pp_size: u32,
    ) -> PyResult<Self> {
        let shard = Shard {
            first_layer,
            num_layers,
            total_layers: total_layers.unwrap_or_else(|| first_layer.saturating_add(num_layers)),
            first_head,
            num_heads,
            total_heads: total_heads.unwrap_or_else(|| first_head.saturating_add(num_heads)),
            tp_rank,
            tp_size,
            pp_rank,
            pp_size,
        };
        enter::attached(py, || shard.validate())?;
        Ok(Self(shard))
    }

    /// Index of the first layer held here.
    #[getter]
    fn first_layer(&self) -> u32 {
        self.0.first_layer
    }

    /// Layers held here.
    #[getter]
    fn num_layers(&self) -> u32 {
        self.0.num_layers
    }

    /// Layers of the whole model.
    #[getter]
    fn total_layers(&self) -> u32 {
        self.0.total_layers
    }

    /// Index of the first KV head held here.
    #[getter]
    fn first_head(&self) -> u32 {
        self.0.first_head
    }

    /// KV heads held here.
    #[getter]
    fn num_heads(&self) -> u32 {
        self.0.num_heads
    }

    /// KV heads of the whole model.
    #[getter]
    fn total_heads(&self) -> u32 {
        self.0.total_heads
    }

    /// Rank among the tensor-parallel workers.
    #[getter]
    fn tp_rank(&self) -> u32 {
        self.0.tp_rank
    }

    /// Number of tensor-parallel workers.
    #[getter]
    fn tp_size(&self) -> u32 {
        self.0.tp_size
    }

    /// Rank among the pipeline stages.
    #[getter]
    fn pp_rank(&self) -> u32 {
        self.0.pp_rank
    }

    /// Number of pipeline stages.
    #[getter]
    fn pp_size(&self) -> u32 {
        self.0.pp_size
    }

    fn __repr__(&self) -> String {
        let Shard {
            first_layer,
            num_layers,
            total_layers,
            first_head,
            num_heads,
            total_heads,
            ..
        } = self.0;
        format!(
            "<pdkv.Shard of {num_layers} layers from {first_layer} of {total_layers}, {num_heads} heads from \
             {first_head} of {total_heads}>"
        )
    }
}
