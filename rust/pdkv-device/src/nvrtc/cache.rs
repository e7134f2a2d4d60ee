//! Compiled images on disk, so that a device's kernels are compiled once.
//!
//! An entry is named by what it was made from, and holds a digest of itself: one that is cut, altered or of other origin counts
//! as absent and is made anew. The folder belongs to the user alone; code in it is run on a device. It has a size that it does not pass.
//! Nothing here is needed: without a usable folder the kernels are compiled each time.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use pdkv_core::digest::parts_digest;
use pdkv_core::{Error, ErrorKind, Result, hex};

use super::Unit;

const MAGIC: &[u8; 8] = b"pdkv-im1";
/// Magic, key and digest.
const HEAD: usize = 8 + 32 + 32;
/// No image is nearly as large.
const MOST_BYTES: u64 = 64 << 20;

/// What a folder may hold by default: images of some hundred releases.
const ROOM_BYTES: u64 = 64 << 20;
/// A file that is being written is not older; an older one was left by a process that ended.
const WRITTEN_WITHIN: Duration = Duration::from_secs(3600);

/// A folder of compiled images.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    room_bytes: u64,
}

/// What an image is made from, and for which devices; not by which release of the compiler, which need not be there any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key([u8; 32]);

/// What a folder holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stock {
    /// Images.
    pub images: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Key {
    /// The key of a unit's image for a compute capability.
    pub fn of(unit: &Unit<'_>, (major, minor): (u32, u32), options: &[&str]) -> Self {
        let head = format!("{major}.{minor} {} {}", options.len(), unit.headers.len());
        let mut parts = vec![head.as_str(), unit.name, unit.source];
        parts.extend(options);
        parts.extend(unit.headers.iter().flat_map(|&(name, text)| [name, text]));
        Self(parts_digest(parts.into_iter().map(str::as_bytes)))
    }
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
            room_bytes: ROOM_BYTES,
        })
    }

    /// The same folder with room for so many bytes.
    #[must_use]
    pub fn with_room(self, room_bytes: u64) -> Self {
        Self { room_bytes, ..self }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes that the images may have together.
    pub fn room_bytes(&self) -> u64 {
        self.room_bytes
    }

    /// What it holds.
    pub fn stock(&self) -> Stock {
        let images = self.entries().into_iter().filter(|entry| entry.image);
        images.fold(Stock::default(), |stock, entry| Stock {
            images: stock.images + 1,
            bytes: stock.bytes + entry.bytes,
        })
    }

    /// The file of a key, there or not.
    pub fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(format!("{}.image", hex::encode(&key.0)))
    }

    /// The image of a key; an entry that is not what it was stored as is removed.
    pub fn load(&self, key: &Key) -> Option<Vec<u8>> {
        let path = self.path(key);
        let image = read(&path, key);
        if image.is_none() && path.symlink_metadata().is_ok() {
            self.remove(key);
        }
        image
    }

    /// Removes the image of a key: it is of no use.
    pub fn remove(&self, key: &Key) {
        let _ = fs::remove_file(self.path(key));
    }

    /// Stores an image, and removes those used longest ago while there is no room. Other processes see all of it or nothing.
    ///
    /// # Errors
    /// As the file system says; the image is not stored then.
    pub fn store(&self, key: &Key, image: &[u8]) -> io::Result<()> {
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
            let digest = parts_digest([key.0.as_slice(), image]);
            for part in [MAGIC.as_slice(), &key.0, &digest, image] {
                file.write_all(part)?;
            }
            fs::rename(&temporary, self.path(key))
        };
        write().inspect_err(|_| {
            let _ = fs::remove_file(&temporary);
        })?;
        self.trim(&self.path(key), SystemTime::now());
        Ok(())
    }

    /// Removes what was left behind, and images until the rest has room; `kept` stays.
    ///
    /// Several processes may do so at once: they remove the same ones, and whoever reads one has it open.
    fn trim(&self, kept: &Path, now: SystemTime) {
        let (mut images, others): (Vec<_>, Vec<_>) = self.entries().into_iter().partition(|entry| entry.image);
        let left = |entry: &&Entry| now.duration_since(entry.used).is_ok_and(|age| age > WRITTEN_WITHIN);
        for entry in others.iter().filter(left) {
            let _ = fs::remove_file(&entry.path);
        }
        images.sort_by_key(|entry| entry.used);
        let mut total: u64 = images.iter().map(|entry| entry.bytes).sum();
        for entry in images.iter().filter(|entry| entry.path != kept) {
            if total <= self.room_bytes {
                break;
            }
            if fs::remove_file(&entry.path).is_ok() {
                total -= entry.bytes;
            }
        }
    }

    /// The files in the folder that are ours, images and what is being written.
    fn entries(&self) -> Vec<Entry> {
        let Ok(files) = fs::read_dir(&self.folder) else {
            return Vec::new();
        };
        let entry = |file: fs::DirEntry| {
            let name = file.file_name();
            let name = name.to_str()?;
            let hexadecimal = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let image = name.strip_suffix(".image").is_some_and(hexadecimal);
            let numbers = |text: &str| text.split('-').all(|part| part.parse::<u64>().is_ok());
            if !image && !name.strip_prefix('.').is_some_and(numbers) {
                return None;
            }
            let facts = file.metadata().ok()?;
            Some(Entry {
                path: file.path(),
                image,
                bytes: facts.len(),
                used: facts.modified().ok()?,
            })
        };
        files.flatten().filter_map(entry).collect()
    }
}

/// A file of the cache.
struct Entry {
    path: PathBuf,
    image: bool,
    bytes: u64,
    /// When an image was stored or last read.
    used: SystemTime,
}

/// The image in a file, if it is whole and ours.
fn read(path: &Path, Key(key): &Key) -> Option<Vec<u8>> {
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
    (&file).take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    let (head, image) = bytes.split_at_checked(HEAD)?;
    let digest = parts_digest([key.as_slice(), image]);
    let same = head[..8] == *MAGIC && head[8..40] == *key && head[40..] == digest;
    if !same {
        return None;
    }
    // The time of change stands for the time of use, which many file systems do not keep.
    let _ = file.set_modified(SystemTime::now());
    Some(image.to_vec())
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
