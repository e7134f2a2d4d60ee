//! The `ucx` transport's settings, from `pdkv.UcxConfig` to the engine's, and what `pdkv doctor` asks about UCX.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pdkv_core::{Error, ErrorKind};
use pdkv_engine::{TransportKind, UcxConfig};
use pdkv_ucx::find::{self, Search};
use pdkv_ucx::{Context, Features, Library, Origin, Resource, Settings, Source};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

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

/// Reads the settings, or takes the defaults, and looks for wheels where the engine will need a UCX.
pub(crate) fn config(
    py: Python<'_>,
    ucx: Option<&Bound<'_, PyAny>>,
    transports: Option<&[TransportKind]>,
) -> PyResult<UcxConfig> {
    let needed = transports.map_or_else(
        || !find::rdma_devices().is_empty(),
        |named| named.contains(&TransportKind::Ucx),
    );
    let search = if needed { wheels(py)? } else { Vec::new() };
    let Some(ucx) = ucx else {
        return Ok(UcxConfig {
            search,
            ..UcxConfig::default()
        });
    };
    let fields: Fields = ucx.extract().map_err(|_| {
        let what = format!("`ucx` is a `{}`", blocks::type_name(ucx));
        let error = Error::new(ErrorKind::Config, "ucx", what).with_hint("give a `pdkv.UcxConfig`");
        errors::to_python(py, &error)
    })?;
    Ok(UcxConfig {
        library: fields.library,
        search,
        one_sided: enter::attached(py, || fields.one_sided.parse())?,
        settings: fields.settings.into_iter().collect(),
    })
}

/// Where installed wheels keep a UCX, as Python knows.
fn wheels(py: Python<'_>) -> PyResult<Vec<(Origin, PathBuf)>> {
    let folders = py
        .import(intern!(py, "pdkv.wheels"))?
        .call_method0(intern!(py, "folders"))?
        .extract()?;
    Ok(places(folders))
}

/// One copy of UCX: origin, path, modules beside it, whether RDMA is among them, why it can't be opened here.
type Candidate = (&'static str, String, Vec<String>, bool, Option<String>);

/// The copies of UCX in the order in which an engine tries them; opens none.
///
/// Args:
///     wheels: `(origin, folder)` of installed wheels, from `pdkv.wheels`.
#[pyfunction]
pub(crate) fn ucx_candidates(py: Python<'_>, wheels: Vec<(String, PathBuf)>) -> PyResult<Vec<Candidate>> {
    let candidates = enter::detached(py, || {
        let search = Search {
            explicit: None,
            wheels: places(wheels),
        };
        Ok(find::candidates(&search))
    })?;
    let facts = candidates.into_iter().map(|candidate| {
        let has_rdma = candidate.has_rdma();
        let origin = candidate.origin.as_str();
        let path = candidate.path.display().to_string();
        (origin, path, candidate.modules, has_rdma, candidate.refused)
    });
    Ok(facts.collect())
}

/// Opens the copy of UCX at `path` and says what is in it. Only for a process of its own.
///
/// Raises:
///     UnsupportedError: It can't be loaded, or is too old.
#[pyfunction]
pub(crate) fn ucx_probe<'py>(py: Python<'py>, path: &str) -> PyResult<Bound<'py, PyDict>> {
    let context = enter::detached(py, || {
        let library = Library::open(path.as_ref(), Origin::Setting)?;
        Context::open(&library, &Settings::default(), Features { one_sided: true })
    })?;
    let names = |resource: &Resource| (resource.transport.clone(), resource.device.clone());
    let settings = context.settings().iter().map(|setting| {
        let source = match &setting.source {
            Source::Ours => "pdkv".to_owned(),
            Source::Environment => "environment".to_owned(),
            Source::Caller => "caller".to_owned(),
            Source::Skipped(reason) => format!("skipped: {reason}"),
        };
        (setting.name.clone(), setting.value.clone(), source)
    });
    let facts = PyDict::new(py);
    facts.set_item("version", context.library().version().to_string())?;
    facts.set_item("library", context.library().path().display().to_string())?;
    facts.set_item("transports", context.resources().iter().map(names).collect::<Vec<_>>())?;
    facts.set_item("rdma", context.has_rdma())?;
    facts.set_item("cuda", context.knows_gpus())?;
    facts.set_item("assertions", context.library().has_assertions())?;
    facts.set_item("settings", settings.collect::<Vec<_>>())?;
    Ok(facts)
}

/// Where wheels lie, as the search takes it. An origin that is neither is a folder of the system's.
pub(crate) fn places(wheels: Vec<(String, PathBuf)>) -> Vec<(Origin, PathBuf)> {
    let known = [Origin::NixlWheel, Origin::LibucxWheel];
    let origin = |name: &str| known.into_iter().find(|origin| origin.as_str() == name);
    wheels
        .into_iter()
        .map(|(name, folder)| (origin(&name).unwrap_or(Origin::System), folder))
        .collect()
}
