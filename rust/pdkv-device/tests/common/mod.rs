//! A second process for tests: the test binary runs itself again, with one of its tests as the entry.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const SOCKET: &str = "PDKV_TEST_SOCKET";

/// The other process and the socket to it; killed when dropped.
pub(crate) struct Other {
    pub(crate) child: Child,
    pub(crate) socket: UnixStream,
}

impl Other {
    /// Starts the test `entry` of this binary in a process of its own and waits until it connects.
    pub(crate) fn start(entry: &str) -> Self {
        Self::start_with(entry, &[])
    }

    /// The same with an environment of its own.
    pub(crate) fn start_with(entry: &str, environment: &[(&str, &str)]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("pdkv-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path: PathBuf = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", entry, "--test-threads=1"])
            .env(SOCKET, &path)
            .envs(environment.iter().copied())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (socket, _) = listener.accept().unwrap();
        let _ = std::fs::remove_file(&path);
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Self { child, socket }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn word(&mut self) -> u64 {
        word(&mut self.socket)
    }

    pub(crate) fn tell(&mut self, word: u64) {
        tell(&mut self.socket, word);
    }

    /// Ends the process and waits for it.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.kill();
    }
}

/// In the other process: the socket to the test. `None` in an ordinary run of the entry.
pub(crate) fn parent() -> Option<UnixStream> {
    let path = std::env::var_os(SOCKET)?;
    let socket = UnixStream::connect(path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    Some(socket)
}

pub(crate) fn word(socket: &mut UnixStream) -> u64 {
    let mut bytes = [0; 8];
    socket.read_exact(&mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

pub(crate) fn tell(socket: &mut UnixStream, word: u64) {
    socket.write_all(&word.to_le_bytes()).unwrap();
}

/// Waits until the test closes its end.
pub(crate) fn linger(mut socket: UnixStream) {
    let _ = socket.read(&mut [0]);
}

/// Says past the test harness's capture that a test could not do its work here, and why.
pub(crate) fn skipped(test: &str, reason: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason}");
}

/// Bytes that differ from place to place and from seed to seed; the period is no power of two.
pub(crate) fn noise(seed: u64, len: u64) -> Vec<u8> {
    let tile: Vec<u8> = (0..65_537)
        .map(|i: u64| ((i + seed * 31).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
        .collect();
    let mut bytes = tile.repeat(len.div_ceil(65_537) as usize);
    bytes.truncate(len as usize);
    bytes
}
