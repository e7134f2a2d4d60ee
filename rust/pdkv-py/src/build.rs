//! What was built: the facts a bug report needs.

use pyo3::prelude::*;

pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
const PROFILE: &str = if cfg!(debug_assertions) { "debug" } else { "release" };

/// The facts in one line.
pub(crate) fn line() -> String {
    format!(
        "pdkv {VERSION}, {PROFILE}, {} {}",
        std::env::consts::ARCH,
        std::env::consts::OS
    )
}

/// Returns what was built, in one line for a bug report.
#[pyfunction]
pub(crate) fn build_info() -> String {
    line()
}
