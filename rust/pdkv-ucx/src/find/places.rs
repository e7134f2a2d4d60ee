//! The folders in which a UCX may lie, and what lies in them. Opens no library.

use std::env::consts::ARCH;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use super::Host;

/// The name under which the loader knows UCP.
pub(super) const LIBRARY: &str = "libucp.so.0";

/// Where HPC-X, DOCA and builds from source put a UCX of their own. A `*` stands for any version.
const ROOTS: &[&str] = &[
    "/opt/hpcx/ucx",
    "/opt/hpcx-*/ucx",
    "/opt/mellanox/hpcx*/ucx",
    "/opt/mellanox/ucx*",
    "/opt/ucx*",
    "/usr/local/ucx*",
];

/// Where the loader looks besides its configuration and the folders of the architecture.
const DEFAULTS: &[&str] = &["/usr/lib64", "/usr/local/lib64", "/usr/local/lib", "/usr/lib"];

/// Below the root of an installation. A build for threads comes first: workers of several threads share a context.
const BELOW_ROOT: &[&str] = &["mt/lib", "lib", "lib64"];

/// The system's copies, best first: what the environment names, separate installations, the loader's folders.
pub(super) fn system(host: &Host<'_>) -> Vec<PathBuf> {
    let variable = |name: &str| (host.variable)(name).filter(|value| !value.is_empty());
    let roots = variable("HPCX_UCX_DIR").map(PathBuf::from).into_iter();
    let roots = roots.chain(variable("HPCX_DIR").map(|folder| Path::new(&folder).join("ucx")));
    let mut folders: Vec<PathBuf> = roots.flat_map(|root| below(&root)).collect();
    folders.extend(variable("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths));
    let separate = ROOTS.iter().flat_map(|pattern| expand(host, pattern));
    folders.extend(separate.flat_map(|root| below(&root)));
    folders.extend(variable("CONDA_PREFIX").map(|folder| Path::new(&folder).join("lib")));
    folders.extend(configured(host));
    folders.push(host.path(&format!("/usr/lib/{ARCH}-linux-gnu")));
    folders.extend(DEFAULTS.iter().map(|folder| host.path(folder)));
    folders.iter().filter_map(|folder| plain_in(folder)).collect()
}

/// The library that a setting or a wheel means: the file itself, or the one in the folder.
pub(super) fn library_in(place: &Path) -> Option<PathBuf> {
    if place.is_file() {
        return Some(place.to_owned());
    }
    in_folder(place).or_else(|| below(place).iter().find_map(|folder| in_folder(folder)))
}

/// Whether a file name is one of UCP's, also one that a wheel gave a hash.
pub(super) fn is_named(name: &str, library: &str) -> bool {
    name.strip_prefix(library)
        .is_some_and(|rest| rest.starts_with(".so") || rest.starts_with('-') && rest.contains(".so"))
}

/// The transport modules beside a library: `libuct_ib.so.0` is `ib`.
pub(super) fn modules(library: &Path, elsewhere: Option<OsString>) -> Vec<String> {
    let beside = library.parent().map(|folder| folder.join("ucx"));
    let Some(folder) = elsewhere.map(PathBuf::from).or(beside) else {
        return Vec::new();
    };
    let mut found: Vec<_> = names(&folder)
        .iter()
        .filter_map(|name| Some(name.strip_prefix("libuct_")?.split_once(".so")?.0.to_owned()))
        .collect();
    found.dedup();
    found
}

/// Whether one of the modules drives RDMA devices. `rdmacm` alone only makes connections.
pub(super) fn has_rdma(modules: &[String]) -> bool {
    modules.iter().any(|module| module == "ib" || module.starts_with("ib_"))
}

/// The names in a folder, sorted; none if it can't be read.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

fn below(root: &Path) -> Vec<PathBuf> {
    BELOW_ROOT.iter().map(|folder| root.join(folder)).collect()
}

/// An empty name, as in a `LD_LIBRARY_PATH` that ends in a colon, would be the working folder: not looked into.
fn plain_in(folder: &Path) -> Option<PathBuf> {
    let plain = folder.join(LIBRARY);
    (!folder.as_os_str().is_empty() && plain.is_file()).then_some(plain)
}

/// Also under a hashed name, for folders of wheels: those of the system are long and hold none.
fn in_folder(folder: &Path) -> Option<PathBuf> {
    if let Some(plain) = plain_in(folder) {
        return Some(plain);
    }
    let hashed = |name: &String| name.starts_with("libucp-") && is_named(name, "libucp");
    names(folder).into_iter().find(hashed).map(|name| folder.join(name))
}

/// The folders that fit a pattern, the highest version first.
fn expand(host: &Host<'_>, pattern: &str) -> Vec<PathBuf> {
    let mut found = vec![host.path("/")];
    for part in pattern.split('/').filter(|part| !part.is_empty()) {
        found = match part.split_once('*') {
            None => found.iter().map(|folder| folder.join(part)).collect(),
            Some((head, tail)) => {
                let fits = |name: &String| name.starts_with(head) && name.ends_with(tail);
                let matching = |folder: &PathBuf| {
                    let fitting = names(folder).into_iter().rev().filter(fits);
                    fitting.map(|name| folder.join(name)).collect::<Vec<_>>()
                };
                found.iter().flat_map(matching).collect()
            }
        };
    }
    found
}

/// The folders that the loader's configuration adds.
fn configured(host: &Host<'_>) -> Vec<PathBuf> {
    let folder = host.path("/etc/ld.so.conf.d");
    let files = names(&folder).into_iter().map(|name| folder.join(name));
    files
        .chain([host.path("/etc/ld.so.conf")])
        .filter(|file| file.extension() == Some(OsStr::new("conf")))
        .filter_map(|file| fs::read_to_string(file).ok())
        .flat_map(|text| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>())
        .filter(|line| line.starts_with('/'))
        .map(|line| host.path(&line))
        .collect()
}
