//! Which copy is fastest for which block size: plain, AVX2 or AVX-512 stores, or the best of them one
//! block ahead (`CopyPipe`), on scattered blocks.
//!
//! `cargo bench -p pdkv-device --bench copy [-- MIB]` prints, per kind of memory, block size and thread
//! count, the plain path in GB/s and the others as ratios to it, each the median of interleaved rounds.
//! Ratios are what it is for: the machine's load moves all paths of a round alike.
#![expect(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a measuring program prints a table of rates"
)]

use std::sync::Arc;
use std::time::Instant;

use pdkv_device::{CopyPath, CopyPipe, HostRegion, HugePages, copy_fence, copy_with};

/// `None` is the pipe.
const PATHS: [Option<CopyPath>; 4] = [
    Some(CopyPath::Plain),
    Some(CopyPath::Avx2),
    Some(CopyPath::Avx512),
    None,
];
const ROUNDS: usize = 7;

fn main() {
    // `cargo test --all-targets` runs this too, without the flag: then it only has to work.
    let measuring = std::env::args().any(|arg| arg == "--bench");
    let asked = std::env::args().find_map(|arg| arg.parse::<u64>().ok());
    let mib = asked.unwrap_or(if measuring { 512 } else { 8 });
    let moved = mib << 20;
    let pool = moved * 2;
    let kinds: [(&str, Arc<HostRegion>, Arc<HostRegion>); 3] = [
        ("memfd to private", memfd(pool), private(pool)),
        ("memfd to memfd", memfd(pool), memfd(pool)),
        ("private to private", private(pool), private(pool)),
    ];
    println!(
        "{:20} {:>8} {:>7} {:>10} {:>6} {:>7} {:>6}",
        "memory", "block", "threads", "plain GB/s", "avx2", "avx512", "pipe"
    );
    for (name, src, dst) in &kinds {
        src.fill(0, pool, 1).expect("the source is ours");
        dst.fill(0, pool, 2).expect("the destination is ours");
        for threads in [1, 2] {
            for block in [256, 512, 1024, 2048, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
                // Small blocks move less, or the lists would outweigh the bytes.
                let moved = if block < 4096 { moved / 8 } else { moved };
                let (from, to) = (scattered(pool, moved, block, 1), scattered(pool, moved, block, 2));
                let mut seconds = [const { Vec::new() }; 4];
                for _ in 0..=ROUNDS {
                    for (path, seconds) in PATHS.iter().zip(&mut seconds) {
                        seconds.push(run(*path, dst, &to, src, &from, block, threads));
                    }
                }
                let [plain, avx2, avx512, pipe] = seconds.map(median);
                let rate = moved as f64 / plain / 1e9;
                println!(
                    "{name:20} {block:>8} {threads:>7} {rate:>10.2} {:>6.2} {:>7.2} {:>6.2}",
                    plain / avx2,
                    plain / avx512,
                    plain / pipe
                );
            }
        }
    }
}

fn memfd(len: u64) -> Arc<HostRegion> {
    HostRegion::allocate(len, HugePages::Never).expect("enough memory for the pools")
}

fn private(len: u64) -> Arc<HostRegion> {
    let memory = vec![0_u8; len as usize].leak();
    let address = memory.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: the memory is leaked and used by nobody else.
    unsafe { HostRegion::from_raw(address, len, Box::new(())) }.expect("a valid range")
}

/// Offsets of distinct blocks in a shuffled order that depends on `seed` only.
fn scattered(pool: u64, moved: u64, block: u64, seed: u64) -> Vec<u64> {
    let mut places: Vec<u64> = (0..pool / block).collect();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for last in (1..places.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        places.swap(last, (state % (last as u64 + 1)) as usize);
    }
    places.truncate((moved / block) as usize);
    places.iter().map(|place| place * block).collect()
}

fn run(
    path: Option<CopyPath>,
    dst: &HostRegion,
    to: &[u64],
    src: &HostRegion,
    from: &[u64],
    block: u64,
    threads: usize,
) -> f64 {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let part = to.len().div_ceil(threads);
        for (to, from) in to.chunks(part).zip(from.chunks(part)) {
            scope.spawn(move || {
                let Some(path) = path else {
                    let mut pipe = CopyPipe::new();
                    for (&to, &from) in to.iter().zip(from) {
                        pipe.push(dst, to, src, from, block).expect("blocks lie inside");
                    }
                    return pipe.finish().expect("every block was taken");
                };
                for (&to, &from) in to.iter().zip(from) {
                    copy_with(path, dst, to, src, from, block).expect("blocks lie inside");
                }
                copy_fence();
                block
            });
        }
    });
    start.elapsed().as_secs_f64()
}

/// The middle one, the first (warm-up) left out.
fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
