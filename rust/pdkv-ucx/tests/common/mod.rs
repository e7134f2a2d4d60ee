//! What the tests share: the copies of UCX at hand, pairs of workers in one thread, and patience.

#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod cases;
pub(crate) mod processes;
pub(crate) mod sockets;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdkv_device::{HostRegion, HugePages};
use pdkv_ucx::{
    Context, Endpoint, ErrorMode, Features, Library, MemoryHandle, Origin, RemoteKey, Settings, Tally, Worker,
};

/// The lanes that every test of moving bytes runs over.
pub(crate) const LANES: [&str; 4] = ["posix,cma", "sysv,cma", "tcp", "all"];

/// How long a test waits for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// The copies named by `PDKV_TEST_UCX`, and the system's. Those that can't be in one process stand apart: a
/// test that needs one loads it in a process of its own.
pub(crate) fn copies() -> Vec<PathBuf> {
    let named = std::env::var("PDKV_TEST_UCX").unwrap_or_default();
    let mut copies: Vec<PathBuf> = named
        .split(':')
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
        .collect();
    let folders = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    ];
    copies.extend(
        folders
            .iter()
            .map(|folder| Path::new(folder).join("libucp.so.0"))
            .find(|path| path.exists()),
    );
    if copies.is_empty() {
        assert!(
            std::env::var_os("PDKV_UCX_REQUIRED").is_none(),
            "no copy of UCX, and PDKV_UCX_REQUIRED is set"
        );
        println!("skipped: no libucp.so.0 on this system and none named by PDKV_TEST_UCX");
    }
    copies
}

/// The copy of this process: named by the test that started it, or the first that can be had.
pub(crate) fn library() -> Option<Library> {
    let copies = copies();
    let path = std::env::var_os("PDKV_TEST_COPY")
        .map(PathBuf::from)
        .or_else(|| copies.first().cloned())?;
    Some(Library::open(&path, Origin::Setting).unwrap())
}

/// Settings that force these lanes.
pub(crate) fn lanes(tls: &str) -> Settings {
    Settings::new([("TLS".to_owned(), tls.to_owned())])
}

/// Memory filled with a pattern that differs per seed and offset.
pub(crate) fn memory(context: &Context, len: u64, seed: u8) -> Arc<MemoryHandle> {
    let region = HostRegion::allocate(len, HugePages::Never).unwrap();
    region.write_at(0, &pattern(len, seed)).unwrap();
    context.map(&region.into()).unwrap()
}

/// The bytes of `memory`.
pub(crate) fn pattern(len: u64, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at.wrapping_mul(31) ^ (at >> 8)) as u8 ^ seed)
        .collect()
}

/// What a range holds now.
pub(crate) fn bytes(memory: &MemoryHandle, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    memory.region().read_at(offset, &mut bytes).unwrap();
    bytes
}

/// Two connected workers in one thread.
pub(crate) struct Pair {
    pub(crate) context: Context,
    pub(crate) near: Worker,
    pub(crate) far: Worker,
    pub(crate) to_far: Endpoint,
    pub(crate) to_near: Endpoint,
}

impl Pair {
    /// Connects both ways and flushes, so that the lanes are made.
    pub(crate) fn new(library: &Library, settings: &Settings, mode: ErrorMode) -> Self {
        let context = Context::open(library, settings, Features { one_sided: true }).unwrap();
        let (near, far) = (Worker::create(&context).unwrap(), Worker::create(&context).unwrap());
        let to_far = near.connect(&far.address().unwrap(), mode).unwrap();
        let to_near = far.connect(&near.address().unwrap(), mode).unwrap();
        let pair = Self {
            context,
            near,
            far,
            to_far,
            to_near,
        };
        pair.until("the handshake", || pair.to_far.ready() && pair.to_near.ready());
        pair
    }

    /// The peer's view of `memory`.
    pub(crate) fn key(&self, memory: &MemoryHandle) -> RemoteKey {
        let region = memory.region();
        self.to_far
            .unpack(&memory.pack().unwrap(), region.address(), region.len())
            .unwrap()
    }

    /// Progresses both until the tally is idle.
    pub(crate) fn wait(&self, tally: &Tally) {
        self.until("the tally to be idle", || tally.outstanding() == 0);
    }

    /// Progresses both until something holds.
    pub(crate) fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            self.near.progress();
            self.far.progress();
            assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        }
    }
}
