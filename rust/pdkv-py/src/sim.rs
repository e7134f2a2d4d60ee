//! The seeded simulator, for `pdkv.testing`.

use pdkv_engine::sim::{Faults, SimConfig, run};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::enter;
use crate::number;

/// Runs one history of engines on virtual time; returns what happened as a dict.
#[pyfunction]
#[pyo3(signature = (seed, *, engines, exports, blocks, layers, span_s, faults))]
#[expect(clippy::too_many_arguments, reason = "private to pdkv.testing")]
pub(crate) fn simulate(
    py: Python<'_>,
    #[pyo3(from_py_with = number::seed)] seed: u64,
    #[pyo3(from_py_with = number::engines)] engines: usize,
    #[pyo3(from_py_with = number::exports)] exports: usize,
    #[pyo3(from_py_with = number::blocks)] blocks: u32,
    #[pyo3(from_py_with = number::simulated_layers)] layers: u32,
    #[pyo3(from_py_with = number::seconds)] span_s: f64,
    faults: bool,
) -> PyResult<Bound<'_, PyDict>> {
    let config = SimConfig {
        engines,
        exports,
        blocks,
        layers,
        span: enter::duration(py, "span_s", span_s)?,
        faults: if faults {
            Faults::from_seed(seed)
        } else {
            Faults::none()
        },
    };
    let report = enter::detached(py, || Ok(run(seed, &config)))?;
    let facts = PyDict::new(py);
    facts.set_item("seed", report.seed)?;
    facts.set_item("violations", report.violations)?;
    facts.set_item("begun", report.begun)?;
    facts.set_item("done", report.done)?;
    facts.set_item("failed", report.failed)?;
    facts.set_item("cancelled", report.cancelled)?;
    facts.set_item("crashed", report.crashed)?;
    facts.set_item("filled", report.filled)?;
    facts.set_item("exports_ended", report.exports_ended)?;
    facts.set_item("messages", report.messages)?;
    facts.set_item("crashes", report.crashes)?;
    Ok(facts)
}
