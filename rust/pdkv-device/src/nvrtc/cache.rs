//! Compiled images on disk, so that a device's kernels are compiled once.
//!
//! An entry is named by what it was made from, and holds a digest of itself: one that is cut, altered or of other origin counts
//! as absent and is made anew. The folder belongs to the user alone; code in it is run on a device. Nothing here is needed: without
//! a usable folder the kernels are compiled each time.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use pdkv_core::digest::parts_digest;
use pdkv_core::{Error, ErrorKind, Result, hex};

use super::{Compiled, Nvrtc, Target, Unit};

const MAGIC: &[u8; 8] = b"pdkv-im1";
/// Magic, key and digest.
const HEAD: usize = 8 + 32 + 32;
/// No image is nearly as large.
const MOST_BYTES: u64 = 64 << 20;

/// A folder of compiled images.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// Compiles a unit, or takes what an earlier call made of the same one. Without a cache, or where it cannot be written, every call
/// compiles.
///
/// # Errors
/// As [`Nvrtc::compile`].
pub fn compile_cached(
    nvrtc: &Nvrtc,
    cache: Option<&Cache>,
    unit: &Unit<'_>,
    target: Target,
    options: &[&str],
) -> Result<Compiled> {
    let Some(cache) = cache else {
        return nvrtc.compile(unit, target, options);
    };
    let key = key(nvrtc.version(), unit, target, options);
    if let Some(image) = cache.load(&key) {
        return Ok(Compiled {
            image,
            log: String::new(),
        });
    }
    let compiled = nvrtc.compile(unit, target, options)?;
    // A full or read-only disk costs the next process a second, nothing else.
    let _ = cache.store(&key, &compiled.image);
    Ok(compiled)
}

/// What an image is made from.
fn key(version: (u32, u32), unit: &Unit<'_>, target: Target, options: &[&str]) -> [u8; 32] {
    let head = format!("{version:?} {target:?} {} {}", options.len(), unit.headers.len());
    let mut parts = vec![head.as_str(), unit.name, unit.source];
    parts.extend(options);
    parts.extend(unit.headers.iter().flat_map(|&(name, text)| [name, text]));
    parts_digest(parts.into_iter().map(str::as_bytes))
}

impl Cache {
    /// Opens the folder, and makes it if there is none.
    ///
    /// # Errors
    /// `Config` when it cannot be made, is a link or no folder, belongs to somebody else, or others may write to it.
    pub fn open(folder: &Path) -> Result<Self> {
        let refuse = |reason: String| {
            let message = format!("the kernel cache `{}` is not usable: {reason}", folder.display());
            Error::new(ErrorKind::Config, "open the kernel cache", message)
        };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|error| refuse(error.to_string()))?;
        let facts = fs::symlink_metadata(folder).map_err(|error| refuse(error.to_string()))?;
        if !facts.is_dir() {
            return Err(refuse("it is no folder".to_owned()));
        }
        check(&facts).map_err(refuse)?;
        Ok(Self {
            folder: folder.to_owned(),
        })
    }

    fn path(&self, key: &[u8; 32]) -> PathBuf {
        self.folder.join(format!("{}.image", hex::encode(key)))
    }

    /// The image of a key; an entry that is not what it was stored as is removed.
    fn load(&self, key: &[u8; 32]) -> Option<Vec<u8>> {
        let path = self.path(key);
        let image = read(&path, key);
        if image.is_none() && path.symlink_metadata().is_ok() {
            let _ = fs::remove_file(&path);
        }
        image
    }

    /// Stores an image; other processes see all of it or nothing.
    fn store(&self, key: &[u8; 32], image: &[u8]) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".{}-{number}", std::process::id());
        let temporary = self.folder.join(name);
        // Left behind by a process of the same number that died.
        let _ = fs::remove_file(&temporary);
        let write = || {
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&temporary)?;
            for part in [MAGIC.as_slice(), key, &parts_digest([key.as_slice(), image]), image] {
                file.write_all(part)?;
            }
            fs::rename(&temporary, self.path(key))
        };
        write().inspect_err(|_| {
            let _ = fs::remove_file(&temporary);
        })
    }
}

/// The image in a file, if it is whole and ours.
fn read(path: &Path, key: &[u8; 32]) -> Option<Vec<u8>> {
    let file: File = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)
        .ok()?;
    let facts = file.metadata().ok()?;
    if !facts.is_file() || facts.len() > MOST_BYTES || check(&facts).is_err() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    let (head, image) = bytes.split_at_checked(HEAD)?;
    let digest = parts_digest([key.as_slice(), image]);
    let same = head[..8] == *MAGIC && head[8..40] == *key && head[40..] == digest;
    same.then(|| image.to_vec())
}

/// Whether only this user can have written it.
fn check(facts: &Metadata) -> Result<(), String> {
    let user = rustix::process::geteuid().as_raw();
    if facts.uid() != user {
        return Err(format!("it belongs to user `{}`, not to `{user}`", facts.uid()));
    }
    if facts.mode() & 0o022 != 0 {
        return Err(format!(
            "others may write to it, its mode is `{:o}`",
            facts.mode() & 0o777
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
