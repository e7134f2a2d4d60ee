//! One loaded copy of UCX: its version, its file, and the tables of its functions.
//!
//! Where copies lie and which to prefer is `find.rs`; here one named file becomes usable or a typed refusal.

use std::ffi::c_uint;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pdkv_core::{Error, ErrorKind, Result};

use crate::abi::constants::{UCP_LIB_ATTR_FIELD_MAX_THREAD_LEVEL, UCS_OK, UCS_THREAD_MODE_MULTI};
use crate::abi::{Ucp, Ucs, Zeroed, ucp_lib_attr_t};
use crate::settings::Setting;
use crate::signals::Handlers;
use crate::symbols::{Object, file_of};
use crate::{file, fork, globals, log};

/// A release of UCX.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
    /// The third.
    pub release: u32,
}

impl Version {
    /// The oldest that has every function needed.
    pub const OLDEST: Self = Self::new(1, 13, 0);

    /// Makes a version.
    pub const fn new(major: u32, minor: u32, release: u32) -> Self {
        Self { major, minor, release }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

/// How a copy of UCX was come by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The caller or the environment named it.
    Setting,
    /// Somebody in this process had loaded it.
    Process,
    /// The dynamic linker found it: HPC-X, DOCA, a distribution.
    System,
    /// It comes inside an installed NIXL wheel.
    NixlWheel,
    /// It comes in the `libucx` wheel, which has no RDMA.
    LibucxWheel,
}

impl Origin {
    /// The name shown to users.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Setting => "setting",
            Self::Process => "process",
            Self::System => "system",
            Self::NixlWheel => "nixl wheel",
            Self::LibucxWheel => "libucx wheel",
        }
    }
}

/// A loaded copy of UCX. Cloning is cheap; the code stays loaded for the life of the process.
#[derive(Clone)]
pub struct Library(Arc<Loaded>);

struct Loaded {
    ucp: Ucp,
    version: Version,
    path: PathBuf,
    origin: Origin,
    globals: Vec<Setting>,
    assertions: bool,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("version", &self.0.version.to_string())
            .field("path", &self.0.path)
            .field("origin", &self.0.origin.as_str())
            .finish()
    }
}

/// Every copy opened so far: a second opening gives the first's tables, and its log stays routed once.
static OPENED: Mutex<Vec<Library>> = Mutex::new(Vec::new());

impl Library {
    /// Loads the libucp at `path`, or takes it from the process if it is loaded already.
    ///
    /// A bare name such as `libucp.so.0` is searched by the dynamic linker. The process's signal handlers are
    /// left as they were, which the library's constructors wouldn't.
    ///
    /// # Errors
    /// `Unsupported` when there is no such library, a function is missing, it is older than 1.13 or was built without
    /// support for threads, or it can't be loaded beside a copy that the process has.
    pub fn open(path: &Path, origin: Origin) -> Result<Self> {
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if let Some(library) = opened.iter().find(|library| library.0.path == real) {
            return Ok(library.clone());
        }
        fork::check("load UCX")?;
        file::refuse(path).map_err(|reason| unloadable(path, &reason))?;
        refuse_to_mix(path)?;
        let foreign = others_have(path);
        let handlers = Handlers::read();
        let object = Object::open(path);
        handlers.restore();
        let object = object.map_err(|reason| unloadable(path, &reason))?;
        let ucp = Ucp::resolve(&object)?;
        let ucs = Ucs::resolve(&object)?;
        let path = file_of(ucp.ucp_get_version as *const _).unwrap_or(real);
        if let Some(library) = opened.iter().find(|library| library.0.path == path) {
            return Ok(library.clone());
        }
        refuse_mixed(&object, &path)?;
        let version = version(&ucp);
        if version < Version::OLDEST {
            return Err(unsupported(format!("`{}` is UCX {version}", path.display()))
                .with_hint(format!("UCX {} or newer is needed", Version::OLDEST)));
        }
        refuse_without_threads(&path, thread_level(&ucp))?;
        if !foreign {
            log::route(&ucs);
        }
        let globals = globals::without_efa(&ucs, &path).into_iter().collect();
        let assertions = has_assertions(&path);
        let library = Self(Arc::new(Loaded {
            ucp,
            version,
            path,
            origin,
            globals,
            assertions,
        }));
        opened.push(library.clone());
        Ok(library)
    }

    /// Its release.
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// The file of libucp, links resolved.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// How it was come by, when first opened.
    pub fn origin(&self) -> Origin {
        self.0.origin
    }

    /// Whether it was built with assertions, as distributions do. Then a peer that dies while a connection is
    /// being made, or any time over UCX's `tcp`, can end this process, and what peers name in messages is not looked
    /// up in a table.
    pub fn has_assertions(&self) -> bool {
        self.0.assertions
    }

    /// Whether it says what carries an operation, as its protocols do by themselves from 1.16 on. Without that no
    /// probe is certain, and one of an emulated put can end the process that it is sent to.
    pub fn tells_what_carries(&self) -> bool {
        self.version() >= Version::new(1, 16, 0)
    }

    /// What was set for the whole copy when it was loaded.
    pub(crate) fn globals(&self) -> &[Setting] {
        &self.0.globals
    }

    pub(crate) fn ucp(&self) -> &Ucp {
        &self.0.ucp
    }
}

fn version(ucp: &Ucp) -> Version {
    let (mut major, mut minor, mut release): (c_uint, c_uint, c_uint) = (0, 0, 0);
    // SAFETY: three integers of ours to write to.
    unsafe { (ucp.ucp_get_version)(&raw mut major, &raw mut minor, &raw mut release) };
    Version::new(major, minor, release)
}

/// Refuses a copy whose calls take no locks: the workers of several threads share a context here.
fn refuse_without_threads(path: &Path, level: u32) -> Result<()> {
    if level >= UCS_THREAD_MODE_MULTI {
        return Ok(());
    }
    Err(unsupported(format!(
        "`{}` was built without support for threads (`--enable-mt`)",
        path.display()
    ))
    .with_hint("name one that was built with it, such as the `ucx/mt` of HPC-X"))
}

fn thread_level(ucp: &Ucp) -> u32 {
    let mut facts = ucp_lib_attr_t::zeroed();
    facts.field_mask = UCP_LIB_ATTR_FIELD_MAX_THREAD_LEVEL;
    // SAFETY: a zeroed struct of ours with the field that its mask names.
    let status = unsafe { (ucp.ucp_lib_query)(&raw mut facts) };
    if status == UCS_OK { facts.max_thread_level } else { 0 }
}

fn unsupported(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, "load UCX", message)
}

fn unloadable(path: &Path, reason: &str) -> Error {
    unsupported(format!("`{}` can't be loaded: {reason}", path.display()))
}

/// Assertions leave their text in the file; this one is in every release.
pub(crate) fn has_assertions(libucp: &Path) -> bool {
    const TEXT: &[u8] = b"->proto_reqs)";
    let Some(file) = file::read(libucp) else {
        return false;
    };
    // SAFETY: two live slices with their lengths.
    let found = unsafe { libc::memmem(file.as_ptr().cast(), file.len(), TEXT.as_ptr().cast(), TEXT.len()) };
    !found.is_null()
}

/// Whether somebody else in the process has this very copy, whose logging isn't ours to take.
fn others_have(path: &Path) -> bool {
    path.to_str().is_some_and(|path| Object::loaded(path).is_some())
}

/// The parts of UCX that libucp asks the linker for, by names that all copies but renamed ones share.
const PARTS: [(&str, &str); 3] = [
    ("libucs.so.0", "ucs_status_string"),
    ("libuct.so.0", "uct_query_components"),
    ("libucm.so.0", "ucm_mmap"),
];

/// The linker gives a second libucp the first's libucs: half one release, half another. That is found out
/// before anything is loaded. A copy in the global scope answers the calls even of one whose files have other names.
fn refuse_to_mix(path: &Path) -> Result<()> {
    let folder = path
        .canonicalize()
        .ok()
        .and_then(|real| real.parent().map(Path::to_owned));
    let global = Object::global().symbol("ucs_status_string").and_then(|it| file_of(it));
    let other = global.filter(|global| match &folder {
        Some(folder) => global.parent() != Some(folder),
        // For a bare name the linker takes the copy that bears it.
        None => !global
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("libucs.so")),
    });
    if let Some(other) = other {
        return Err(mixture(path, &other));
    }
    let Some(folder) = folder else {
        return Ok(());
    };
    for (name, symbol) in PARTS {
        let Ok(own) = folder.join(name).canonicalize() else {
            continue;
        };
        let loaded = Object::loaded(name)
            .and_then(|object| object.symbol(symbol))
            .and_then(|it| file_of(it));
        // By folder: wheels hold each file several times over, since they can't hold links.
        if let Some(loaded) = loaded.filter(|loaded| loaded.parent() != own.parent()) {
            return Err(mixture(path, &loaded));
        }
    }
    Ok(())
}

fn mixture(path: &Path, other: &Path) -> Error {
    unsupported(format!(
        "`{}` can't be loaded beside another copy of UCX: the process has `{}` and would mix the two",
        path.display(),
        other.display()
    ))
    .with_hint("use the copy that the process has, or load this one first")
}

/// The same once more after loading: a path of the linker's may have mixed two copies that lie apart.
fn refuse_mixed(object: &Object, libucp: &Path) -> Result<()> {
    let libucs = object.symbol("ucs_status_string").and_then(|it| file_of(it));
    match libucs {
        Some(libucs) if libucs.parent() != libucp.parent() => Err(unsupported(format!(
            "the linker gave `{}` the foreign `{}`",
            libucp.display(),
            libucs.display()
        ))
        .with_hint("look at LD_LIBRARY_PATH; one copy of UCX must supply all its parts")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::constants::UCS_THREAD_MODE_SERIALIZED;

    #[test]
    fn a_copy_without_locks_is_refused() {
        let path = Path::new("libucp.so.0");
        assert!(refuse_without_threads(path, UCS_THREAD_MODE_MULTI).is_ok());
        for level in [0, UCS_THREAD_MODE_SERIALIZED] {
            let error = refuse_without_threads(path, level).expect_err("its calls take no locks");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains("--enable-mt"), "{error}");
        }
    }
}
