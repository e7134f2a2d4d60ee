//! Where UCX is on this machine: which copies there are, in which order they are tried, and why one was
//! not taken.
//!
//! The order: what the caller or `PDKV_UCX_LIBRARY` names, and then nothing else; a copy that this process
//! has loaded already; the system's; the one inside a NIXL wheel; the `libucx` wheels. Where the host has RDMA
//! devices, copies with an RDMA module come before copies without one; after that, copies built with assertions, which end
//! the process where others report an error, come last. Every attempt is reported with its outcome. The module knows nothing of Python: whoever knows where wheels lie says so in [`Search`].

mod places;
mod process;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use pdkv_core::{Error, ErrorKind, Result};

use crate::library::has_assertions;
use crate::{Library, Origin, Version};

/// The environment variable that names the library to use.
pub const VARIABLE: &str = "PDKV_UCX_LIBRARY";

/// What is known beforehand about where to look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// A `libucp` file, or a folder that holds one. The only one tried, as is what [`VARIABLE`] names.
    pub explicit: Option<PathBuf>,
    /// Folders (or files) of installed wheels, best first.
    pub wheels: Vec<(Origin, PathBuf)>,
}

/// One copy that was found, not opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// How it was found.
    pub origin: Origin,
    /// The file; a bare name is for the loader to find.
    pub path: PathBuf,
    /// The transport modules that lie beside it: `cma`, `cuda`, `ib`, ...
    pub modules: Vec<String>,
    /// Whether it was built with assertions, as distributions do: it aborts where others report an error.
    pub assertions: bool,
    /// Why it can't be opened in this process.
    pub refused: Option<String>,
}

impl Candidate {
    /// Whether modules for RDMA devices lie beside it.
    pub fn has_rdma(&self) -> bool {
        places::has_rdma(&self.modules)
    }
}

/// One place that was looked at, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// How it was found, or what was looked for.
    pub origin: Origin,
    /// The place, in words or as a path.
    pub place: String,
    /// The transport modules that lie beside it.
    pub modules: Vec<String>,
    /// The version that was opened, or why it was not.
    pub outcome: std::result::Result<Version, String>,
}

/// The machine as the search sees it. Tests make one up.
struct Host<'a> {
    variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// Where `/opt`, `/usr` and `/sys` are.
    root: &'a Path,
    /// The text of `/proc/self/maps`.
    maps: &'a dyn Fn() -> String,
}

impl Host<'_> {
    fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }
}

/// Finds a UCX and opens it; says what was tried.
///
/// # Errors
/// `Unsupported` that lists every place with its reason, and hints at what to install.
pub fn find(search: &Search) -> (Result<Library>, Vec<Attempt>) {
    with_this_host(|host| first(host, search, &Library::open, Library::version))
}

/// Every copy in the order in which [`find`] would try them. Opens nothing, because two copies hardly ever
/// stand each other in one process.
pub fn candidates(search: &Search) -> Vec<Candidate> {
    with_this_host(|host| list(host, search))
}

/// The RDMA devices of this host, as the kernel names them.
pub fn rdma_devices() -> Vec<String> {
    with_this_host(devices)
}

fn with_this_host<T>(look: impl FnOnce(&Host<'_>) -> T) -> T {
    look(&Host {
        variable: &|name| std::env::var_os(name),
        root: Path::new("/"),
        maps: &|| fs::read_to_string("/proc/self/maps").unwrap_or_default(),
    })
}

fn devices(host: &Host<'_>) -> Vec<String> {
    places::names(&host.path("/sys/class/infiniband"))
}

fn list(host: &Host<'_>, search: &Search) -> Vec<Candidate> {
    let maps = (host.maps)();
    let candidate = |(origin, path): (Origin, PathBuf)| Candidate {
        origin,
        modules: places::modules(&path, (host.variable)("UCX_MODULE_DIR")),
        assertions: has_assertions(&path),
        refused: process::clash(&maps, &path),
        path,
    };
    if let Some(wanted) = explicit(host, search) {
        return vec![candidate((
            Origin::Setting,
            places::library_in(&wanted).unwrap_or(wanted),
        ))];
    }
    let wheels = search
        .wheels
        .iter()
        .filter_map(|(origin, place)| Some((*origin, places::library_in(place)?)));
    let mut found = Vec::new();
    let mut real = Vec::new();
    let loaded = process::loaded(&maps).into_iter().map(|path| (Origin::Process, path));
    let mut system = places::system(host);
    if system.is_empty() {
        system.push(PathBuf::from(places::LIBRARY)); // the loader may know a place that its configuration does not show
    }
    let system = system.into_iter().map(|path| (Origin::System, path));
    for (origin, path) in loaded.chain(system).chain(wheels) {
        // One file under several names, and folders that are links to one another, are one copy.
        let whole = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
        if !real.contains(&whole) {
            real.push(whole);
            found.push(candidate((origin, path)));
        }
    }
    let wants_rdma = !devices(host).is_empty();
    // The sort is stable: where these are equal, the order stays.
    found.sort_by_key(|candidate| {
        let brittle = candidate.assertions && candidate.origin != Origin::Process;
        (wants_rdma && !candidate.has_rdma(), brittle)
    });
    found
}

fn explicit(host: &Host<'_>, search: &Search) -> Option<PathBuf> {
    let variable = || (host.variable)(VARIABLE).filter(|value| !value.is_empty());
    search.explicit.clone().or_else(|| variable().map(PathBuf::from))
}

/// The first candidate that opens. What is in the process is looked at before each: an attempt that failed
/// leaves parts of its copy behind.
fn first<L>(
    host: &Host<'_>,
    search: &Search,
    open: &dyn Fn(&Path, Origin) -> Result<L>,
    version: impl Fn(&L) -> Version,
) -> (Result<L>, Vec<Attempt>) {
    let mut attempts = Vec::new();
    for Candidate {
        origin, path, modules, ..
    } in list(host, search)
    {
        let opened = process::clash(&(host.maps)(), &path)
            .map_or_else(|| open(&path, origin).map_err(|error| error.message().to_owned()), Err);
        let outcome = opened.as_ref().map(&version).map_err(Clone::clone);
        attempts.push(Attempt {
            origin,
            place: path.display().to_string(),
            modules,
            outcome,
        });
        if let Ok(library) = opened {
            return (Ok(library), attempts);
        }
    }
    if explicit(host, search).is_none() {
        for (origin, what) in [
            (Origin::Process, "this process"),
            (Origin::NixlWheel, "wheels"),
            (Origin::LibucxWheel, "wheels"),
        ] {
            if !attempts.iter().any(|attempt| attempt.origin == origin) {
                attempts.push(Attempt {
                    origin,
                    place: what.to_owned(),
                    modules: Vec::new(),
                    outcome: Err("there is none".to_owned()),
                });
            }
        }
    }
    (Err(nothing(&attempts)), attempts)
}

fn nothing(attempts: &[Attempt]) -> Error {
    let lines: Vec<_> = attempts
        .iter()
        .filter_map(|attempt| {
            let reason = attempt.outcome.as_ref().err()?;
            Some(format!("{} `{}`: {reason}", attempt.origin.as_str(), attempt.place))
        })
        .collect();
    let set = attempts.iter().any(|attempt| attempt.origin == Origin::Setting);
    let hint = if set {
        "name a libucp of UCX 1.13 or newer, or leave the setting out and let pdkv search"
    } else {
        "install the system's UCX (`libucx0`, `ucx`, HPC-X) or a NIXL wheel for RDMA, or `pdkv[ucx]` for UCX without RDMA; \
         `pdkv doctor` shows what was found"
    };
    Error::new(
        ErrorKind::Unsupported,
        "find UCX",
        format!("no usable UCX: {}", lines.join("; ")),
    )
    .with_hint(hint)
}
