//! Host memory between a device and a link: what is packed comes out again, by either path, and no more is held than was allowed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_device::Stop;
use pdkv_device::cuda::{
    DeviceRegion, Driver, Gpu, Holder, HostDirection, HostPath, HostPaths, Kernels, Stage, Staging, has_batch,
    least_staging_bytes,
};

use crate::alone::loaded;
use crate::standin::{ALONE, Held, IMAGE, calls, counts, fail, reset, variant, whole};

const BYTES: u64 = 300_000;
/// Nobody loses patience.
const NEVER: Duration = Duration::MAX;
const A: Holder = Holder(1);
const B: Holder = Holder(2);
const C: Holder = Holder(3);

fn region(gpu: &Gpu, seed: u64) -> (Arc<DeviceRegion>, Vec<u8>) {
    let bytes: Vec<u8> = (0..BYTES).map(|at| ((at * 31 + at / 251) ^ seed) as u8).collect();
    let region = DeviceRegion::allocate(gpu, BYTES).unwrap();
    region.write_at(0, &bytes).unwrap();
    (region, bytes)
}

/// Uneven pieces of a region, apart, in descending order: offset and bytes.
fn pieces() -> Vec<(u64, u64)> {
    let mut at = 0;
    let mut list = Vec::new();
    for number in 0..60_u64 {
        let len = [1, 16, 4096, 37, 10_000][number as usize % 5];
        list.push((at, len));
        at += len + number % 3;
    }
    assert!(at <= BYTES);
    list.reverse();
    list
}

#[test]
fn what_is_packed_comes_out_elsewhere() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = loaded(&driver, 0);
    let never = AtomicBool::new(false);
    let (from, bytes) = region(&gpu, 0);
    let (to, untouched) = region(&gpu, 0x55);
    for way in [HostPath::Kernel, HostPath::Batch] {
        to.write_at(0, &untouched).unwrap();
        let staging = Staging::forced(&gpu, 256 << 10, NEVER, HostPaths::always(way)).unwrap();
        let before = calls(path).get("cuMemcpyBatchAsync").copied().unwrap_or(0);
        let mut stage = staging.take(A, &never).unwrap();
        let mut packed: Vec<u8> = Vec::new();
        for &(offset, len) in &pieces() {
            assert_eq!(stage.push(&from, offset, len).unwrap(), len);
            packed.extend(&bytes[offset as usize..][..len as usize]);
        }
        stage.pack().unwrap();
        let mut found = vec![0; packed.len()];
        assert_eq!(stage.bytes(), packed.len() as u64);
        stage.host().unwrap().read_at(0, &mut found).unwrap();
        assert!(found == packed, "{way:?}");
        stage.clear();
        for &(offset, len) in &pieces() {
            stage.push(&to, offset, len).unwrap();
        }
        stage.unpack().unwrap();
        let mut expected = untouched.clone();
        for &(offset, len) in &pieces() {
            let (from, to) = (offset as usize, (offset + len) as usize);
            expected[from..to].copy_from_slice(&bytes[from..to]);
        }
        let mut found = vec![0; BYTES as usize];
        to.read_at(0, &mut found).unwrap();
        assert!(found == expected, "{way:?}");
        let batches = calls(path).get("cuMemcpyBatchAsync").copied().unwrap_or(0) - before;
        assert_eq!(batches, if way == HostPath::Batch { 2 } else { 0 });
    }
}

#[test]
fn stages_are_bounded_shared_and_waited_for() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, _)) = whole() else {
        return;
    };
    let gpu = loaded(&driver, 0);
    let (never, stopped) = (AtomicBool::new(false), AtomicBool::new(true));
    let (from, _) = region(&gpu, 0);
    let staging = Staging::forced(&gpu, 100_000, NEVER, HostPaths::always(HostPath::Kernel)).unwrap();
    assert!(staging.bytes() <= 100_000);
    let mut only = staging.take(A, &never).unwrap();
    // As much as there is room for, and no more.
    assert_eq!(only.push(&from, 0, 50_000).unwrap(), 50_000);
    let rest = only.push(&from, 50_000, 99_000).unwrap();
    assert!(rest < 50_000 && only.is_full());
    assert_eq!(only.push(&from, 50_000 + rest, 1).unwrap(), 0);
    let error = only.push(&from, BYTES - 1, 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Region);
    let error = staging.take(A, &stopped).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransferCancelled);
    // Whoever waits gets it when it is free, and finds nothing of the last user's in it.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| staging.take(A, &never).map(|stage| stage.bytes()));
        drop(only);
        assert_eq!(waiting.join().unwrap().unwrap(), 0);
    });
    // Who waits looks at the flag.
    let taken = staging.take(A, &never).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| staging.take(A, &stop).map(drop));
        stop.store(true, Ordering::Relaxed);
        assert_eq!(
            waiting.join().unwrap().unwrap_err().kind(),
            ErrorKind::TransferCancelled
        );
    });
    drop(taken);
}

#[test]
fn stages_are_shared_out_and_who_came_first_is_served_first() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, _)) = whole() else {
        return;
    };
    let gpu = loaded(&driver, 0);
    let (never, stopped) = (AtomicBool::new(false), AtomicBool::new(true));
    let staging = Staging::forced(&gpu, 8 << 20, NEVER, HostPaths::always(HostPath::Kernel)).unwrap();
    let part = staging.take(A, &never).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // One is free, but not for A, which has its part.
        let more = scope.spawn(|| staging.take(A, &stop).map(drop));
        let other = staging.take(B, &never).unwrap();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(more.join().unwrap().unwrap_err().kind(), ErrorKind::TransferCancelled);
        assert!(
            staging.take(C, &stopped).is_err(),
            "whoever is stopped waits for nothing"
        );
        drop(other);
    });
    // The last one goes to those who wait in the order in which they came.
    let last = staging.take(B, &never).unwrap();
    let (served, order) = channel();
    std::thread::scope(|scope| {
        for holder in [C, B, A, C] {
            let (staging, served, waits) = (&staging, served.clone(), Told::default());
            let told = Arc::clone(&waits.0);
            scope.spawn(move || {
                let stage = staging.take(holder, &waits).unwrap();
                served.send(holder).unwrap();
                drop(stage);
            });
            // It is in the queue once it has looked whether to stop.
            while !told.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        }
        drop(last);
        let all: Vec<_> = order.iter().take(3).collect();
        // A has its part still, and is passed over.
        assert_eq!(all, [C, B, C]);
        drop(part);
        assert_eq!(order.recv().unwrap(), A);
    });
}

/// Never stops anybody, and says whether it was asked.
#[derive(Default)]
struct Told(Arc<AtomicBool>);

impl Told {
    /// Waits until it is asked once more.
    fn again(&self) {
        self.0.store(false, Ordering::Relaxed);
        while !self.0.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
    }
}

impl Stop for Told {
    fn stopped(&self) -> bool {
        self.0.store(true, Ordering::Relaxed);
        false
    }
}

#[test]
fn a_peer_that_keeps_a_stage_waiting_is_told_once_others_want_it() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, _)) = whole() else {
        return;
    };
    let gpu = loaded(&driver, 0);
    let never = AtomicBool::new(false);
    let patience = Duration::from_millis(100);
    let staging = Staging::forced(&gpu, 64 << 10, patience, HostPaths::always(HostPath::Kernel)).unwrap();
    let stage = staging.take(A, &never).unwrap();
    stage.clock().start();
    std::thread::sleep(patience * 2);
    assert!(stage.overdue().is_none(), "nobody wants it");
    let (asked, stop) = (Told::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| staging.take(A, &Both(&asked, &stop)).map(drop));
        for _ in 0..8 {
            asked.again();
        }
        assert!(stage.overdue().is_none(), "nobody else wants it");
        stop.store(true, Ordering::Relaxed);
        assert!(waiting.join().unwrap().is_err());
    });
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| staging.take(B, &never).map(drop));
        while !stage.clock().stopped() {
            std::thread::yield_now();
        }
        let error = stage.overdue().unwrap();
        assert_eq!(error.kind(), ErrorKind::TransferTimeout);
        assert!(error.message().contains("kept a stage"), "{error}");
        drop(stage);
        waiting.join().unwrap().unwrap();
    });
    // What takes time here is not the peer's.
    let stage = staging.take(A, &never).unwrap();
    let (asked, stop) = (Told::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| staging.take(B, &Both(&asked, &stop)).map(drop));
        for _ in 0..8 {
            asked.again();
        }
        assert!(stage.overdue().is_none());
        stop.store(true, Ordering::Relaxed);
        assert!(waiting.join().unwrap().is_err());
    });
}

/// Asks for a stage, and panics when it is to wait.
struct Panics;

impl Stop for Panics {
    fn stopped(&self) -> bool {
        panic!("as the test wants")
    }
}

#[test]
fn whoever_panics_in_the_queue_is_not_waited_for() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, _)) = whole() else {
        return;
    };
    let gpu = loaded(&driver, 0);
    let staging = Staging::forced(&gpu, 64 << 10, NEVER, HostPaths::always(HostPath::Kernel)).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| staging.take(A, &Panics).map(drop));
        assert!(thread.join().is_err());
    });
    staging.take(B, &AtomicBool::new(false)).unwrap();
}

/// The first is told, the second stops.
struct Both<'a>(&'a Told, &'a AtomicBool);

impl Stop for Both<'_> {
    fn stopped(&self) -> bool {
        self.0.stopped() || self.1.stopped()
    }
}

#[test]
fn a_stage_whose_copy_failed_is_replaced() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = loaded(&driver, 0);
    let never = AtomicBool::new(false);
    let (from, _) = region(&gpu, 0);
    let staging = Staging::forced(&gpu, 64 << 10, NEVER, HostPaths::always(HostPath::Kernel)).unwrap();
    let mut stage = staging.take(A, &never).unwrap();
    stage.push(&from, 0, 1000).unwrap();
    fail(path, c"cuLaunchKernel", 1, 1);
    let error = stage.pack().unwrap_err();
    reset(path);
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(error.message().contains("`cuLaunchKernel` returned `1`"), "{error}");
    assert_eq!(stage.pack().unwrap_err().kind(), ErrorKind::Device);
    assert_eq!(stage.host().unwrap_err().kind(), ErrorKind::Device);
    drop(stage);
    let mut stage = staging.take(A, &never).unwrap();
    stage.push(&from, 0, 1000).unwrap();
    // A wait that fails while somebody captures a graph has not failed the copy.
    fail(path, c"cuStreamSynchronize", 1, 900);
    stage.pack().unwrap();
    reset(path);
    // Nor does it end while the copy may still run, for then others would get the stage.
    stage.clear();
    stage.push(&from, 0, 1000).unwrap();
    let looks = || calls(path).get("cuEventQuery").copied().unwrap_or(0);
    let held = Held::new(path);
    for call in [c"cuEventQuery", c"cuStreamSynchronize"] {
        fail(path, call, 0, 304);
    }
    std::thread::scope(|scope| {
        let start = looks();
        let packs = scope.spawn(|| stage.pack());
        while looks() < start + 100 && !packs.is_finished() {
            std::thread::yield_now();
        }
        assert!(!packs.is_finished());
        drop(held);
        packs.join().unwrap().unwrap();
    });
}

#[test]
fn what_is_faster_is_measured_once_and_never_guessed() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = Gpu::open_on(&driver, 0).unwrap();
    // SAFETY: the stand-in's image, whole; its kernels are those of this release.
    let kernels = unsafe { Kernels::load(gpu.context(), IMAGE) }.unwrap();
    let launches = || calls(path).get("cuLaunchKernel").copied().unwrap_or(0);
    assert!(has_batch(gpu.context()));
    let before = launches();
    let first = HostPaths::of(&kernels).unwrap();
    let measured = launches();
    assert!(measured > before);
    let again = HostPaths::of(&kernels).unwrap();
    assert_eq!((again, launches()), (first, measured));
    // Without batches there is nothing to measure.
    let Some(old) = variant("without-batches", &["PDKV_STANDIN_VERSION=12040"]) else {
        return;
    };
    let gpu = Gpu::open_on(&Driver::open_at(&old).unwrap(), 0).unwrap();
    // SAFETY: as above.
    let kernels = unsafe { Kernels::load(gpu.context(), IMAGE) }.unwrap();
    let paths = HostPaths::of(&kernels).unwrap();
    assert_eq!(paths, HostPaths::always(HostPath::Kernel));
    assert_eq!(paths.choose(HostDirection::ToDevice, 1 << 30, 1), HostPath::Kernel);
}

#[test]
fn what_is_pinned_is_never_more_than_was_said_however_small_the_pieces() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((driver, path)) = whole() else {
        return;
    };
    let gpu = loaded(&driver, 0);
    let stopped = AtomicBool::new(true);
    let (from, bytes) = region(&gpu, 0);
    let (to, _) = region(&gpu, 0x55);
    let pinned = |name: &str| u64::try_from(counts(path).get(name).copied().unwrap_or(0)).unwrap();
    let least = least_staging_bytes();
    // The longest pieces are some kilobytes, the shortest a byte, of which a stage has more than it has room for tables of.
    for (bound, len) in [
        (least, 1),
        (least + 1, 7),
        (3 * least, 16),
        (1 << 20, 100),
        (9 << 20, 3000),
    ] {
        reset(path);
        let before = pinned("pinned bytes");
        let staging = Staging::forced(&gpu, bound, NEVER, HostPaths::always(HostPath::Kernel)).unwrap();
        let mut stages = Vec::new();
        // Each for somebody else, who would get it all in the end.
        while let Some(stage) = take_now(&staging, Holder(stages.len() as u64)) {
            stages.push(stage);
        }
        assert!(staging.take(A, &stopped).is_err());
        for stage in &mut stages {
            to.write_at(0, &vec![0; BYTES as usize]).unwrap();
            // Every other piece.
            let mut expected = vec![0; BYTES as usize];
            let places: Vec<_> = (0..BYTES / (2 * len)).map(|number| number * 2 * len).collect();
            let mut packed = 0;
            for &at in &places {
                packed += stage.push(&from, at, len).unwrap();
                if stage.is_full() {
                    break;
                }
            }
            stage.pack().unwrap();
            stage.clear();
            let mut left = packed;
            for &at in &places {
                let some = len.min(left);
                assert_eq!(stage.push(&to, at, some).unwrap(), some);
                expected[at as usize..(at + some) as usize].copy_from_slice(&bytes[at as usize..(at + some) as usize]);
                left -= some;
                if left == 0 {
                    break;
                }
            }
            stage.unpack().unwrap();
            let mut found = vec![0; BYTES as usize];
            to.read_at(0, &mut found).unwrap();
            assert!(found == expected, "{bound}, {len}");
        }
        let most = pinned("most pinned bytes") - before;
        assert!(
            most <= bound && most == staging.bytes(),
            "{most} of {bound} for {}",
            stages.len()
        );
        drop((stages, staging));
        assert_eq!(pinned("pinned bytes"), before);
    }
    let error = Staging::new(&gpu, least - 1, NEVER, false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let said = [least - 1, least].map(|number| format!("`{number}`"));
    assert!(said.iter().all(|number| error.message().contains(number)), "{error}");
}

/// A stage, if one is free.
fn take_now(staging: &Arc<Staging>, holder: Holder) -> Option<Stage> {
    staging.take(holder, &Once::default()).ok()
}

/// Stops whoever asks a second time, which is after a wait.
#[derive(Default)]
struct Once(AtomicBool);

impl Stop for Once {
    fn stopped(&self) -> bool {
        self.0.swap(true, Ordering::Relaxed)
    }
}
