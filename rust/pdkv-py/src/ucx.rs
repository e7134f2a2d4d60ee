//! Settings of the `ucx` transport: from `pdkv.UcxConfig` to the engine's.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pdkv_core::{Error, ErrorKind};
use pdkv_engine::UcxConfig;
use pyo3::prelude::*;

use crate::blocks;
use crate::enter;
use crate::errors;

/// `pdkv.ucx.UcxConfig`, field by field.
#[derive(FromPyObject)]
struct Fields {
    library: Option<PathBuf>,
    one_sided: String,
    settings: BTreeMap<String, String>,
}

/// Reads the settings, or takes the defaults.
pub(crate) fn config(py: Python<'_>, ucx: Option<&Bound<'_, PyAny>>) -> PyResult<UcxConfig> {
    let Some(ucx) = ucx else {
        return Ok(UcxConfig::default());
    };
    let fields: Fields = ucx.extract().map_err(|_| {
        let what = format!("`ucx` is a `{}`", blocks::type_name(ucx));
        let error = Error::new(ErrorKind::Config, "ucx", what).with_hint("give a `pdkv.UcxConfig`");
        errors::to_python(py, &error)
    })?;
    Ok(UcxConfig {
        library: fields.library,
        one_sided: enter::attached(py, || fields.one_sided.parse())?,
        settings: fields.settings.into_iter().collect(),
    })
}
