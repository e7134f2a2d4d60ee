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
    let bare = candidate.parent().is_none_or(|parent| parent.as_os_str().is_empty());
    // For a bare name the loader takes the copy that bears it, if one is loaded.
    let bears = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|own| own.to_string_lossy().starts_with(name))
    };
    let own = if bare {
        loaded(maps)
            .iter()
            .find(|path| bears(path))
            .and_then(|path| folder(path))
    } else {
        folder(candidate)
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "\
7f0000000000-7f0000001000 r-xp 00000000 00:01 1 /usr/lib/libucs.so.0.0.0
7f0000002000-7f0000003000 r-xp 00000000 00:01 2 /usr/lib/libucp.so.0.0.0
";

    #[test]
    fn a_bare_name_is_the_copy_that_bears_it() {
        // Also for the second engine of a process, whose first loaded it by that name.
        assert_eq!(clash(PLAIN, Path::new("libucp.so.0")), None);
        assert!(clash(PLAIN, Path::new("/usr/bin/libucp.so.0")).is_some());
        let hashed = PLAIN.replace("libucp.so", "libucp-0badcafe.so");
        assert!(clash(&hashed, Path::new("libucp.so.0")).is_some());
    }
}
