//! Entries come back whole or not at all, and the folder is the user's own.

use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;

/// A folder that is removed with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("pdkv-cache-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn cache(&self) -> Cache {
        Cache::open(&self.0.join("deep/kernels")).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn an_image_comes_back_and_nothing_else_is_left() {
    let scratch = Scratch::new("back");
    let cache = scratch.cache();
    assert_eq!(cache.load(&[1; 32]), None);
    cache.store(&[1; 32], b"one").unwrap();
    cache.store(&[2; 32], b"").unwrap();
    cache.store(&[1; 32], b"newer").unwrap();
    assert_eq!(scratch.cache().load(&[1; 32]).as_deref(), Some(b"newer".as_slice()));
    assert_eq!(cache.load(&[2; 32]).as_deref(), Some(b"".as_slice()));
    assert_eq!(fs::read_dir(&cache.folder).unwrap().count(), 2);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&cache.folder), 0o700);
    assert_eq!(mode(&cache.path(&[1; 32])), 0o600);
}

#[test]
fn every_damaged_byte_and_every_cut_is_noticed() {
    let scratch = Scratch::new("damage");
    let cache = scratch.cache();
    let (key, path) = ([3; 32], cache.path(&[3; 32]));
    cache.store(&key, b"some image").unwrap();
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        let mut wrong = whole.clone();
        wrong[at] ^= 1;
        for bytes in [wrong.as_slice(), &whole[..at]] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(cache.load(&key), None, "byte {at}");
            assert!(!path.exists(), "byte {at}: the entry is in the way of a new one");
        }
    }
    // The entry of another key under this one's name.
    cache.store(&[4; 32], b"other").unwrap();
    fs::rename(cache.path(&[4; 32]), &path).unwrap();
    assert_eq!(cache.load(&key), None);
}

#[test]
fn links_pipes_and_files_that_others_may_write_are_not_read() {
    let scratch = Scratch::new("foreign");
    let cache = scratch.cache();
    let (key, path) = ([5; 32], cache.path(&[5; 32]));
    cache.store(&key, b"image").unwrap();
    let elsewhere = scratch.0.join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    symlink(&elsewhere, &path).unwrap();
    assert_eq!(cache.load(&key), None);
    assert!(elsewhere.exists());
    cache.store(&key, b"image").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(cache.load(&key), None);
    // Nobody writes to this pipe: a read that waited would hang.
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    assert_eq!(cache.load(&key), None);
}

#[test]
fn a_folder_that_is_not_the_users_own_is_refused() {
    let scratch = Scratch::new("folder");
    let open = scratch.0.join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let link = scratch.0.join("link");
    symlink(&scratch.0, &link).unwrap();
    let file = scratch.0.join("file");
    fs::write(&file, b"").unwrap();
    for (folder, reason) in [(&open, "others may write"), (&link, "no folder"), (&file, "not usable")] {
        let error = Cache::open(folder).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.message().contains(reason), "{error}");
    }
}

#[test]
fn everything_that_shapes_an_image_is_in_its_key() {
    let headers: &[(&str, &str)] = &[("a.cuh", "text")];
    let unit = Unit {
        name: "u.cu",
        source: "source",
        headers,
    };
    let base = || key((13, 0), &unit, Target::Cubin(90), &["-v"]);
    assert_eq!(base(), base());
    let others = [
        key((13, 1), &unit, Target::Cubin(90), &["-v"]),
        key((13, 0), &unit, Target::Ptx(90), &["-v"]),
        key((13, 0), &unit, Target::Cubin(80), &["-v"]),
        key((13, 0), &unit, Target::Cubin(90), &[]),
        key(
            (13, 0),
            &Unit {
                source: "sourc",
                ..unit
            },
            Target::Cubin(90),
            &["-v"],
        ),
        key(
            (13, 0),
            &Unit {
                headers: &[("a.cuh", "texT")],
                ..unit
            },
            Target::Cubin(90),
            &["-v"],
        ),
        key((13, 0), &Unit { headers: &[], ..unit }, Target::Cubin(90), &["-v"]),
    ];
    assert!(others.iter().all(|other| *other != base()));
}
