//! A second process for tests: the test binary runs itself again, with one of its tests as the entry.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pdkv_ucx::{
    Context, Delivery, Endpoint, ErrorMode, Features, Inbox, InboxLimits, MemoryHandle, Piece, PieceMemory, RemoteKey,
    Tally, Worker,
};

use super::cases::lane;
use super::{PATIENCE, lanes, library, memory};

const SOCKET: &str = "PDKV_TEST_SOCKET";
const MODE: &str = "PDKV_TEST_PEER_MODE";

/// How much memory each side has.
pub(crate) const MEMORY: u64 = 4 << 20;
/// In the offset of a message: it is of one piece.
pub(crate) const ONE_PIECE: u64 = 1 << 63;
/// The id of messages.
pub(crate) const ID: u16 = 7;
/// What the far side's memory holds at first is `pattern(MEMORY, FAR_SEED)`.
pub(crate) const FAR_SEED: u8 = 2;

/// One side of a connection between two processes.
pub(crate) struct Side {
    pub(crate) socket: UnixStream,
    pub(crate) context: Context,
    pub(crate) memory: Arc<MemoryHandle>,
    pub(crate) worker: Option<Worker>,
    pub(crate) endpoint: Option<Endpoint>,
    pub(crate) key: Option<RemoteKey>,
    pub(crate) inbox: Option<Inbox>,
    mode: ErrorMode,
}

/// The other process; killed when dropped.
pub(crate) struct Far(pub(crate) Child);

impl Drop for Far {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Far {
    /// Sends a signal; one that stops the process is awaited, since its threads stop one after the other.
    pub(crate) fn signal(&self, name: &str) {
        let kill = Command::new("kill")
            .args([format!("-{name}"), self.0.id().to_string()])
            .status()
            .unwrap();
        assert!(kill.success());
        let start = Instant::now();
        while name == "STOP" && !self.stopped() {
            assert!(start.elapsed() < PATIENCE, "it never stopped");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn stopped(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        let stopped = |task: std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("status")).is_ok_and(|status| status.contains("T (stopped)"))
        };
        tasks.map(Result::unwrap).all(stopped)
    }
}

impl Side {
    fn new(socket: UnixStream, mode: ErrorMode, seed: u8) -> Self {
        let lane = lane().unwrap();
        let context = Context::open(&library().unwrap(), &lanes(&lane), Features { one_sided: true }).unwrap();
        let memory = memory(&context, MEMORY, seed);
        Self {
            socket,
            context,
            memory,
            worker: None,
            endpoint: None,
            key: None,
            inbox: None,
            mode,
        }
    }

    /// Makes a worker and connects it with the other side's new one.
    pub(crate) fn connect(&mut self) {
        let worker = Worker::create(&self.context).unwrap();
        self.inbox = Some(worker.receive_messages(ID, InboxLimits::default()).unwrap());
        send(&mut self.socket, &worker.address().unwrap());
        send(&mut self.socket, &self.memory.pack().unwrap());
        send(&mut self.socket, &self.memory.region().address().to_le_bytes());
        let endpoint = worker.connect(&receive(&mut self.socket), self.mode).unwrap();
        let key = receive(&mut self.socket);
        let base = u64::from_le_bytes(receive(&mut self.socket).try_into().unwrap());
        self.key = Some(endpoint.unpack(&key, base, MEMORY).unwrap());
        self.endpoint = Some(endpoint);
        self.worker = Some(worker);
        self.until("the handshake", || self.endpoint().ready());
        // Both ends tell that they are ready, and go on until they hear it.
        send(&mut self.socket, b"ready");
        self.socket.set_nonblocking(true).unwrap();
        let mut first = [0; 1];
        self.until("the other's handshake", || (&self.socket).read(&mut first).is_ok());
        self.socket.set_nonblocking(false).unwrap();
        assert_eq!(rest(&mut self.socket, first[0]), b"ready");
    }

    /// Ends the worker.
    pub(crate) fn disconnect(&mut self) {
        self.worker = None;
        (self.endpoint, self.key, self.inbox) = (None, None, None);
    }

    pub(crate) fn worker(&self) -> &Worker {
        self.worker.as_ref().unwrap()
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        self.endpoint.as_ref().unwrap()
    }

    pub(crate) fn key(&self) -> &RemoteKey {
        self.key.as_ref().unwrap()
    }

    pub(crate) fn piece(&self, offset: u64, len: u64) -> Piece {
        Piece {
            memory: PieceMemory::Mapped(Arc::clone(&self.memory)),
            offset,
            len,
        }
    }

    /// A range as one piece, or as pieces of 4 KiB.
    pub(crate) fn pieces(&self, offset: u64, len: u64, one: bool) -> Vec<Piece> {
        if one {
            return vec![self.piece(offset, len)];
        }
        (0..len / 4096).map(|at| self.piece(offset + at * 4096, 4096)).collect()
    }

    /// Progresses until something holds.
    pub(crate) fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let start = std::time::Instant::now();
        while !holds() {
            if !self.worker().progress() {
                std::thread::yield_now();
            }
            assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        }
    }

    /// Progresses until the tally is idle.
    pub(crate) fn wait(&self, tally: &Tally) {
        self.until("the tally to be idle", || tally.outstanding() == 0);
    }
}

/// Starts the far process and connects with it.
pub(crate) fn start(mode: ErrorMode) -> (Side, Far) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!(
        "pdkv-ucx-{}-{}",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    );
    let path: PathBuf = std::env::temp_dir().join(name);
    let listener = UnixListener::bind(&path).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "far_side", "--test-threads=1", "--nocapture"])
        .env(SOCKET, &path)
        .env(MODE, if mode == ErrorMode::Peer { "peer" } else { "none" })
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let far = Far(child);
    let (socket, _) = listener.accept().unwrap();
    let _ = std::fs::remove_file(&path);
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut side = Side::new(socket, mode, 1);
    side.connect();
    (side, far)
}

/// Asks the far process for a range of its memory.
pub(crate) fn far_bytes(side: &mut Side, offset: u64, len: u64) -> Vec<u8> {
    let mut command = vec![b'b'];
    command.extend(offset.to_le_bytes());
    command.extend(len.to_le_bytes());
    ask(side, &command)
}

/// Gives the far process a command, whose answer comes while this side goes on.
pub(crate) fn ask(side: &mut Side, command: &[u8]) -> Vec<u8> {
    send(&mut side.socket, command);
    side.socket.set_nonblocking(true).unwrap();
    let start = std::time::Instant::now();
    let mut first = [0; 1];
    loop {
        match side.socket.read(&mut first) {
            Ok(1) => break,
            Ok(_) => panic!("the far process is gone"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        if let Some(worker) = &side.worker {
            worker.progress();
        }
        std::thread::yield_now();
        assert!(start.elapsed() < PATIENCE, "no answer to {command:?}");
    }
    side.socket.set_nonblocking(false).unwrap();
    rest(&mut side.socket, first[0])
}

/// The far process: does what it is told until the socket ends. Messages go to the offset in their header.
///
/// Commands: `b` offset len: bytes; `c`: a new connection; `d`: ends the worker; `m` offset len delivery: sends
/// a message of pieces of 4 KiB, or of one piece; `h`: hides the memory from the kernel; `s`: how many messages were
/// sent and received without a failure, and how many with one; `u`: unmaps the memory; `f`: descriptors, threads and resident KiB.
pub(crate) fn serve() {
    let Some(path) = std::env::var_os(SOCKET) else { return };
    // SAFETY: only asks the kernel to end this process when the one that started it ends, stopped or not.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let socket = UnixStream::connect(path).unwrap();
    let mode = if std::env::var(MODE).unwrap() == "peer" {
        ErrorMode::Peer
    } else {
        ErrorMode::None
    };
    let mut side = Side::new(socket, mode, FAR_SEED);
    side.connect();
    let mut tallies: Vec<Tally> = Vec::new();
    let (mut done, mut failed) = (0_u64, 0_u64);
    loop {
        for _ in 0..100 {
            if let Some(worker) = &side.worker {
                worker.progress();
            }
        }
        if let Some(incoming) = side.inbox.as_ref().and_then(Inbox::pop) {
            let offset = u64::from_le_bytes(incoming.header.clone().try_into().unwrap());
            let pieces = side.pieces(offset & !ONE_PIECE, incoming.len(), offset & ONE_PIECE != 0);
            let tally = Tally::new(side.worker());
            incoming.receive(&pieces, &tally).unwrap();
            tallies.push(tally);
        }
        for over in tallies.extract_if(.., |tally| tally.outstanding() == 0) {
            *(if over.failed() > 0 { &mut failed } else { &mut done }) += 1;
        }
        side.socket.set_nonblocking(true).unwrap();
        let mut first = [0; 1];
        let read = side.socket.read(&mut first);
        side.socket.set_nonblocking(false).unwrap();
        match read {
            Ok(1) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::yield_now();
                continue;
            }
            _ => return,
        }
        let command = rest(&mut side.socket, first[0]);
        let number = |at: usize| u64::from_le_bytes(command[at..at + 8].try_into().unwrap());
        match command[0] {
            b'b' => {
                let bytes = super::bytes(&side.memory, number(1), number(9));
                send(&mut side.socket, &bytes);
            }
            b'c' => {
                send(&mut side.socket, b"yes");
                side.connect();
            }
            b'd' => {
                tallies.clear();
                side.disconnect();
                send(&mut side.socket, b"done");
            }
            b'm' => {
                let delivery = if command[17] == 0 {
                    Delivery::Eager
                } else {
                    Delivery::Rendezvous
                };
                let pieces = side.pieces(number(1) & !ONE_PIECE, number(9), number(1) & ONE_PIECE != 0);
                let tally = Tally::new(side.worker());
                side.endpoint()
                    .send_message(ID, &number(1).to_le_bytes(), &pieces, delivery, &tally)
                    .unwrap();
                tallies.push(tally);
                send(&mut side.socket, b"sent");
            }
            b'h' => {
                hide(&side.memory);
                send(&mut side.socket, b"hidden");
            }
            b's' => send(&mut side.socket, &[done.to_le_bytes(), failed.to_le_bytes()].concat()),
            b'u' => {
                let other = memory(&side.context, 4096, 0);
                drop(std::mem::replace(&mut side.memory, other));
                send(&mut side.socket, b"gone");
            }
            b'f' => {
                let facts = facts();
                send(
                    &mut side.socket,
                    &facts.iter().flat_map(|fact| fact.to_le_bytes()).collect::<Vec<u8>>(),
                );
            }
            other => panic!("no command {other}"),
        }
    }
}

/// Takes the right to read and write memory away from everybody, the kernel included, as if it had been unmapped.
pub(crate) fn hide(memory: &MemoryHandle) {
    let region = memory.region();
    let start = std::ptr::with_exposed_provenance_mut(region.address() as usize);
    // SAFETY: a mapping of this test's own, which nothing in this process touches any more.
    let hidden = unsafe { libc::mprotect(start, region.len() as usize, libc::PROT_NONE) };
    assert_eq!(hidden, 0);
}

/// Descriptors, threads and resident KiB of this process.
pub(crate) fn facts() -> [u64; 3] {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count() as u64;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    [
        count("/proc/self/fd"),
        count("/proc/self/task"),
        resident.trim().trim_end_matches(" kB").parse().unwrap(),
    ]
}

fn send(socket: &mut UnixStream, bytes: &[u8]) {
    socket.write_all(&(bytes.len() as u32).to_le_bytes()).unwrap();
    socket.write_all(bytes).unwrap();
}

fn receive(socket: &mut UnixStream) -> Vec<u8> {
    let mut first = [0; 1];
    socket.read_exact(&mut first).unwrap();
    rest(socket, first[0])
}

/// The frame whose first byte was read already.
fn rest(socket: &mut UnixStream, first: u8) -> Vec<u8> {
    let mut len = [first, 0, 0, 0];
    socket.read_exact(&mut len[1..]).unwrap();
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}
