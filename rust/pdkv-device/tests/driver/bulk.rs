//! From which size of pieces on a copy inside a GPU goes by the bulk engine: measured once, believed only when its bytes are right, and taken then.

use std::path::Path;
use std::sync::{Arc, PoisonError};

use pdkv_core::ErrorKind;
use pdkv_core::plan::Plan;
use pdkv_core::span::Span;
use pdkv_device::cuda::{BulkSize, Cargo, Courier, DeviceRegion, Driver, Gpu, HostPath, HostPaths, Kernels, Reach};

use crate::alone::loaded;
use crate::standin::{ALONE, IMAGE, calls, counts, fail, reset, variant};

/// The engine is the faster one, by the clock of the stand-in.
const FAST: &str = "PDKV_STANDIN_SLOW=copy_tiles";
const BULK: &str = "pdkv2_copy_bulk";

fn count(path: &Path, name: &str) -> i64 {
    counts(path).get(name).copied().unwrap_or(0)
}

/// A fresh set of kernels, of which nothing is known yet.
fn fresh(path: &Path) -> Kernels {
    let gpu = Gpu::open_on(&Driver::open_at(path).unwrap(), 0).unwrap();
    // SAFETY: the stand-in's image, whole; its kernels are those of this release.
    unsafe { Kernels::load(gpu.context(), IMAGE) }.unwrap()
}

#[test]
fn it_is_measured_once_and_its_memory_is_given_back() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(path) = variant("fast-bulk", &[FAST]) else {
        return;
    };
    let kernels = fresh(&path);
    let first = BulkSize::of(&kernels).unwrap();
    assert_eq!(first, BulkSize::From(4096));
    assert_eq!(
        (first.bytes(), first.to_string().as_str()),
        (Some(4096), "from pieces of 4096 bytes on")
    );
    let launches = count(&path, "launches");
    assert!(count(&path, &format!("launches {BULK}")) > 0);
    assert_eq!(BulkSize::of(&kernels).unwrap(), first);
    assert_eq!(count(&path, "launches"), launches);
    let asked = calls(&path);
    assert_eq!((asked["cuMemAllocAsync"], asked["cuMemFreeAsync"]), (2, 2));
    assert_eq!(asked.get("cuMemFree_v2"), None, "freeing so waits for the whole GPU");
    assert_eq!(count(&path, "pool memory"), 0);
    // What is measured of the host's link goes by the same tables.
    let tables = count(&path, "host memory");
    HostPaths::of(&kernels).unwrap();
    assert_eq!(count(&path, "host memory"), tables + 1);
}

#[test]
fn it_is_never_taken_where_it_is_no_faster() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(path) = variant("slow-bulk", &[]) else {
        return;
    };
    let found = BulkSize::of(&fresh(&path)).unwrap();
    assert_eq!(found, BulkSize::Never("it was no faster when it was measured"));
    assert!(count(&path, &format!("launches {BULK}")) > 0);
}

#[test]
fn it_is_never_taken_when_it_wrote_a_wrong_byte() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(path) = variant("wrong-bulk", &[FAST]) else {
        return;
    };
    let kernels = fresh(&path);
    fail(&path, c"wrong pdkv2_copy_bulk", 0, 1);
    let found = BulkSize::of(&kernels);
    reset(&path);
    assert_eq!(found.unwrap(), BulkSize::Wrong);
    assert_eq!(count(&path, "pool memory"), 0);
    assert_eq!(BulkSize::of(&kernels).unwrap().bytes(), None, "nor is it tried again");
}

#[test]
fn it_is_not_measured_where_that_cannot_be_done_in_passing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, setting, why) in [
        ("older", "PDKV_STANDIN_MAJOR=8", "the GPU has none"),
        (
            "without-pools",
            "PDKV_STANDIN_POOLS=0",
            "no memory in the order of streams",
        ),
        ("full", "PDKV_STANDIN_FREE_MIB=63", "too little free memory"),
    ] {
        let Some(path) = variant(name, &[FAST, setting]) else {
            return;
        };
        let found = BulkSize::of(&fresh(&path)).unwrap();
        assert!(found.to_string().contains(why), "{name}: {found}");
        assert_eq!(found.bytes(), None);
        assert_eq!(
            (count(&path, "launches"), count(&path, "calls cuMemAllocAsync")),
            (0, 0),
            "{name}"
        );
    }
}

#[test]
fn a_measurement_that_fails_gives_its_memory_back_and_nothing_is_known() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(path) = variant("failing-bulk", &[FAST]) else {
        return;
    };
    let kernels = fresh(&path);
    for (call, nth) in [(c"cuMemAllocAsync", 2), (c"cuLaunchKernel", 1), (c"cuLaunchKernel", 9)] {
        fail(&path, call, nth, 2);
        let error = BulkSize::of(&kernels).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
        assert_eq!(count(&path, "pool memory"), 0, "{call:?}");
    }
    assert_eq!(BulkSize::of(&kernels).unwrap(), BulkSize::From(4096));
}

/// Carries pieces of one size from one region to another, in another order, and looks at them; says whether the bulk engine did it.
fn carried(path: &Path, gpu: &Gpu, courier: &mut Courier<()>, piece: u64) -> bool {
    const PIECES: u64 = 16;
    let len = 2 * PIECES * piece;
    let bytes: Vec<u8> = (0..len).map(|at| (at * 31 + at / 251) as u8).collect();
    let [from, to] = [(); 2].map(|()| DeviceRegion::allocate(gpu, len).unwrap());
    from.write_at(0, &bytes).unwrap();
    to.write_at(0, &vec![0; len as usize]).unwrap();
    let spans = |step: u64| -> Vec<Span> {
        let place = |number: u64| Span::new(0, number * step % PIECES * 2 * piece, piece);
        (0..PIECES).map(place).collect()
    };
    let (src, dst) = (spans(5), spans(7));
    let before = count(path, &format!("launches {BULK}"));
    let cargo = Cargo {
        plan: Plan::spans(&src, &[len], &dst, &[len]).unwrap(),
        src: Arc::new(vec![Reach::Device(from)]),
        dst: Arc::new(vec![Reach::Device(to.clone())]),
        after: None,
        verify: false,
        owner: (),
    };
    courier.post(cargo).unwrap();
    while courier.is_busy() {
        for landed in courier.landed() {
            landed.outcome.unwrap();
        }
    }
    let mut found = vec![0; len as usize];
    to.read_at(0, &mut found).unwrap();
    let mut expected = vec![0; len as usize];
    for (src, dst) in src.iter().zip(&dst) {
        expected[dst.offset as usize..][..piece as usize]
            .copy_from_slice(&bytes[src.offset as usize..][..piece as usize]);
    }
    assert!(found == expected, "pieces of {piece} bytes");
    count(path, &format!("launches {BULK}")) > before
}

#[test]
fn cargo_inside_a_gpu_takes_it_for_pieces_from_that_size_on_once_it_is_known() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(path) = variant("bulk-cargo", &[FAST]) else {
        return;
    };
    let gpu = loaded(&Driver::open_at(&path).unwrap(), 0);
    let mut courier = Courier::new(&gpu).unwrap();
    assert!(!carried(&path, &gpu, &mut courier, 16 << 10), "nobody has measured it");
    BulkSize::of(gpu.kernels().unwrap()).unwrap();
    assert!(carried(&path, &gpu, &mut courier, 16 << 10));
    assert!(!carried(&path, &gpu, &mut courier, 2 << 10));
    let kernel = HostPaths::always(HostPath::Kernel);
    let mut courier = Courier::forced(&gpu, kernel, BulkSize::From(16 << 10)).unwrap();
    assert!(carried(&path, &gpu, &mut courier, 16 << 10));
    assert!(!carried(&path, &gpu, &mut courier, 8 << 10));
    let mut courier = Courier::forced(&gpu, kernel, BulkSize::Never("a test")).unwrap();
    assert!(!carried(&path, &gpu, &mut courier, 64 << 10));
}
