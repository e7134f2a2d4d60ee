//! How blocks of one layout become blocks of another, to look at before anything moves.

use pdkv_core::plan::{Plan, Selection};
use pyo3::prelude::*;

use crate::blocks;
use crate::enter;
use crate::layout::PyKvLayout;
use crate::number;

/// A checked plan: every destination byte is written exactly once.
#[pyclass(name = "Plan", module = "pdkv", frozen)]
pub(crate) struct PyPlan(Plan);

impl PyPlan {
    pub(crate) fn inner(&self) -> &Plan {
        &self.0
    }
}

#[pymethods]
impl PyPlan {
    /// Bytes that will move.
    #[getter]
    fn total_bytes(&self) -> u64 {
        self.0.total_bytes()
    }

    /// Contiguous copies after merging.
    #[getter]
    fn run_count(&self) -> u64 {
        self.0.run_count()
    }

    /// Pieces of work that threads share out among themselves.
    #[getter]
    fn unit_count(&self) -> u64 {
        self.0.unit_count()
    }

    /// Memory of the plan itself.
    #[getter]
    fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    /// Returns the plan in words.
    fn explain(&self) -> String {
        self.0.explain().to_string()
    }

    fn __repr__(&self) -> String {
        format!(
            "<pdkv.Plan of {} bytes in {} copies>",
            self.0.total_bytes(),
            self.0.run_count()
        )
    }
}

/// Plans how `src_blocks` of one layout become `dst_blocks` of another.
///
/// Args:
///     src_layout: Layout of the source.
///     src_blocks: Block ids in the source.
///     dst_layout: Layout of the destination.
///     dst_blocks: Block ids in the destination, as many, none twice.
///     layers: `(first, count)` of the layers to move; all by default.
///
/// Raises:
///     LayoutError: The layouts can't be converted, or a block id is out of range or twice.
#[pyfunction]
#[pyo3(signature = (src_layout, src_blocks, dst_layout, dst_blocks, *, layers=None))]
pub(crate) fn plan(
    py: Python<'_>,
    src_layout: &Bound<'_, PyKvLayout>,
    src_blocks: &Bound<'_, PyAny>,
    dst_layout: &Bound<'_, PyKvLayout>,
    dst_blocks: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = number::layers)] layers: Option<(u32, u32)>,
) -> PyResult<PyPlan> {
    let (src, dst) = (src_layout.get().0.clone(), dst_layout.get().0.clone());
    let (src_blocks, dst_blocks) = (blocks::table(src_blocks)?, blocks::table(dst_blocks)?);
    let (first, count) = layers.unwrap_or_else(|| (0, src.num_layers()));
    let selection = Selection::layers(first, count);
    enter::detached(py, || Plan::pages(&src, &src_blocks, &dst, &dst_blocks, &selection)).map(PyPlan)
}
