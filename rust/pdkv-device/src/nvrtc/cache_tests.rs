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
    assert_eq!(cache.load(&Key([1; 32])), None);
    cache.store(&Key([1; 32]), b"one").unwrap();
    cache.store(&Key([2; 32]), b"").unwrap();
    cache.store(&Key([1; 32]), b"newer").unwrap();
    assert_eq!(
        scratch.cache().load(&Key([1; 32])).as_deref(),
        Some(b"newer".as_slice())
    );
    assert_eq!(cache.load(&Key([2; 32])).as_deref(), Some(b"".as_slice()));
    assert_eq!(fs::read_dir(&cache.folder).unwrap().count(), 2);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&cache.folder), 0o700);
    assert_eq!(mode(&cache.path(&Key([1; 32]))), 0o600);
}

#[test]
fn every_damaged_byte_and_every_cut_is_noticed() {
    let scratch = Scratch::new("damage");
    let cache = scratch.cache();
    let (key, path) = (Key([3; 32]), cache.path(&Key([3; 32])));
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
    cache.store(&Key([4; 32]), b"other").unwrap();
    fs::rename(cache.path(&Key([4; 32])), &path).unwrap();
    assert_eq!(cache.load(&key), None);
}

#[test]
fn links_pipes_and_files_that_others_may_write_are_not_read() {
    let scratch = Scratch::new("foreign");
    let cache = scratch.cache();
    let (key, path) = (Key([5; 32]), cache.path(&Key([5; 32])));
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
    let base = || Key::of(&unit, (9, 0), &["-v"]);
    assert_eq!(base(), base());
    let other = |unit: Unit<'_>| Key::of(&unit, (9, 0), &["-v"]);
    let others = [
        Key::of(&unit, (9, 1), &["-v"]),
        Key::of(&unit, (0, 9), &["-v"]),
        Key::of(&unit, (9, 0), &[]),
        other(Unit {
            source: "sourc",
            ..unit
        }),
        other(Unit {
            headers: &[("a.cuh", "texT")],
            ..unit
        }),
        other(Unit { headers: &[], ..unit }),
    ];
    assert!(others.iter().all(|other| *other != base()));
}

/// Sets when an image was last used, in seconds before now.
fn age(path: &Path, seconds: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(seconds))
        .unwrap();
}

#[test]
fn what_was_used_longest_ago_makes_room() {
    let scratch = Scratch::new("room");
    let image = [7; 1000];
    let cache = scratch.cache().with_room(3 * (1000 + HEAD as u64));
    for number in 1..=3 {
        cache.store(&Key([number; 32]), &image).unwrap();
        age(&cache.path(&Key([number; 32])), 100 - u64::from(number));
    }
    assert_eq!(
        cache.stock(),
        Stock {
            images: 3,
            bytes: 3 * (1000 + HEAD as u64)
        }
    );
    // The oldest is read, so the second oldest goes.
    assert!(cache.load(&Key([1; 32])).is_some());
    cache.store(&Key([4; 32]), &image).unwrap();
    let there = |number: u8| cache.path(&Key([number; 32])).exists();
    assert_eq!([1, 2, 3, 4].map(there), [true, false, true, true]);
    // One that is larger than all the room is alone, and stays for the process that needs it.
    cache.store(&Key([5; 32]), &[7; 9000]).unwrap();
    assert_eq!([1, 2, 3, 4, 5].map(there), [false, false, false, false, true]);
}

#[test]
fn what_processes_left_behind_goes_and_what_is_not_ours_stays() {
    let scratch = Scratch::new("left");
    let cache = scratch.cache().with_room(0);
    let names = [".123-0", ".124-7", ".hidden-0", "notes.image", "README"];
    for name in names {
        fs::write(cache.folder.join(name), b"something").unwrap();
        age(&cache.folder.join(name), 7200);
    }
    age(&cache.folder.join(".124-7"), 60);
    cache.store(&Key([1; 32]), b"image").unwrap();
    let there = names.map(|name| cache.folder.join(name).exists());
    assert_eq!(
        there,
        [false, true, true, true, true],
        "another process may still write `.124-7`"
    );
    assert_eq!(cache.stock().images, 1);
}

#[test]
fn processes_may_store_load_and_make_room_at_once() {
    let scratch = Scratch::new("several");
    let cache = scratch.cache().with_room(4 * (100 + HEAD as u64));
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let cache = &cache;
            scope.spawn(move || {
                for round in 0..50_u8 {
                    let key = Key([(thread + round) % 8; 32]);
                    cache.store(&key, &[key.0[0]; 100]).unwrap();
                    // Whole, or gone already.
                    for other in 0..8 {
                        let found = cache.load(&Key([other; 32]));
                        assert!(found.is_none_or(|image| image == [other; 100]));
                    }
                }
            });
        }
    });
    cache.store(&Key([9; 32]), &[9; 100]).unwrap();
    assert!(cache.stock().images <= 4, "{:?}", cache.stock());
    let left = fs::read_dir(&cache.folder).unwrap().count();
    assert_eq!(left, cache.stock().images, "nothing half written is left");
}
