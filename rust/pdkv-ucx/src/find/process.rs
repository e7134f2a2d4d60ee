//! What this process has loaded of UCX, from the text of `/proc/self/maps`.
//!
//! Two copies whose files bear UCX's plain names do not stand each other: the loader binds the second `libucp` to
//! the `libucs` of the first, whatever the folder, and what comes of it is half of each version. A copy whose names
//! a wheel has hashed binds to its own parts only, unless the other is in the global scope, which no map shows:
//! [`Library::open`](crate::Library::open) asks the loader.

use std::fs;
use std::path::{Path, PathBuf};

use super::places::is_named;

/// The UCP libraries that are mapped, in the order of their addresses.
pub(super) fn loaded(maps: &str) -> Vec<PathBuf> {
    mapped(maps, "libucp")
        .into_iter()
        .filter(|path| !path.ends_with(DELETED))
        .map(PathBuf::from)
        .collect()
}

/// Why a copy must not be opened beside what is mapped.
pub(super) fn clash(maps: &str, candidate: &Path) -> Option<String> {
    let name = candidate.file_name()?.to_str()?;
    if !name.starts_with("libucp.so") {
        return None; // hashed, or not UCP's usual name
    }
    let folder = |path: &Path| Some(fs::canonicalize(path.parent()?).ok()?.into_os_string());
    let own = candidate.parent().filter(|parent| !parent.as_os_str().is_empty());
    let own = own.and_then(|_| folder(candidate));
    let other = mapped(maps, "libucs").into_iter().find(|path| {
        let plain = Path::new(path)
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("libucs.so"));
        plain && (own.is_none() || path.ends_with(DELETED) || folder(Path::new(path)) != own)
    })?;
    Some(format!(
        "this process has loaded `{other}` of another copy, to which the loader would bind this one"
    ))
}

/// What the kernel appends to the name of a mapped file that is gone.
const DELETED: &str = " (deleted)";

/// The mapped files of one library, each once.
fn mapped<'a>(maps: &'a str, library: &str) -> Vec<&'a str> {
    let mut found = Vec::new();
    for line in maps.lines() {
        let Some(path) = line.find('/').map(|start| &line[start..]) else {
            continue;
        };
        let name = path.rsplit('/').next().unwrap_or(path);
        if is_named(name, library) && !found.contains(&path) {
            found.push(path);
        }
    }
    found
}
