//! What the checked, merging, stoppable faces cost over the raw loops of `limits`: kernel copies and
//! streams, scattered blocks, in ratios of interleaved rounds.
//!
//! `cargo bench -p pdkv-device --bench paths [-- MIB]`. Both sides are this process: the kernel's work for
//! a copy is the same, and the ratio is what is asked for.
#![expect(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a measuring program prints a table of rates"
)]

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use pdkv_device::pattern::{Pages, fill, verify};
use pdkv_device::{CmaBatch, HostRegion, IoBatch, Process, configure_stream, limits};

const ROUNDS: usize = 5;

fn main() {
    // `cargo test --all-targets` runs this too, without the flag: then it only has to work.
    let measuring = std::env::args().any(|arg| arg == "--bench");
    let asked = std::env::args().find_map(|arg| arg.parse::<u64>().ok());
    let moved = asked.unwrap_or(if measuring { 256 } else { 4 }) << 20;
    let (src, dst) = (private(moved * 2), private(moved * 2));
    println!("{:10} {:>8} {:>10} {:>6}", "path", "block", "limit GB/s", "ratio");
    for block in [4096, 16 << 10, 64 << 10, 1 << 20] {
        let from = scattered(moved * 2, moved, block, 3);
        let to = scattered(moved * 2, moved, block, 5);
        for (name, limit, own) in [
            ("cma", &cma_limit as &Path, &cma_own as &Path),
            ("tcp", &tcp_limit, &tcp_own),
            ("fill", &pattern_fill, &pattern_fill),
            ("verify", &pattern_verify, &pattern_verify),
        ] {
            let mut seconds = [const { Vec::new() }; 2];
            for _ in 0..=ROUNDS {
                seconds[0].push(limit(&dst, &to, &src, &from, block).as_secs_f64());
                seconds[1].push(own(&dst, &to, &src, &from, block).as_secs_f64());
            }
            let [limit, own] = seconds.map(median);
            let rate = moved as f64 / limit / 1e9;
            println!("{name:10} {block:>8} {rate:>10.2} {:>6.2}", limit / own);
        }
    }
}

type Path = dyn Fn(&HostRegion, &[u64], &HostRegion, &[u64], u64) -> Duration;

fn private(len: u64) -> Arc<HostRegion> {
    let memory = vec![1_u8; len as usize].leak();
    let address = memory.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: the memory is leaked and used by nobody else.
    unsafe { HostRegion::from_raw(address, len, Box::new(())) }.expect("a valid range")
}

/// Offsets of distinct blocks, scattered by a stride that has no factor in common with their number.
fn scattered(pool: u64, moved: u64, block: u64, stride: u64) -> Vec<u64> {
    let places = pool / block;
    (0..moved / block)
        .map(|i| i * ((places / stride) | 1) % places * block)
        .collect()
}

fn us() -> Process {
    Process::open(std::process::id()).expect("this process is alive")
}

fn cma_limit(dst: &HostRegion, to: &[u64], src: &HostRegion, from: &[u64], block: u64) -> Duration {
    let addresses: Vec<u64> = from.iter().map(|offset| src.address() + offset).collect();
    limits::cma_read(&us(), dst, to, &addresses, block, 1).expect("we may read ourselves")
}

fn cma_own(dst: &HostRegion, to: &[u64], src: &HostRegion, from: &[u64], block: u64) -> Duration {
    let process = us();
    let start = Instant::now();
    let mut batch = CmaBatch::new();
    for (&to, &from) in to.iter().zip(from) {
        if batch.push(dst, to, src.address() + from, block).expect("inside") {
            batch.read(&process).expect("we may read ourselves");
        }
    }
    batch.read(&process).expect("we may read ourselves");
    start.elapsed()
}

fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("listening");
    let server = listener.accept().expect("connecting").0;
    for socket in [&client, &server] {
        configure_stream(socket.as_fd(), Duration::from_millis(50)).expect("a socket");
    }
    (client, server)
}

fn tcp_limit(dst: &HostRegion, to: &[u64], src: &HostRegion, from: &[u64], block: u64) -> Duration {
    let (ours, theirs) = tcp();
    std::thread::scope(|scope| {
        scope.spawn(|| limits::stream_send(&[ours.as_fd()], src, from, block).expect("sent"));
        limits::stream_recv(&[theirs.as_fd()], dst, to, block).expect("received")
    })
}

fn tcp_own(dst: &HostRegion, to: &[u64], src: &HostRegion, from: &[u64], block: u64) -> Duration {
    let (ours, theirs) = tcp();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut batch = IoBatch::new();
            for (i, &from) in from.iter().enumerate() {
                if batch.push(src, from, block).expect("inside") || i + 1 == to.len() {
                    batch.send_all(ours.as_fd(), b"", &stop).expect("sent");
                }
            }
        });
        let start = Instant::now();
        let mut batch = IoBatch::new();
        for (i, &offset) in to.iter().enumerate() {
            if batch.push(dst, offset, block).expect("inside") || i + 1 == to.len() {
                batch.recv_all(theirs.as_fd(), &stop).expect("received");
            }
        }
        start.elapsed()
    })
}

fn pattern_fill(dst: &HostRegion, to: &[u64], _: &HostRegion, _: &[u64], block: u64) -> Duration {
    let pages = Pages::new(to, to, block).expect("a key each");
    let start = Instant::now();
    fill(dst, &pages, 1).expect("inside");
    start.elapsed()
}

fn pattern_verify(dst: &HostRegion, to: &[u64], _: &HostRegion, _: &[u64], block: u64) -> Duration {
    let pages = Pages::new(to, to, block).expect("a key each");
    let start = Instant::now();
    assert!(verify(dst, &pages, 1).expect("inside").is_empty());
    start.elapsed()
}

/// The middle one, the first (warm-up) left out.
fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
